"""Drafts by policy version: neighbouring versions taken together where one alone says too little."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollout.report.table import table

Blocks = Mapping[int, Sequence[tuple[int, int]]]
"""By policy version: what was kept and what was tried, block by block."""

ENOUGH_TRIALS = 32
"""A point of fewer draft tokens shows chance: its 95% interval is wider than a third of the scale."""

COLUMNS = 4
"""Of the table: quarters, as the reward has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Neighbouring versions and all their blocks."""

    first: int
    last: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """In words."""
        return f"version {self.first}" if self.first == self.last else f"versions {self.first} to {self.last}"

    @property
    def middle(self) -> float:
        """Where it stands on an axis of versions."""
        return (self.first + self.last) / 2

    @property
    def kept(self) -> int:
        """Draft tokens kept."""
        return sum(hits for hits, _ in self.blocks)

    @property
    def tried(self) -> int:
        """Draft tokens tried."""
        return sum(trials for _, trials in self.blocks)


def stretches(found: Blocks) -> list[Stretch]:
    """Return versions as they are where they tried ``ENOUGH_TRIALS``, and else with those that follow.

    What is left at the end goes to the stretch before; only a drafter that tried less in all has less.
    """
    out: list[Stretch] = []
    waiting: list[int] = []
    for version in sorted(found):
        waiting.append(version)
        grown = _stretch(found, waiting)
        if grown.tried >= ENOUGH_TRIALS:
            out.append(grown)
            waiting = []
    if waiting:
        before = out.pop() if out else None
        first = waiting[0] if before is None else before.first
        out.append(_stretch(found, [v for v in sorted(found) if v >= first]))
    return [stretch for stretch in out if stretch.tried]


def quarters(found_by_drafter: Mapping[str, Blocks]) -> str:
    """Return a table: a row per drafter, its share kept in each quarter of the run's versions and in all."""
    versions = sorted({version for found in found_by_drafter.values() for version in found})
    low, count = versions[0], versions[-1] - versions[0] + 1
    columns = min(COLUMNS, count)
    edges = [low + count * i // columns for i in range(columns + 1)]
    parts = [range(a, b) for a, b in pairwise(edges)]
    names = [f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts]
    rows = [
        [name, *(_told(found, part) for part in parts), _told(found, range(low, low + count))]
        for name, found in sorted(found_by_drafter.items())
    ]
    return table(("kept, by version", *names, "all"), rows)


def _stretch(found: Blocks, versions: Sequence[int]) -> Stretch:
    blocks = tuple(block for version in versions for block in found[version])
    return Stretch(first=versions[0], last=versions[-1], blocks=blocks)


def _told(found: Blocks, versions: range) -> str:
    here = [version for version in sorted(found) if version in versions]
    if not here:
        return "-"
    stretch = _stretch(found, here)
    return f"{stretch.kept / stretch.tried:.3f} of {stretch.tried}" if stretch.tried else "-"
