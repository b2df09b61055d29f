"""How far a calibration can be trusted: what its timings say of themselves, and what a few taken again say.

Standard library only. Times are minima of repeats that were interleaved with all other points: other work
only ever makes a forward longer, and a stall spoils one pass, not one point.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "provisional", "unknown"]

SPREAD_LIMIT_FRAC = 0.12
"""Largest difference of the two fastest repeats, nine points in ten must stay within. Two repeats that agree
were both undisturbed; the cost model's own error is of this size."""

OTHERS_LIMIT_FRAC = 0.1
"""Largest share of our cores' time that others may take: beyond, every repeat may have been disturbed alike,
which no spread can show."""

LEAST_REPEATS = 3
"""Of nine points in ten."""

PAIR_TOLERANCE_FRAC = 0.25
"""Parts' anchors of one kind, light or heavy, may have changed this much against each other: a controller
told that a drafter costs more or less than it does chooses wrong."""

MACHINE_TOLERANCE_FRAC = 0.8
"""All anchors of one kind may have changed together by this much. Neighbours on a shared machine slow memory
by up to 1.7 times, which the rounds correct; more is another machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Repeats of one forward, in short."""

    part: str
    rows: int
    sequences: int
    context_tokens: int
    repeats: int
    fastest_s: float
    median_s: float
    spread_frac: float
    """The second fastest over the fastest, less 1; 0 for a single repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """What a calibration is worth."""

    verdict: Verdict = "unknown"
    """``provisional``: usable, and to be taken again. ``unknown``: it was never judged."""

    reason: str = "it was never judged"
    spread_frac: float = 0.0
    """The ninth decile of its timings' spreads."""

    others_frac: float | None = None
    """Share of our cores' time that others took meanwhile; None where the system does not tell."""


def timing_of(
    seconds: Sequence[float], *, part: str, rows: int, sequences: int, context_tokens: int
) -> Timing:
    """Return the timing of one forward from its repeats, at least one."""
    ordered = sorted(seconds)
    return Timing(
        part=part,
        rows=rows,
        sequences=sequences,
        context_tokens=context_tokens,
        repeats=len(ordered),
        fastest_s=ordered[0],
        median_s=ordered[len(ordered) // 2],
        spread_frac=ordered[1] / ordered[0] - 1.0 if len(ordered) > 1 else 0.0,
    )


def judge(timings: Sequence[Timing], *, others_frac: float | None) -> Quality:
    """Return what these timings are worth."""
    if not timings:
        return Quality()
    spread_frac = _at(sorted(t.spread_frac for t in timings), 0.9)
    repeats = _at(sorted(t.repeats for t in timings), 0.1)
    reasons = []
    if repeats < LEAST_REPEATS:
        reasons.append(f"repeats that fitted the time: {repeats:.0f}, {LEAST_REPEATS} is the least")
    if spread_frac > SPREAD_LIMIT_FRAC:
        reasons.append(f"repeats differ by {spread_frac:.0%}, {SPREAD_LIMIT_FRAC:.0%} is the limit")
    if others_frac is not None and others_frac > OTHERS_LIMIT_FRAC:
        reasons.append(
            f"others took {others_frac:.0%} of the processor, {OTHERS_LIMIT_FRAC:.0%} is the limit"
        )
    return Quality(
        verdict="provisional" if reasons else "good",
        reason="; ".join(reasons) or "repeats agree and nothing else ran",
        spread_frac=spread_frac,
        others_frac=others_frac,
    )


def anchors_of(timings: Sequence[Timing]) -> dict[str, tuple[Timing, Timing]]:
    """Return per part a light and a heavy timing to take again: fewest rows, most rows, shortest context."""
    by_part: dict[str, list[Timing]] = {}
    for t in timings:
        by_part.setdefault(t.part, []).append(t)
    out: dict[str, tuple[Timing, Timing]] = {}
    for part, all_of_it in by_part.items():
        one_each = [t for t in all_of_it if t.rows == t.sequences] or all_of_it
        ordered = sorted(one_each, key=lambda t: (t.rows, t.context_tokens))
        heavy = next(t for t in ordered if t.rows == ordered[-1].rows)
        out[part] = ordered[0], heavy
    return out


def disagreement(stored: Mapping[str, tuple[Timing, Timing]], fastest_s: Mapping[Timing, float]) -> str:
    """Return in words what anchors taken again contradict; empty when they agree within the tolerances."""
    for kind, label in enumerate(("light", "heavy")):
        changes = {part: math.log(fastest_s[t[kind]] / t[kind].fastest_s) for part, t in stored.items()}
        lowest, highest = min(changes, key=changes.__getitem__), max(changes, key=changes.__getitem__)
        if changes[highest] - changes[lowest] > math.log1p(PAIR_TOLERANCE_FRAC):
            return (
                f"{label} forwards of {highest} now take {math.exp(changes[highest]):.2f} of what they took, "
                f"of {lowest} {math.exp(changes[lowest]):.2f}"
            )
        for part in (lowest, highest):
            if abs(changes[part]) > math.log1p(MACHINE_TOLERANCE_FRAC):
                return f"{label} forwards of {part} now take {math.exp(changes[part]):.2f} of what they took"
    return ""


def _at(ordered: Sequence[float], quantile: float) -> float:
    return ordered[round(quantile * (len(ordered) - 1))]
