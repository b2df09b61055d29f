"""Ratios of costs with a ceiling: what a part of a round takes over what it is measured against. Pure.

Below 1 the first is the cheaper. One value per visit, both times from the same second.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

from rollout.bench.pairing import Verdict, interval90

WANTED_SHARE = 0.1
"""Width of the interval, as a share of the ceiling, below which no more visits are needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostClaim:
    """A cost ratio that is measured, and what is claimed of it."""

    name: str
    at_most: float


@dataclass(kw_only=True, slots=True)
class CostRatio:
    """All values of one claim."""

    claim: CostClaim
    min_values: int
    max_values: int
    values: list[float] = field(default_factory=list)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 90% interval; None below two values."""
        return interval90(self.values)

    @property
    def settled(self) -> bool:
        """Whether the interval is narrow enough for the claim, on enough values."""
        interval = self.interval
        if interval is None or len(self.values) < self.min_values:
            return False
        return interval[1] - interval[0] < WANTED_SHARE * self.claim.at_most

    @property
    def wants_values(self) -> bool:
        """Whether another visit would help."""
        return not self.settled and len(self.values) < self.max_values

    @property
    def verdict(self) -> Verdict:
        """What the values say: met by the interval's upper end, missed by its lower end."""
        interval = self.interval
        if interval is None or len(self.values) < self.min_values:
            return "undecided"
        if interval[1] <= self.claim.at_most:
            return "met"
        return "not met" if interval[0] > self.claim.at_most else "undecided"

    def told(self) -> dict[str, Any]:
        """Return the ratio as a result shows it; nothing is ever dropped."""
        return {
            "median": statistics.median(self.values) if self.values else None,
            "min": min(self.values, default=None),
            "max": max(self.values, default=None),
            "ci90": list(self.interval) if self.interval is not None else None,
            "pairs": len(self.values),
            "dropped": 0,
            "values": list(self.values),
        }
