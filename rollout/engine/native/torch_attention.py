"""Paged attention in torch: which slots a row reads, and the two ways it reads them.

Exact: one row at a time over exactly its own keys, so every shape depends on the row's position alone.
Fast: sequences with a like number of rows in one padded SDPA call, the query group folded into the
query length (``enable_gqa`` is several times slower on CPUs).

Shapes: M rows, S sequences of a group, Q rows of the longest one, T keys of the longest one,
N KV heads, G query heads per KV head, H head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.policy.spec import ModelSpec


class TorchKV:
    """Keys and values of a page pool: one slot per token, on every plane."""

    def __init__(self, spec: ModelSpec, *, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        if pages < 1:
            raise ValueError(f"a KV pool needs at least one page, got {pages}")
        self.pages = pages
        shape = (spec.planes, pages * PAGE_TOKENS, spec.kv_heads, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def bytes_per_page(self) -> int:
        """Over all planes, keys and values."""
        return 2 * self.keys.nbytes // self.pages

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page on every plane."""
        at, to = source * PAGE_TOKENS, target * PAGE_TOKENS
        for store in (self.keys, self.values):
            store[:, to : to + PAGE_TOKENS].copy_(store[:, at : at + PAGE_TOKENS])

    def occupy(self, pages: Sequence[int]) -> None:
        """Write back one number of every slot: slots are far smaller than the system's pages."""
        first = torch.tensor(pages, dtype=torch.long, device=self.keys.device) * PAGE_TOKENS
        slots = (first[:, None] + torch.arange(PAGE_TOKENS, device=first.device)).flatten()
        for store in (self.keys, self.values):
            store[:, slots, 0, 0] = store[:, slots, 0, 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceGroup:
    """Sequences of one batch that attend in one call. Padding repeats a sequence's own last row and key,
    so nothing of another sequence is ever read, not even to be masked."""

    rows_SQ: Tensor
    slots_ST: Tensor
    readable_SQT: Tensor
    """Whether a row reads a key."""

    place_K: Tensor
    """Where each real row stands in the flattened (S, Q) result."""

    target_K: Tensor
    """Which row of the batch it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """All that the layers of one forward share."""

    write_slots_M: Tensor
    positions_M: Tensor
    read_slots: tuple[Tensor, ...]
    """Exact: the slots each row reads, oldest first."""

    groups: tuple[SequenceGroup, ...]
    """Fast: the batch, by sequence."""


def plan_attention(
    batch: RowBatch, *, window: int | None, exact: bool, device: torch.device
) -> AttentionPlan:
    """Return where rows write and what they read."""
    # Planning is many small look-ups: done on the CPU, moved once.
    positions_M, table_M = batch.positions_M.long().cpu(), batch.table_M.long().cpu()
    pages_SP = batch.page_table_SP.long().cpu()
    write_slots_M = _slots(pages_SP, table_M, positions_M)
    reads: list[Tensor] = []
    groups: list[SequenceGroup] = []
    if exact:
        for table, position in zip(table_M.tolist(), positions_M.tolist(), strict=True):
            first = 0 if window is None else max(0, position - window + 1)
            keys_T = torch.arange(first, position + 1)
            reads.append(_slots(pages_SP, torch.tensor(table), keys_T).to(device))
    else:
        for rows in _alike(table_M.tolist()):
            groups.append(_group(rows, table_M, positions_M, pages_SP, window=window, device=device))
    return AttentionPlan(
        write_slots_M=write_slots_M.to(device),
        positions_M=positions_M.to(device),
        read_slots=tuple(reads),
        groups=tuple(groups),
    )


def _slots(pages_SP: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return pages_SP[table, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


def _alike(tables: Sequence[int]) -> list[list[list[int]]]:
    """Return rows by sequence, and sequences by their row count rounded up to a power of two."""
    by_table: dict[int, list[int]] = {}
    for row, table in enumerate(tables):
        by_table.setdefault(table, []).append(row)
    by_size: dict[int, list[list[int]]] = {}
    for rows in by_table.values():
        by_size.setdefault((len(rows) - 1).bit_length(), []).append(rows)
    return list(by_size.values())


def _group(
    rows: Sequence[Sequence[int]],
    table_M: Tensor,
    positions_M: Tensor,
    pages_SP: Tensor,
    *,
    window: int | None,
    device: torch.device,
) -> SequenceGroup:
    width = max(len(r) for r in rows)
    rows_SQ = torch.tensor([[*r, *[r[-1]] * (width - len(r))] for r in rows])
    positions_SQ = positions_M[rows_SQ]
    last_S1 = positions_SQ.amax(1, keepdim=True)
    keys_T = torch.arange(int(last_S1.max()) + 1)
    slots_ST = _slots(pages_SP, table_M[rows_SQ[:, :1]], torch.minimum(keys_T[None], last_S1))
    behind_SQT = positions_SQ[:, :, None] - keys_T
    readable_SQT = behind_SQT >= 0
    if window is not None:
        readable_SQT &= behind_SQT < window
    places = [s * width + q for s, r in enumerate(rows) for q in range(len(r))]
    return SequenceGroup(
        rows_SQ=rows_SQ.to(device),
        slots_ST=slots_ST.to(device),
        readable_SQT=readable_SQT.to(device),
        place_K=torch.tensor(places).to(device),
        target_K=torch.tensor([m for r in rows for m in r]).to(device),
    )


def attend_row(query_NGH: Tensor, keys_XNH: Tensor, values_XNH: Tensor, slots_T: Tensor) -> Tensor:
    """Return one row's attention (N, G, H) over the keys at ``slots_T``, reduced oldest first.

    Every operand is a fresh contiguous tensor of a shape given by the number of keys alone; half
    precisions are computed in float32.
    """
    accurate = query_NGH.dtype if query_NGH.dtype.itemsize >= 4 else torch.float32
    keys_NHT = keys_XNH[slots_T].to(accurate).permute(1, 2, 0).contiguous()
    values_NTH = values_XNH[slots_T].to(accurate).permute(1, 0, 2).contiguous()
    scores_NGT = torch.bmm(query_NGH.to(accurate), keys_NHT) * query_NGH.shape[-1] ** -0.5
    return torch.bmm(scores_NGT.softmax(-1), values_NTH).to(query_NGH.dtype)


def attend_groups(
    query_MNGH: Tensor, keys_XNH: Tensor, values_XNH: Tensor, groups: Sequence[SequenceGroup]
) -> Tensor:
    """Return the attention of all rows (M, N, G, H), one SDPA call per group."""
    result_MNGH = torch.empty_like(query_MNGH)
    kv_heads, group, head_dim = query_MNGH.shape[1:]
    for part in groups:
        sequences, width = part.rows_SQ.shape
        query_SNGQH = query_MNGH[part.rows_SQ].permute(0, 2, 3, 1, 4)
        # One KV head serves its whole query group: its heads become further queries of that head.
        folded = query_SNGQH.reshape(sequences, kv_heads, group * width, head_dim)
        keys_SNTH = keys_XNH[part.slots_ST].transpose(1, 2)
        values_SNTH = values_XNH[part.slots_ST].transpose(1, 2)
        mask = part.readable_SQT[:, None].repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(folded, keys_SNTH, values_SNTH, attn_mask=mask)
        out_KNGH = (
            out.view(sequences, kv_heads, group, width, head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(sequences * width, kv_heads, group, head_dim)
        )
        result_MNGH[part.target_K] = out_KNGH[part.place_K]
    return result_MNGH
