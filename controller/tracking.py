"""Small estimators that follow a machine while it runs: bounded memory, deterministic, no clocks."""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FACTOR_RANGE = (0.2, 5.0)
"""How far a machine parameter may move from its calibration. Seen: 1.4; beyond 5 it is another machine."""

STALE_ROUNDS = 64
"""Rounds without an observation after which a parameter takes one step back to its calibration."""

STALE_KEPT = 0.95
"""Share of its log that a parameter keeps in such a step: half of it is gone after some 900 rounds."""

NEUTRAL_OBSERVATIONS = 3
"""Observations at the calibration a fresh window starts with: one stall must not define the machine."""

SETTLED_OBSERVATIONS = 10
"""Observations before a parameter can count as settled: the machine may differ from its calibration by
what it was busy with that day, and that is no fault of any one shape."""

RECENT_OBSERVATIONS = 5
"""Observations that are compared with the whole window to see whether the machine is changing."""

SETTLED_LOG = 0.05
"""Disagreement between the two that is still noise."""

BUCKETS_PER_OCTAVE = 2
"""Resolution of the residual table: shapes within 20% of each other share a cell."""

ROW_BUCKETS = 25
"""Half octaves of rows: 4096 and above share the last."""

NEIGHBOUR_OCTAVES = 0.5
"""Distance at which a neighbouring cell counts 61%: costs bend at knees, but not within a third."""

CELL_PRIOR = 0.5
"""Observations worth of "the model is right" in every cell."""

CELL_ENOUGH = 4.0
"""Observations from which a cell says no more to its neighbours, and more and more for itself alone: plain
decoding and a probe beside it are neighbours, and their difference is what a decision is about."""

CELL_WINDOW = 24
"""Observations kept per cell. A change of memory speed is a machine parameter's to follow; the few rounds
until that one is known to move do not shift the quantile of so many."""

CELL_YOUNG = 3
"""Observations below which a cell does not believe in being slow."""

CELL_YOUNG_LIMIT = 0.15
"""Largest log slowness a young cell admits: a stall must not brand a shape. Speed needs no such doubt,
nothing makes a forward faster than it can be."""

CELL_LIMIT = 0.9
"""Largest log correction of a cell: a factor of 2.5."""

LINE_STEP = 0.05
"""Share of an error a line takes over: the time outside forwards is small and changes slowly."""

LINE_FIRST = 6
"""Observations taken as they come, before there is an expectation to cut stalls by."""

LINE_ROW_SCALE = 1.0 / 16.0
"""Brings usual row counts near 1, so that base and slope learn equally fast."""

LINE_FLAG_SCALE = 0.3
"""The flagged extra learns at a tenth of the base's speed: what both kinds of round spend must not pass
for the price of speculation only because a rollout began with it."""

CELLS_REFRESH = 8
"""Observations after which blended corrections are worked out again; each moves them by a step at most."""


