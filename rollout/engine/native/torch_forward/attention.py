"""Paged attention of the torch decoder: its KV memory, where rows write, and how they read.

Exact: one row at a time over exactly its own keys, so every shape depends on the row's position alone.
Fast: a ``FastAttention`` reads for the whole batch; ``sdpa_attention.py`` and ``flash_attention.py`` are two.

Shapes: M rows, S sequences, Q rows of the longest one, T keys of the longest one, P pages of a table,
N KV heads, G query heads per KV head, H head dimension, X slots of the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.policy.spec import ModelSpec


class TorchKV:
    """Keys and values of a page pool: one slot per token, on every plane.

    One page more than the pool has is kept: rows that only fill up a shape write there, and nobody reads it.
    """

    def __init__(self, spec: ModelSpec, *, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        if pages < 1:
            raise ValueError(f"a KV pool needs at least one page, got {pages}")
        self.pages = pages
        shape = (spec.planes, (pages + 1) * PAGE_TOKENS, spec.kv_heads, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def spare_page(self) -> int:
        """The page no sequence can have."""
        return self.pages

    @property
    def bytes_per_page(self) -> int:
        """Over all planes, keys and values."""
        return 2 * self.keys.nbytes // (self.pages + 1)

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


class Reads(Protocol):
    """What the rows of one forward read; the same on every layer."""

    def attend(self, query_MNGH: Tensor, keys_XNH: Tensor, values_XNH: Tensor) -> Tensor:
        """Return the attention of all rows (M, N, G, H) over the slots of one plane."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedSequences:
    """Sequences filled up to one shape, on the device: reading them takes no number back to the host.

    Sequence s reads its first ``lasts_S[s] + 1`` positions. Its rows are the last of row ``s`` of
    ``positions_SQ``, at consecutive positions up to ``lasts_S[s]``; those before them fill up, and what they
    are given means nothing. A forward's rows are the flattened (S, Q).
    """

    positions_SQ: Tensor
    lasts_S: Tensor
    table_SP: Tensor
    """int32; entries past a sequence's length name the spare page."""


class FastAttention(Protocol):
    """How a batch attends where rows need not keep their bits."""

    description: str
    """What computes, for the log and the fingerprint."""

    def plan(self, batch: RowBatch, *, window: int | None, device: torch.device) -> Reads:
        """Return what the rows of any batch read; they may stand in any order."""
        ...

    def plan_padded(self, sequences: PaddedSequences, *, window: int | None) -> Reads:
        """Return the same for padded rows, by operations on the device alone: it may be recorded."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """All that the layers of one forward share."""

    write_slots_M: Tensor
    positions_M: Tensor
    row_slots: tuple[Tensor, ...] = ()
    """Exact: the slots each row reads, oldest first."""

    reads: Reads | None = None
    """Fast: what the batch reads."""


def plan_rows(batch: RowBatch, *, window: int | None, device: torch.device) -> AttentionPlan:
    """Return where rows write and, each row alone, what they read."""
    row_slots = []
    pages_SP = batch.page_table_SP.long().cpu()
    for table, position in zip(batch.table_M.tolist(), batch.positions_M.tolist(), strict=True):
        first = 0 if window is None else max(0, position - window + 1)
        keys_T = torch.arange(first, position + 1)
        row_slots.append(slots_of(pages_SP, torch.tensor(table), keys_T).to(device))
    return AttentionPlan(
        write_slots_M=write_slots(batch).to(device),
        positions_M=batch.positions_M.long().to(device),
        row_slots=tuple(row_slots),
    )


def plan_batch(
    attention: FastAttention, batch: RowBatch, *, window: int | None, device: torch.device
) -> AttentionPlan:
    """Return where rows write and what they read together."""
    return AttentionPlan(
        write_slots_M=write_slots(batch).to(device),
        positions_M=batch.positions_M.long().to(device),
        reads=attention.plan(batch, window=window, device=device),
    )


def write_slots(batch: RowBatch) -> Tensor:
    """Return the slot of each row (M,), on the CPU: planning is many small look-ups, moved once."""
    return slots_of(
        batch.page_table_SP.long().cpu(), batch.table_M.long().cpu(), batch.positions_M.long().cpu()
    )


def slots_of(pages_SP: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Return the slots of positions of the sequences that rows ``table`` of ``pages_SP`` describe."""
    return pages_SP[table, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


def padded_slots(sequences: PaddedSequences) -> Tensor:
    """Return the slots (S, T) of the first positions of padded sequences, T being all that tables can name.

    Beyond a sequence's length its last own slot is repeated, so nothing of another one is ever read, not even
    to be masked.
    """
    keys = sequences.table_SP.shape[1] * PAGE_TOKENS
    keys_T = torch.arange(keys, device=sequences.table_SP.device)
    positions_ST = torch.minimum(keys_T[None], sequences.lasts_S.long()[:, None])
    pages_ST = sequences.table_SP.long().gather(1, positions_ST // PAGE_TOKENS)
    return pages_ST * PAGE_TOKENS + positions_ST % PAGE_TOKENS


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
