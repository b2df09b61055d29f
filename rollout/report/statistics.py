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
    low, high = _score_interval(hits / trials, trials, z)
    return Share(hits=hits, trials=trials, low=low, high=high)


def wilson_of_blocks(blocks: Sequence[tuple[int, int]], *, z: float = Z_95) -> Share:
    """Return pooled hits over trials of blocks ``(hits, trials)`` that are independent of each other while
    the trials of one are not: Wilson's interval at the number of trials that would scatter as much.

    That number follows from the variance of the ratio estimator, and is never above the trials there are.
    Where the blocks show no scatter to judge by, all or none hit or a single block, each counts as one trial.
    Raises ``ValueError`` for impossible counts.
    """
    hits, trials = sum(h for h, _ in blocks), sum(t for _, t in blocks)
    if trials == 0 or not all(0 <= h <= t for h, t in blocks):
        raise ValueError(f"{hits} hits in {trials} trials of {len(blocks)} blocks")
    share, count = hits / trials, sum(t > 0 for _, t in blocks)
    effective = float(count)
    if count > 1 and 0 < hits < trials:
        squares = sum((h - share * t) ** 2 for h, t in blocks)
        variance = squares * count / (count - 1) / trials**2
        effective = min(float(trials), share * (1 - share) / variance) if variance > 0 else float(trials)
    low, high = _score_interval(share, effective, z)
    return Share(hits=hits, trials=trials, low=low, high=high)


def _score_interval(share: float, trials: float, z: float) -> tuple[float, float]:
    shrink = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / shrink
    return 0.0 if share == 0 else max(0.0, centre - half), 1.0 if share == 1 else min(1.0, centre + half)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile by linear interpolation. Raises ``ValueError`` when there are no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
