"""Fast attention on torch's own SDPA: runs everywhere, and is what other kernels are compared with.

Sequences with a like number of rows go into one padded call, the query group folded into the query length
(``enable_gqa`` is several times slower on CPUs).

Shapes: M rows, S sequences of a group, Q rows of the longest one, T keys of the longest one, K real rows,
N KV heads, G query heads per KV head, H head dimension, X slots of the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engine.native.rows import RowBatch
from rollout.engine.native.torch_forward.attention import PaddedSequences, Reads, padded_slots, slots_of


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
class GroupedReads:
    """Implements ``Reads`` with one call per group."""

    groups: tuple[SequenceGroup, ...]

    def attend(self, query_MNGH: Tensor, keys_XNH: Tensor, values_XNH: Tensor) -> Tensor:
        """See ``Reads``."""
        result_MNGH = torch.empty_like(query_MNGH)
        for part in self.groups:
            query_SQNGH = query_MNGH[part.rows_SQ]
            out_SQNGH = attend_folded(query_SQNGH, keys_XNH, values_XNH, part.slots_ST, part.readable_SQT)
            result_MNGH[part.target_K] = out_SQNGH.flatten(0, 1)[part.place_K]
        return result_MNGH


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedReads:
    """Implements ``Reads`` for rows that are a padded (S, Q) already."""

    slots_ST: Tensor
    readable_SQT: Tensor

    def attend(self, query_MNGH: Tensor, keys_XNH: Tensor, values_XNH: Tensor) -> Tensor:
        """See ``Reads``."""
        query_SQNGH = query_MNGH.reshape(*self.readable_SQT.shape[:2], *query_MNGH.shape[1:])
        out_SQNGH = attend_folded(query_SQNGH, keys_XNH, values_XNH, self.slots_ST, self.readable_SQT)
        return out_SQNGH.flatten(0, 1)


class SdpaAttention:
    """Implements ``FastAttention``."""

    description = "sdpa"

    def plan(self, batch: RowBatch, *, window: int | None, device: torch.device) -> Reads:
        """See ``FastAttention``."""
        positions_M, table_M = batch.positions_M.long().cpu(), batch.table_M.long().cpu()
        pages_SP = batch.page_table_SP.long().cpu()
        return GroupedReads(
            groups=tuple(
                _group(rows, table_M, positions_M, pages_SP, window=window, device=device)
                for rows in _alike(table_M.tolist())
            )
        )

    def plan_padded(self, sequences: PaddedSequences, *, window: int | None) -> Reads:
        """See ``FastAttention``."""
        slots_ST = padded_slots(sequences)
        keys_T = torch.arange(slots_ST.shape[1], device=slots_ST.device)
        return PaddedReads(
            slots_ST=slots_ST, readable_SQT=_readable(sequences.positions_SQ.long(), keys_T, window)
        )


def attend_folded(
    query_SQNGH: Tensor, keys_XNH: Tensor, values_XNH: Tensor, slots_ST: Tensor, readable_SQT: Tensor
) -> Tensor:
    """Return the attention (S, Q, N, G, H) of sequences over the keys at their slots, in one call."""
    sequences, width, kv_heads, group, head_dim = query_SQNGH.shape
    # One KV head serves its whole query group: its heads become further queries of that head.
    folded = query_SQNGH.permute(0, 2, 3, 1, 4).reshape(sequences, kv_heads, group * width, head_dim)
    keys_SNTH = keys_XNH[slots_ST].transpose(1, 2)
    values_SNTH = values_XNH[slots_ST].transpose(1, 2)
    mask = readable_SQT[:, None].repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(folded, keys_SNTH, values_SNTH, attn_mask=mask)
    return out.view(sequences, kv_heads, group, width, head_dim).permute(0, 3, 1, 2, 4)


def _readable(positions_SQ: Tensor, keys_T: Tensor, window: int | None) -> Tensor:
    behind_SQT = positions_SQ[:, :, None] - keys_T
    readable_SQT = behind_SQT >= 0
    if window is not None:
        readable_SQT &= behind_SQT < window
    return readable_SQT


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
    slots_ST = slots_of(pages_SP, table_M[rows_SQ[:, :1]], torch.minimum(keys_T[None], last_S1))
    places = [s * width + q for s, r in enumerate(rows) for q in range(len(r))]
    return SequenceGroup(
        rows_SQ=rows_SQ.to(device),
        slots_ST=slots_ST.to(device),
        readable_SQT=_readable(positions_SQ, keys_T, window).to(device),
        place_K=torch.tensor(places).to(device),
        target_K=torch.tensor([m for r in rows for m in r]).to(device),
    )
