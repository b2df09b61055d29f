"""Fast attention on flash-attn: prompt chunks by lengths, other rows over cached keys. **Not run** on CUDA.

What is here (which rows go into which call, starts, lengths, tables, windows) is tested on the CPU with a
torch implementation of flash-attn's documented semantics in the kernels' place.

Narrow spans, plain rows and drafts, are filled up in front to one number of rows per sequence: the kernels
align their mask to the last row. They read the pool's pages where those are where the kernels take their
size; else (version 2, whose pages are multiples of 256 tokens) keys are gathered first, as SDPA has to. Wide
spans are read by lengths, over gathered keys: each is read by many rows.

Shapes: M rows, K rows of one call, S sequences, Q rows of the longest one, T keys of the longest one, L keys
one after another, P pages of a table, N KV heads, G query heads per KV head, A = N G query heads, H head
dimension, X slots of the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rollout.engine.native.pages import pages_for
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_forward.attention import PaddedSequences, Reads, padded_slots, slots_of
from rollout.engine.native.torch_forward.flash_kernels import FlashKernels
from rollout.engine.native.torch_forward.row_spans import Span, spans_of

NARROW_ROWS = 16
"""Spans of at most so many rows are read by the cache kernel, which splits long keys between processors: what
few rows over a long context need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WideCall:
    """Spans one after another."""

    rows_K: Tensor
    slots_L: Tensor
    query_starts: Tensor
    key_starts: Tensor
    most_rows: int
    most_keys: int

    def attend(
        self,
        kernels: FlashKernels,
        query_KAH: Tensor,
        keys_XNH: Tensor,
        values_XNH: Tensor,
        window: int | None,
    ) -> Tensor:
        """Return (K, A, H)."""
        return kernels.varlen(
            query_KAH,
            keys_XNH[self.slots_L],
            values_XNH[self.slots_L],
            query_starts=self.query_starts,
            key_starts=self.key_starts,
            most_rows=self.most_rows,
            most_keys=self.most_keys,
            window=window,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheCall:
    """Sequences of one width over the pool's pages, or over keys gathered from ``slots_ST`` where given."""

    lengths_S: Tensor
    table_SP: Tensor
    slots_ST: Tensor | None

    def attend(
        self,
        kernels: FlashKernels,
        query_SQAH: Tensor,
        keys_XNH: Tensor,
        values_XNH: Tensor,
        window: int | None,
    ) -> Tensor:
        """Return (S, Q, A, H)."""
        if self.slots_ST is None:
            by_page = (-1, PAGE_TOKENS, *keys_XNH.shape[1:])
            keys, values, table_SP = keys_XNH.view(by_page), values_XNH.view(by_page), self.table_SP
        else:
            keys, values, table_SP = keys_XNH[self.slots_ST], values_XNH[self.slots_ST], None
        return kernels.cache(
            query_SQAH, keys, values, lengths_S=self.lengths_S, table_SP=table_SP, window=window
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowCall:
    """Spans filled up to one width."""

    rows_SQ: Tensor
    """Rows of the batch; a span's first one stands also where it is filled up."""

    place_K: Tensor
    """Where each real row stands in the flattened (S, Q)."""

    target_K: Tensor
    """Which row of the batch it is."""

    call: CacheCall


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedReads:
    """Implements ``Reads`` for any batch."""

    kernels: FlashKernels
    window: int | None
    wide: WideCall | None
    narrow: tuple[NarrowCall, ...]

    def attend(self, query_MNGH: Tensor, keys_XNH: Tensor, values_XNH: Tensor) -> Tensor:
        """See ``Reads``."""
        query_MAH = query_MNGH.flatten(1, 2)
        out_MAH = torch.empty_like(query_MAH)
        if self.wide is not None:
            rows_K = self.wide.rows_K
            out_MAH[rows_K] = self.wide.attend(
                self.kernels, query_MAH[rows_K], keys_XNH, values_XNH, self.window
            )
        for part in self.narrow:
            out_SQAH = part.call.attend(
                self.kernels, query_MAH[part.rows_SQ], keys_XNH, values_XNH, self.window
            )
            out_MAH[part.target_K] = out_SQAH.flatten(0, 1)[part.place_K]
        return out_MAH.view_as(query_MNGH)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedFlashReads:
    """Implements ``Reads`` for rows that are a padded (S, Q) already."""

    kernels: FlashKernels
    window: int | None
    call: CacheCall

    def attend(self, query_MNGH: Tensor, keys_XNH: Tensor, values_XNH: Tensor) -> Tensor:
        """See ``Reads``."""
        rows, kv_heads, group, head_dim = query_MNGH.shape
        sequences = self.call.lengths_S.shape[0]
        query_SQAH = query_MNGH.reshape(sequences, rows // sequences, kv_heads * group, head_dim)
        out_SQAH = self.call.attend(self.kernels, query_SQAH, keys_XNH, values_XNH, self.window)
        return out_SQAH.flatten(0, 1).view_as(query_MNGH)


class FlashAttention:
    """Implements ``FastAttention``."""

    def __init__(self, kernels: FlashKernels) -> None:
        self._kernels = kernels
        self._in_place = PAGE_TOKENS % kernels.page_multiple == 0
        self.description = f"{kernels.description} {'in place' if self._in_place else 'over gathered keys'}"

    def plan(self, batch: RowBatch, *, window: int | None, device: torch.device) -> Reads:
        """See ``FastAttention``."""
        spans = spans_of(batch)
        pages_SP = batch.page_table_SP.cpu()
        wide = [span for span in spans if len(span.rows) > NARROW_ROWS]
        by_width: dict[int, list[Span]] = {}
        for span in spans:
            if len(span.rows) <= NARROW_ROWS:
                by_width.setdefault((len(span.rows) - 1).bit_length(), []).append(span)
        return RaggedReads(
            kernels=self._kernels,
            window=window,
            wide=_wide_call(wide, pages_SP, device) if wide else None,
            narrow=tuple(self._narrow_call(part, pages_SP, device) for part in by_width.values()),
        )

    def plan_padded(self, sequences: PaddedSequences, *, window: int | None) -> Reads:
        """See ``FastAttention``."""
        paged = self._in_place and self._kernels.table_recordable
        call = CacheCall(
            lengths_S=(sequences.lasts_S + 1).int(),
            table_SP=sequences.table_SP,
            slots_ST=None if paged else padded_slots(sequences),
        )
        return PaddedFlashReads(kernels=self._kernels, window=window, call=call)

    def _narrow_call(self, spans: Sequence[Span], pages_SP: Tensor, device: torch.device) -> NarrowCall:
        width = max(len(span.rows) for span in spans)
        front = [width - len(span.rows) for span in spans]
        lasts_S = torch.tensor([span.last_position for span in spans], dtype=torch.int32)
        tables_S = torch.tensor([span.table for span in spans])
        table_SP = pages_SP[tables_S, : pages_for(int(lasts_S.max()) + 1)].int().contiguous()
        slots_ST = None
        if not self._in_place:
            keys_T = torch.arange(int(lasts_S.max()) + 1)
            slots_ST = slots_of(
                pages_SP.long(), tables_S[:, None], torch.minimum(keys_T[None], lasts_S[:, None].long())
            ).to(device)
        places = [s * width + q for s, skipped in enumerate(front) for q in range(skipped, width)]
        rows_SQ = [[span.rows[0]] * skipped + span.rows for span, skipped in zip(spans, front, strict=True)]
        return NarrowCall(
            rows_SQ=torch.tensor(rows_SQ).to(device),
            place_K=torch.tensor(places).to(device),
            target_K=torch.tensor([row for span in spans for row in span.rows]).to(device),
            call=CacheCall(
                lengths_S=(lasts_S + 1).to(device), table_SP=table_SP.to(device), slots_ST=slots_ST
            ),
        )


def _wide_call(spans: Sequence[Span], pages_SP: Tensor, device: torch.device) -> WideCall:
    rows, keys = [len(span.rows) for span in spans], [span.last_position + 1 for span in spans]
    slots = [
        slots_of(pages_SP.long(), torch.tensor(span.table), torch.arange(count))
        for span, count in zip(spans, keys, strict=True)
    ]

    def starts(counts: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(device)

    return WideCall(
        rows_K=torch.tensor([row for span in spans for row in span.rows]).to(device),
        slots_L=torch.cat(slots).to(device),
        query_starts=starts(rows),
        key_starts=starts(keys),
        most_rows=max(rows),
        most_keys=max(keys),
    )
