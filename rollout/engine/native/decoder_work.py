"""What a decoder has computed, in plain counts: by these, work that was done twice is seen to be.

A *row-loop* is one row taken through one loop. Compiled kernels count where they write keys, whatever the
call they are part of; the torch decoder counts what its methods are asked for. Of forwards that run a loop's
layers part by part the one with the last layer counts, so that the parts count as the whole; layers that no
such forward follows count nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWork:
    """Sums over all calls so far. Their difference is the work of what ran in between."""

    passes: int
    """Times the block ran over a batch: one per loop of a forward, one where rows of all loops advance."""

    head_rows: int
    """Rows whose logits were computed, of the head or of its screen."""

    rows_by_loop: tuple[int, ...]
    """Rows that went through each loop; those that ended with their last keys count as others do."""

    @property
    def row_loops(self) -> int:
        """All of them together."""
        return sum(self.rows_by_loop)

    def __sub__(self, earlier: "DecoderWork") -> "DecoderWork":
        """Return what was done since ``earlier``, of the same decoder."""
        by_loop = zip(self.rows_by_loop, earlier.rows_by_loop, strict=True)
        return DecoderWork(
            passes=self.passes - earlier.passes,
            head_rows=self.head_rows - earlier.head_rows,
            rows_by_loop=tuple([now - before for now, before in by_loop]),
        )


class WorkCount:
    """Counts for a decoder that no compiled code counts for."""

    def __init__(self, loops: int) -> None:
        self.head_rows = 0
        self._passes = 0
        self._rows_by_loop = [0] * loops

    def through(self, loops: Sequence[int], rows: int) -> None:
        """Count ``rows`` rows that go through these loops together, a pass each; none are none."""
        if not rows:
            return
        self._passes += len(loops)
        for loop in loops:
            self._rows_by_loop[loop] += rows

    def advanced(self, loops: Sequence[int]) -> None:
        """Count one pass in which every row goes through a loop of its own; no rows are no pass."""
        self._passes += bool(loops)
        for loop, rows in Counter(loops).items():
            self._rows_by_loop[loop] += rows

    def total(self) -> DecoderWork:
        """Return all that was counted."""
        return DecoderWork(
            passes=self._passes, head_rows=self.head_rows, rows_by_loop=tuple(self._rows_by_loop)
        )
