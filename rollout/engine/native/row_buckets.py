"""Batches filled up to few shapes, in buffers whose addresses never change: what may be recorded.

A bucket's rows are sequences times width; a span of a batch takes one sequence and its rows are the last ones
of it. What fills up writes to the spare page alone and reads what its sequence may read, or the spare page.

Shapes: M rows of the batch, R = S Q rows of the bucket, S sequences, Q width, P pages of a table, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine.native.pages import pages_for
from rollout.engine.native.row_spans import Span, single_rows, spans_of
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_attention import PaddedSequences

MOST_ROWS = 256
"""Rows of the largest bucket. Beyond, kernels take longer than starting them does."""

MOST_WIDTH = 16
"""Rows of one sequence; prompt chunks are wider."""

FEWEST_PAGES = 8
"""Of a table: shorter ones would only mean more recordings while sequences are short."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A shape; all three are powers of two."""

    sequences: int
    width: int
    pages: int

    @property
    def rows(self) -> int:
        """R."""
        return self.sequences * self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A batch's spans and the bucket they go into."""

    bucket: Bucket
    spans: list[Span]


def place(batch: RowBatch) -> Placed | None:
    """Return where a batch goes; None for one that is run as it is (no rows, prompt chunks, too many rows).

    One sequence with many rows among many with one would fill most of a bucket with nothing: then every row
    goes alone, and rows of one sequence read its keys each for itself.
    """
    if not 0 < batch.rows <= MOST_ROWS:
        return None
    spans = spans_of(batch)
    if max(len(span.rows) for span in spans) > MOST_WIDTH:
        return None
    together, alone = _bucket(spans), _bucket(single_rows(spans))
    if together.rows <= 2 * alone.rows and together.rows <= MOST_ROWS:
        return Placed(bucket=together, spans=spans)
    return Placed(bucket=alone, spans=single_rows(spans))


def _bucket(spans: Sequence[Span]) -> Bucket:
    longest = max(span.last_position for span in spans) + 1
    return Bucket(
        sequences=_power_of_two(len(spans)),
        width=_power_of_two(max(len(span.rows) for span in spans)),
        pages=max(FEWEST_PAGES, _power_of_two(pages_for(longest))),
    )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class StaticRows:
    """The inputs of one bucket, filled anew for every batch. One copy to the device takes all numbers."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        spare_page: int,
        device: torch.device,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``hidden_size`` above 0: there are states to start at as well, of this size and ``dtype``."""
        self.bucket = bucket
        self._spare_page = spare_page
        rows, sequences = bucket.rows, bucket.sequences
        sizes = [rows, rows, rows, sequences, sequences * bucket.pages]
        self._host = torch.zeros(sum(sizes), dtype=torch.int32)
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host_parts = torch.split(self._host, sizes)
        self.token_ids_R, self.positions_R, self.write_slots_R, lasts_S, table = torch.split(
            self._numbers, sizes
        )
        self.hidden_RD = torch.zeros(rows, hidden_size, dtype=dtype, device=device) if hidden_size else None
        self.sequences = PaddedSequences(
            positions_SQ=self.positions_R.view(sequences, bucket.width),
            lasts_S=lasts_S,
            table_SP=table.view(sequences, bucket.pages),
        )

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return self._numbers.nbytes + (0 if self.hidden_RD is None else self.hidden_RD.nbytes)

    def fill(self, batch: RowBatch, spans: Sequence[Span], hidden_MD: Tensor | None = None) -> Tensor:
        """Take a batch; return where its rows stand (M,), int64 on the CPU."""
        tokens_R, positions_R, writes_R, lasts_S, _ = self._host_parts
        width, rows = self.bucket.width, self.bucket.rows
        places = [0] * batch.rows
        positions = [0] * rows
        lasts = [0] * self.bucket.sequences
        for s, span in enumerate(spans):
            end, count = (s + 1) * width, len(span.rows)
            positions[end - width : end - count] = [span.first_position] * (width - count)
            positions[end - count : end] = range(span.first_position, span.first_position + count)
            lasts[s] = span.last_position
            for place_R, row in enumerate(span.rows, end - count):
                places[row] = place_R
        place_M = torch.tensor(places)
        positions_R.copy_(torch.tensor(positions))
        lasts_S.copy_(torch.tensor(lasts))
        tokens_R.zero_()
        tokens_R[place_M] = batch.token_ids_M.cpu()
        self._fill_tables(batch, spans)
        # Rows that fill up share the slots of the spare page: nobody reads what stands there.
        writes_R.copy_(self._spare_page * PAGE_TOKENS + torch.arange(rows) % PAGE_TOKENS)
        slots_M = batch.page_table_SP.cpu()[
            batch.table_M.long().cpu(), batch.positions_M.cpu() // PAGE_TOKENS
        ]
        writes_R[place_M] = slots_M.int() * PAGE_TOKENS + batch.positions_M.cpu() % PAGE_TOKENS
        self._numbers.copy_(self._host)
        if self.hidden_RD is not None and hidden_MD is not None:
            self.hidden_RD[place_M.to(self.hidden_RD.device)] = hidden_MD.to(self.hidden_RD)
        return place_M

    def _fill_tables(self, batch: RowBatch, spans: Sequence[Span]) -> None:
        """Take the pages that the spans' sequences hold up to their last row; all else is the spare page."""
        table_SP = self._host_parts[4].view(self.bucket.sequences, self.bucket.pages)
        table_SP.fill_(self._spare_page)
        width = min(self.bucket.pages, batch.page_table_SP.shape[1])
        tables_S = torch.tensor([span.table for span in spans])
        held_S1 = torch.tensor([[pages_for(span.last_position + 1)] for span in spans])
        pages_SP = batch.page_table_SP.cpu()[tables_S, :width]
        table_SP[: len(spans), :width] = torch.where(
            torch.arange(width) < held_S1, pages_SP, pages_SP.new_tensor(self._spare_page)
        )
