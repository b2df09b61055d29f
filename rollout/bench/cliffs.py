"""Finds where speed drops between neighbours more than the roofline says it must. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

MOST_UNEXPLAINED_DROP = 0.1
"""Share of tokens per second that may be lost between neighbours beside what the roofline explains."""

Axis = Literal["batch", "context"]
AXES: tuple[Axis, ...] = ("batch", "context")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedPoint:
    """Plain decoding at one batch and context."""

    batch: int
    context_tokens: int
    tokens_per_s: float
    bound_tokens_per_s: float
    """What the machine's bounds would allow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cliff:
    """A drop that nothing explains, between two neighbours on one axis."""

    axis: Axis
    batch: tuple[int, int]
    context_tokens: tuple[int, int]
    drop: float
    """Share of tokens per second lost from the first to the second."""

    explained_drop: float
    """What the bounds alone would lose; 0 where they lose nothing."""


def find_cliffs(points: Sequence[SpeedPoint]) -> list[Cliff]:
    """Return every unexplained drop, over batch at each context and over context at each batch."""
    found = []
    for axis in AXES:
        for line in _lines(points, axis):
            found += [cliff for a, b in pairwise(line) if (cliff := _cliff(axis, a, b)) is not None]
    return found


def _lines(points: Sequence[SpeedPoint], axis: Axis) -> list[list[SpeedPoint]]:
    """Return the points that differ in ``axis`` alone, line by line, each in order."""
    lines: dict[int, list[SpeedPoint]] = {}
    for point in sorted(points, key=lambda p: (p.batch, p.context_tokens)):
        lines.setdefault(point.context_tokens if axis == "batch" else point.batch, []).append(point)
    return list(lines.values())


def _cliff(axis: Axis, first: SpeedPoint, second: SpeedPoint) -> Cliff | None:
    kept = second.tokens_per_s / first.tokens_per_s
    explained = min(1.0, second.bound_tokens_per_s / first.bound_tokens_per_s)
    if kept >= explained * (1.0 - MOST_UNEXPLAINED_DROP):
        return None
    return Cliff(
        axis=axis,
        batch=(first.batch, second.batch),
        context_tokens=(first.context_tokens, second.context_tokens),
        drop=1.0 - kept,
        explained_drop=1.0 - explained,
    )
