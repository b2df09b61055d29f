"""Ratios of paired times: their interval, when there are enough pairs, and which pairs do not count.

A pair is two arms that ran in lockstep, or one after the other. Logs of ratios are averaged, so that A over B
and B over A are one statement, and the interval is Student's. Pure: no clock, no engine.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

SAME_WORK_FRAC = 0.05
"""Two arms that did the same work in times further apart than this ran on two different machines, in effect:
memory speed moves by 40% within minutes. Their pair is dropped, and counted. In lockstep both met the same
machine, so a gap is the arms' own: it is written down, and dropping it would drop pairs by their outcome."""

REFERENCE_SHARE = 0.1
"""Reference forwards only surround the runs. They drop a pair for what could matter to its claim: a change of
10% says nothing against a ratio of three."""

SHARED_ROUNDS = 24
"""Fewest shared plain rounds that speak for a pair: their mean is then steadier than the limit above."""

Verdict = Literal["met", "not met", "undecided"]
WorkKey = tuple[int, int]
"""Batch, and mean context in steps of ``summary.CONTEXT_STEP_TOKENS``: rounds that agree did the same."""

_T95 = (6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8946, 1.8595, 1.8331, 1.8125)
"""Student's 95% quantile for 1 to 10 degrees of freedom; beyond, the expansion around the normal is exact to
four digits."""

_Z95 = 1.6448536


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """What pairing needs of one run."""

    makespan_s: float
    pace_s: float
    """Of one plain reference forward, median of those just before and just after the run."""

    plain: Mapping[WorkKey, tuple[int, float]] = field(default_factory=dict)
    """Rounds and seconds of plain decoding by what they had to do; empty where there are none."""

    lockstep: int | None = None
    """Which lockstep it was part of; None: it ran alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """How differently two arms did the same work."""

    frac: float
    """Slower over faster, minus 1."""

    by: Literal["plain rounds", "lockstep", "reference forward"]
    """What was compared; ``lockstep``: plain rounds of arms that took turns; zero if they share too few."""

    def too_wide(self, claim: "Claim") -> bool:
        """Whether the pair must be dropped."""
        if self.by == "lockstep":
            return False
        most = SAME_WORK_FRAC
        if self.by == "reference forward":
            most = max(most, REFERENCE_SHARE * claim.margin)
        return self.frac > most


def same_work_gap(a: Timed, b: Timed) -> Gap:
    """Compare plain rounds both arms ran; where these are too few and the arms did not run in lockstep, the
    reference forwards around the runs.
    """
    shared, a_s, b_s = 0, 0.0, 0.0
    for key in a.plain.keys() & b.plain.keys():
        (a_rounds, a_seconds), (b_rounds, b_seconds) = a.plain[key], b.plain[key]
        rounds = min(a_rounds, b_rounds)
        shared += rounds
        a_s += rounds * a_seconds / a_rounds
        b_s += rounds * b_seconds / b_rounds
    enough = shared >= SHARED_ROUNDS
    if a.lockstep is not None and a.lockstep == b.lockstep:
        return Gap(frac=_apart(a_s, b_s) if enough else 0.0, by="lockstep")
    if enough:
        return Gap(frac=_apart(a_s, b_s), by="plain rounds")
    return Gap(frac=_apart(a.pace_s, b.pace_s), by="reference forward")


def _apart(a: float, b: float) -> float:
    return max(a, b) / min(a, b) - 1.0


def interval90(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the 90% interval of the geometric mean; None below two ratios."""
    if len(ratios) < 2:
        return None
    logs = [math.log(r) for r in ratios]
    mean = statistics.fmean(logs)
    half = t95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean + half)


def t95(freedom: int) -> float:
    """Return Student's 95% quantile: a two-sided 90% interval reaches that many standard errors."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z, n = _Z95, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A ratio that is measured, and what is claimed of it."""

    name: str
    """As in the result: prefix, then ``A_over_B``: time of B over time of A."""

    a: str
    b: str
    margin: float
    """The goal's distance from 1, or what a ratio without a goal should be known to."""

    at_least: float | None = None
    """The goal; None: reported only."""

    stricter: float | None = None
    """A second goal, judged on the same pairs under a name of its own, ``NAME_strict``."""

    @property
    def goals(self) -> dict[str, float]:
        """Every goal by its name in the result."""
        named = {self.name: self.at_least, f"{self.name}_strict": self.stricter}
        return {name: goal for name, goal in named.items() if goal is not None}


class PairedRatio:
    """All pairs of one claim."""

    def __init__(self, claim: Claim, *, min_pairs: int, max_pairs: int) -> None:
        self.claim = claim
        self.ratios: list[float] = []
        self.gaps: list[Gap] = []
        """Of the kept pairs, in order."""
        self.dropped: list[Gap] = []
        self._min_pairs, self._max_pairs = min_pairs, max_pairs

    def add(self, a: Timed, b: Timed) -> bool:
        """Take a pair; return whether it counts."""
        gap = same_work_gap(a, b)
        if gap.too_wide(self.claim):
            self.dropped.append(gap)
            return False
        self.ratios.append(b.makespan_s / a.makespan_s)
        self.gaps.append(gap)
        return True

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 90% interval; None below two pairs."""
        return interval90(self.ratios)

    @property
    def wanted_width(self) -> float:
        """Half of the margin claimed: the goal's distance from 1, or the ratio's own if that is more."""
        interval = self.interval
        if interval is None:
            return self.claim.margin / 2
        return max(self.claim.margin, abs(math.sqrt(interval[0] * interval[1]) - 1.0)) / 2

    @property
    def settled(self) -> bool:
        """Whether the interval is narrow enough for the claim, on enough pairs."""
        interval = self.interval
        if interval is None or len(self.ratios) < self._min_pairs:
            return False
        return interval[1] - interval[0] < self.wanted_width

    @property
    def wants_pairs(self) -> bool:
        """Whether another pair should be run. As many pairs as may count may also be dropped, not more."""
        full = len(self.ratios) >= self._max_pairs or len(self.dropped) >= self._max_pairs
        return not self.settled and not full

    @property
    def verdict(self) -> Verdict | None:
        """What the pairs say about the goal: met by the interval's lower end, missed by its upper end.

        None where there is no goal; undecided on fewer than the least number of pairs.
        """
        goal = self.claim.at_least
        return None if goal is None else self.verdict_on(goal)

    def verdict_on(self, goal: float) -> Verdict:
        """Return what the pairs say about one goal, as ``verdict`` does."""
        interval = self.interval
        if interval is None or len(self.ratios) < self._min_pairs:
            return "undecided"
        if interval[0] >= goal:
            return "met"
        return "not met" if interval[1] < goal else "undecided"