class FactorTracker:
    """Follows how much slower than calibrated a machine parameter is, by a low quantile of a window."""

    def __init__(self, *, quantile: float, window: int) -> None:
        self._quantile = quantile
        self._window: deque[float] = deque([0.0] * min(window, NEUTRAL_OBSERVATIONS), maxlen=window)
        self._idle_rounds = 0
        self.slowdown = 1.0
        self._observations = 0
        self.settled = False
        """False at first, and while the latest observations disagree with the window."""

    def observe(self, slowdown: float) -> None:
        """Take one measured over calibrated time of the part this parameter bounds."""
        low, high = FACTOR_RANGE
        self._push(math.log(min(high, max(low, slowdown))))
        self._idle_rounds = 0

    def idle(self) -> None:
        """Hear that a round told nothing; an old observation fades towards the calibration."""
        self._idle_rounds += 1
        if self._idle_rounds < STALE_ROUNDS:
            return
        self._idle_rounds = 0
        # Neutral observations instead would do nothing for long, then all at once, and then stand in the
        # way of what is heard next. A window that was not heard for long gives way like a fresh one.
        if len(self._window) > NEUTRAL_OBSERVATIONS:
            self._window.popleft()
        self._replace([STALE_KEPT * value for value in self._window])

    def shift(self, log_factor: float) -> float:
        """Believe all that was heard to have been this much slower; return by how much that moved it."""
        before = self.slowdown
        low, high = map(math.log, FACTOR_RANGE)
        self._replace([min(high, max(low, value + log_factor)) for value in self._window])
        return math.log(self.slowdown / before)

    def _replace(self, window: list[float]) -> None:
        self._window = deque(window, maxlen=self._window.maxlen)
        self.slowdown = math.exp(self._level(sorted(window)))

    def _push(self, log_slowdown: float) -> None:
        self._window.append(log_slowdown)
        level = self._level(sorted(self._window))
        latest = self._level(sorted(list(self._window)[-RECENT_OBSERVATIONS:]))
        self._observations += 1
        known = self._observations >= min(SETTLED_OBSERVATIONS, self._window.maxlen or 1)
        self.settled = known and abs(latest - level) <= SETTLED_LOG
        self.slowdown = math.exp(level)

    def _level(self, ordered: list[float]) -> float:
        return ordered[int(self._quantile * (len(ordered) - 1))]


_BUCKETS = [round(BUCKETS_PER_OCTAVE * math.log2(max(1, rows))) for rows in range(4097)]
_ROW_BUCKET: NDArray[np.intp] = np.asarray(_BUCKETS, dtype=np.intp)


def bucket_of(rows: int) -> int:
    """Return the residual bucket of a row or sequence count."""
    return _BUCKETS[rows] if rows <= 4096 else ROW_BUCKETS - 1


_DISTANCE: Floats = (np.arange(ROW_BUCKETS)[:, None] - np.arange(ROW_BUCKETS)[None, :]) / BUCKETS_PER_OCTAVE
_KERNEL: Floats = np.exp(-0.5 * (_DISTANCE / NEIGHBOUR_OCTAVES) ** 2)


@dataclass(slots=True)
class _Cell:
    """What was heard of one shape."""

    latest: deque[float]
    bias: float = 0.0
    bound: int = 0
    """The factor it was last heard under."""


