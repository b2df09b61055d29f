"""A batch's rows as spans: rows of one sequence at consecutive positions, which kernels take in one piece.

A prompt chunk is one span, so are a sequence's last token and its drafts. Rows that stand apart, as lanes of
a looped policy may, are spans of their own: every key of a batch is written before any row reads.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rollout.engine.native.rows import RowBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Rows of one sequence."""

    table: int
    """Which row of the page table is theirs."""

    first_position: int
    rows: list[int]
    """Their numbers in the batch, by position."""

    @property
    def last_position(self) -> int:
        """The last one's position."""
        return self.first_position + len(self.rows) - 1


def spans_of(batch: RowBatch) -> list[Span]:
    """Return the spans of a batch, by sequence and position. Rows of one position are in different spans."""
    tables, positions = batch.table_M.tolist(), batch.positions_M.tolist()
    spans: list[Span] = []
    last: Span | None = None
    for row in sorted(range(len(tables)), key=lambda m: (tables[m], positions[m])):
        if last is not None and (last.table, last.last_position + 1) == (tables[row], positions[row]):
            last.rows.append(row)
            continue
        last = Span(table=tables[row], first_position=positions[row], rows=[row])
        spans.append(last)
    return spans


def single_rows(spans: Iterable[Span]) -> list[Span]:
    """Return every row as a span of its own: it reads its sequence's keys alone."""
    return [
        Span(table=span.table, first_position=span.first_position + i, rows=[row])
        for span in spans
        for i, row in enumerate(span.rows)
    ]
