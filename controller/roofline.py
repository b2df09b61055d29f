"""One model part on one machine: its calibrated roofline, and what rounds said of it since.

A forward has two stages that no machine runs at once: linears, and attention. Each takes the longer of moving
its bytes and computing its flops, so attention's bytes never hide behind the arithmetic of linears.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from controller.calibration import PartFit
from controller.tracking import FactorTracker, ResidualTable
from controller.types import PartShape

STEPS_ROWS = 4096
"""Row counts beyond share the last correction."""

COMMON_EVERY = 8
"""Forwards of a part after which what its cells have in common is moved to the factor beside them. Rounds fix
only their product: unheeded, noise would carry the two apart without end, and shapes not seen with one."""

COMMON_SHARE = 0.25
"""How much of it is moved at once, so that what learns from either sees no jump."""


KNEE_RATIO = 1.25
"""How far all moving and all computing must lie apart for a forward of the policy to tell which of them it
speaks of. Nearer, a change of one shows as the other's, and a drafter would take the difference for its
own."""


class Bounding(NamedTuple):
    """What bounds a forward: calibrated seconds of the stages that moving bounds, and of those that computing
    does, and how much slower either is now."""

    moved_s: float
    maths_s: float
    bandwidth: float
    rate: float
    clear: bool
    """Whether all of it lies so far apart under the two that it tells of the one that bounds most of it."""

    @property
    def which(self) -> int:
        """The parameter that bounds most of it: 0 for bandwidth, 1 for rate."""
        return int(self.moved_s * self.bandwidth < self.maths_s * self.rate)

    @property
    def bound_s(self) -> float:
        """Calibrated seconds under that parameter."""
        return self.maths_s if self.which else self.moved_s

    @property
    def rest_s(self) -> float:
        """Seconds under the other one, as slow as it is now."""
        return self.moved_s * self.bandwidth if self.which else self.maths_s * self.rate

    @property
    def slow_s(self) -> float:
        """Seconds of it all, as slow as it is now."""
        return self.moved_s * self.bandwidth + self.maths_s * self.rate


class Part:
    """One part's calibrated seconds, by what they grow with, and its corrections."""

    def __init__(self, shape: PartShape, fit: PartFit, *, quantile: float, window: int) -> None:
        """``quantile`` and ``window`` are those of its trackers."""
        self.weight_s = shape.weight_bytes / fit.bandwidth_bytes_per_s
        self.row_s = shape.flops_per_row / fit.flops_per_s
        self.read_s = fit.context_factor * shape.kv_bytes_per_token / fit.bandwidth_bytes_per_s
        """Of moving one context token of a sequence."""
        self.context_s = fit.context_factor * shape.flops_per_context_token / fit.flops_per_s
        """Of computing one context token of a row."""
        self.base_s, self.per_row_s = fit.overhead_s, fit.overhead_s_per_row
        self.steps_R = np.ones(STEPS_ROWS + 1)
        """By rows, what the roofline is multiplied by: kernels take rows in tiles, so cost has steps."""
        self.residuals = ResidualTable(quantile=quantile)
        self.own = FactorTracker(quantile=quantile, window=window)
        """How much slower it is than calibrated beside the machine; the policy's is the machine's by
        definition and never moves."""
        self._since_common = 0

    def stages(self, rows: float, read_tokens: float, context_tokens: float) -> Iterator[tuple[float, float]]:
        """Yield calibrated seconds of moving and of computing, of linears and of attention."""
        yield self.weight_s, self.row_s * rows
        yield self.read_s * read_tokens, self.context_s * context_tokens

    def bounding(
        self, rows: float, read_tokens: float, context_tokens: float, bandwidth: float, rate: float
    ) -> Bounding:
        """Return what bounds a forward where moving and computing are so much slower than calibrated."""
        moved_s = maths_s = all_moved_s = all_maths_s = 0.0
        for moves_s, computes_s in self.stages(rows, read_tokens, context_tokens):
            all_moved_s += moves_s * bandwidth
            all_maths_s += computes_s * rate
            if moves_s * bandwidth >= computes_s * rate:
                moved_s += moves_s
            else:
                maths_s += computes_s
        high, low = all_moved_s, all_maths_s
        if moved_s * bandwidth < maths_s * rate:
            high, low = low, high
        return Bounding(moved_s, maths_s, bandwidth, rate, high > KNEE_RATIO * low)

    def overhead_s(self, rows: float) -> float:
        """Return the seconds of a forward that are neither."""
        return self.base_s + self.per_row_s * rows

    def step(self, rows: float) -> float:
        """Return what the roofline of so many rows is multiplied by."""
        return float(self.steps_R[min(STEPS_ROWS, round(rows))])

    def share_common(self, factor: FactorTracker, bound: int | None) -> None:
        """Move what the cells under a factor have in common to it, now and then and by and by."""
        self._since_common += 1
        if self._since_common >= COMMON_EVERY:
            self._since_common = 0
            moved = factor.shift(COMMON_SHARE * self.residuals.common(bound))
            self.residuals.shift(-moved, bound)
