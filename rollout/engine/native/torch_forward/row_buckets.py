"""Batches filled up to few shapes, in buffers whose addresses never change: what may be recorded.

A bucket's rows are sequences times width; a span of a batch takes one sequence and its rows are the last ones
of it. What fills up writes to the spare page alone and reads what its sequence may read, or the spare page.

Shapes: M rows of the batch, R = S Q rows of the bucket, S sequences, Q width, P pages of a table, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.native.pages import pages_for
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_forward.attention import PaddedSequences
from rollout.engine.native.torch_forward.row_spans import Span, single_rows, spans_of

IntArray = NDArray[np.int32]

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
    together = _bucket(spans)
    if together.rows <= min(MOST_ROWS, 2 * _power_of_two(batch.rows)):
        return Placed(bucket=together, spans=spans)
    alone = single_rows(spans)
    return Placed(bucket=_bucket(alone), spans=alone)


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
        # The same memory to numpy, whose calls are a fifth as long: this is done for every forward.
        self._staged: list[IntArray] = np.split(self._host.numpy(), np.cumsum(sizes)[:-1])
        # Rows that fill up share the slots of the spare page: nobody reads what stands there.
        self._spare_slots_R = spare_page * PAGE_TOKENS + np.arange(rows, dtype=np.int32) % PAGE_TOKENS
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
        tokens_R, positions_R, writes_R, lasts_S, _ = self._staged
        sequences, width = self.bucket.sequences, self.bucket.width
        rows: list[int] = []
        places: list[int] = []
        for s, span in enumerate(spans, 1):
            rows += span.rows
            places += range(s * width - len(span.rows), s * width)
        place_M = np.empty(batch.rows, dtype=np.int64)
        place_M[rows] = places
        lasts_S[:] = 0
        lasts_S[: len(spans)] = [span.last_position for span in spans]
        firsts_S = np.zeros(sequences, dtype=np.int32)
        firsts_S[: len(spans)] = [span.first_position for span in spans]
        # What fills up stands where its sequence's first row does.
        upwards_SQ = lasts_S[:, None] - np.arange(width - 1, -1, -1)
        positions_R[:] = np.maximum(upwards_SQ, firsts_S[:, None]).reshape(-1)
        tokens_R[:] = 0
        tokens_R[place_M] = batch.token_ids_M.cpu().numpy()
        pages_SP = batch.page_table_SP.cpu().numpy()
        positions_M = batch.positions_M.cpu().numpy()
        pages_M = pages_SP[batch.table_M.cpu().numpy(), positions_M // PAGE_TOKENS]
        writes_R[:] = self._spare_slots_R
        writes_R[place_M] = pages_M * PAGE_TOKENS + positions_M % PAGE_TOKENS
        self._stage_tables(pages_SP, spans)
        self._numbers.copy_(self._host)
        stands_M = torch.from_numpy(place_M)
        if self.hidden_RD is not None and hidden_MD is not None:
            self.hidden_RD[stands_M.to(self.hidden_RD.device)] = hidden_MD.to(self.hidden_RD)
        return stands_M

    def _stage_tables(self, pages_SP: IntArray, spans: Sequence[Span]) -> None:
        """Take the pages that the spans' sequences hold up to their last row; all else is the spare page."""
        table_SP = self._staged[4].reshape(self.bucket.sequences, self.bucket.pages)
        width = min(self.bucket.pages, pages_SP.shape[1])
        held_S1 = np.array([[pages_for(span.last_position + 1)] for span in spans])
        own_SP = pages_SP[[span.table for span in spans], :width]
        table_SP[:] = self._spare_page
        table_SP[: len(spans), :width] = np.where(np.arange(width) < held_S1, own_SP, self._spare_page)
