"""The few statistics a report needs. Standard library only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959964
"""Normal quantile of a two-sided 95% interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A share with its interval."""

    hits: int
    trials: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """Hits over trials."""
        return self.hits / self.trials


def wilson(hits: int, trials: int, *, z: float = Z_95) -> Share:
    """Return hits over trials with Wilson's score interval, which stays within 0..1 and is not empty at
    the ends. Trials are taken as independent. Raises ``ValueError`` for impossible counts."""
    if not 0 <= hits <= trials or trials == 0:
        raise ValueError(f"{hits} hits in {trials} trials")
    share = hits / trials
    shrink = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / shrink
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    high = 1.0 if hits == trials else min(1.0, centre + half)
    return Share(hits=hits, trials=trials, low=low, high=high)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile by linear interpolation. Raises ``ValueError`` when there are no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