class ResidualTable:
    """Lasting log error of the cost model by shape (rows, sequences) of one part.

    Each cell is the low quantile of its latest observations, so that stalls leave no mark; neighbours are
    blended, and shapes never seen are believed to be as modelled.
    """

    def __init__(self, *, quantile: float) -> None:
        self._quantile = quantile
        self._cells: dict[tuple[int, int], _Cell] = {}
        """By buckets of rows and sequences. Few shapes occur, and arrays would cost every round more."""
        self._since_refresh = 0
        self._curves: dict[int, list[float]] = {}
        self._arrays: dict[int, Floats] = {}
        self._by_row: dict[int, Floats] = {}

    def observe(self, rows: int, sequences: int, log_error: float, *, bound: int = 0) -> None:
        """Take the log of measured over machine-corrected, cell-free prediction of one forward.

        ``bound`` names the factor in that prediction: what its cells have in common can be moved to it.
        """
        r, s = bucket_of(rows), bucket_of(sequences)
        cell = self._cells.get((r, s))
        if cell is None:
            cell = self._cells[r, s] = _Cell(latest=deque(maxlen=CELL_WINDOW))
        cell.latest.append(log_error)
        count = len(cell.latest)
        bias = sorted(cell.latest)[int(self._quantile * (count - 1) + 0.5)]
        most = CELL_LIMIT if count >= CELL_YOUNG else CELL_YOUNG_LIMIT
        cell.bias, cell.bound = min(most, max(-CELL_LIMIT, bias)), bound
        self._since_refresh += 1
        if count <= CELLS_REFRESH or self._since_refresh >= CELLS_REFRESH:
            self._forget_blends()

    def common(self, bound: int | None) -> float:
        """Return the mean bias, by observations, of the cells seen under a factor, None for all."""
        heard = [cell for cell in self._cells.values() if bound is None or cell.bound == bound]
        return sum(len(c.latest) * c.bias for c in heard) / max(1, sum(len(c.latest) for c in heard))

    def shift(self, log_factor: float, bound: int | None) -> None:
        """Believe all that was heard under a factor, None for all, to have been this much slower."""
        for cell in self._cells.values():
            if bound is None or cell.bound == bound:
                cell.latest = deque((error + log_factor for error in cell.latest), maxlen=CELL_WINDOW)
                cell.bias = min(CELL_LIMIT, max(-CELL_LIMIT, cell.bias + log_factor))
        self._forget_blends()

    def _forget_blends(self) -> None:
        self._since_refresh = 0
        self._curves.clear()
        self._arrays.clear()
        self._by_row.clear()

    def _curve(self, sequences: int) -> list[float]:
        s = bucket_of(sequences)
        if s not in self._curves:
            count_RS, bias_RS = np.zeros((2, ROW_BUCKETS, ROW_BUCKETS))
            for at, cell in self._cells.items():
                count_RS[at], bias_RS[at] = len(cell.latest), cell.bias
            weight_RS = np.minimum(count_RS, CELL_ENOUGH) * _KERNEL[s]
            count_R = count_RS[:, s]
            alone_R = np.maximum(count_R * count_R / CELL_ENOUGH - CELL_ENOUGH, 0.0)
            total_R = _KERNEL @ weight_RS.sum(1) + alone_R + CELL_PRIOR
            blended_R = (_KERNEL @ (weight_RS * bias_RS).sum(1) + alone_R * bias_RS[:, s]) / total_R
            self._arrays[s] = np.exp(blended_R)
            self._curves[s] = self._arrays[s].tolist()
        return self._curves[s]

    def own(self, rows: int, sequences: int) -> float:
        """Return this shape's own factor, neither blended nor drawn to 1.

        What is divided by a factor before it moves a machine parameter must be divided by this one: by a
        factor drawn to 1, a shape seen all the time would slowly hand its misfit over to the machine, and
        so to every shape not seen meanwhile.
        """
        cell = self._cells.get((bucket_of(rows), bucket_of(sequences)))
        return 1.0 if cell is None else math.exp(cell.bias)

    def factor(self, rows: int, sequences: int) -> float:
        """Return what a prediction for this shape is multiplied by."""
        return self._curve(sequences)[bucket_of(rows)]

    def factors(self, rows_N: NDArray[np.intp], sequences: int) -> Floats:
        """Return ``factor`` for many row counts."""
        self._curve(sequences)
        s = bucket_of(sequences)
        if s not in self._by_row:
            self._by_row[s] = self._arrays[s].take(_ROW_BUCKET)
        return self._by_row[s].take(rows_N, mode="clip")


class LineTracker:
    """Follows seconds = base + per_row * rows (+ extra when flagged), by small normalised steps."""

    def __init__(self, *, base_s: float, per_row_s: float) -> None:
        self.base_s, self.per_row_s, self.flagged_s = base_s, per_row_s, 0.0
        self._observations = 0

    def predict(self, rows: float, *, flagged: bool) -> float:
        """Return expected seconds."""
        return self.base_s + self.per_row_s * rows + (self.flagged_s if flagged else 0.0)

    def observe(self, rows: float, seconds: float, *, flagged: bool) -> None:
        """Take one measurement; a stall counts as three times the expectation at most."""
        self._observations += 1
        expected = self.predict(rows, flagged=flagged)
        if self._observations > LINE_FIRST:
            seconds = min(seconds, 3.0 * expected + 1e-4)
        x = rows * LINE_ROW_SCALE
        flag = LINE_FLAG_SCALE if flagged else 0.0
        step = max(LINE_STEP, 1.0 / self._observations) * (seconds - expected) / (1.0 + x * x + flag * flag)
        self.base_s = max(0.0, self.base_s + step)
        self.per_row_s = max(0.0, self.per_row_s + step * x * LINE_ROW_SCALE)
        self.flagged_s = max(0.0, self.flagged_s + step * flag)
