"""What speculation on a looped policy is expected to bring, and whether it did. Reported; no verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from drafters.registry import member
from drafters.wavefront import WAVEFRONT
from rollout.bench.pairing import PairedRatio
from rollout.evaluation.cost_law import LAW_WITHIN, PASSES_WITHIN, LaneLaw, Prediction
from rollout.evaluation.sweep import Spot

SHALLOW_OVER_AR = {1: 1.45, 8: 1.2}
"""By concurrency, of the best depth and gamma."""

WAVEFRONT_OVER_AR = {1: 1.8}

Verdict = Literal["met", "not met", "undecided"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """One expectation, at one concurrency and length."""

    name: str
    wanted: str
    found: str
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the sweep found at one spot."""

    spot: Spot
    ratios: Mapping[str, PairedRatio]
    """Over plain decoding, by arm."""

    drafters: Mapping[str, str]
    """By arm."""

    predictions: Sequence[Prediction]
    lane_laws: Sequence[LaneLaw]


def goals_of(measured: Measured) -> list[Goal]:
    """Return the goals of a spot of a looped policy; without any pair a goal is undecided."""
    goals = []
    families = (
        ("shallow_loop", SHALLOW_OVER_AR),
        (WAVEFRONT, WAVEFRONT_OVER_AR),
    )
    for family, by_concurrency in families:
        arms = [arm for arm, drafter in measured.drafters.items() if member(drafter)[0] == family]
        wanted = by_concurrency.get(measured.spot.concurrency)
        if wanted is not None and arms:
            goals.append(_speed(measured, family, arms, wanted))
    prefix = measured.spot.prefix
    if measured.predictions:
        worst = max(measured.predictions, key=lambda p: abs(p.error_frac))
        goals.append(
            _near(f"{prefix}cost_law", LAW_WITHIN, worst.arm, worst.error_frac, len(measured.predictions))
        )
    if measured.lane_laws:
        lane = max(measured.lane_laws, key=lambda law: abs(law.error_frac))
        goals.append(
            _near(
                f"{prefix}passes_per_token", PASSES_WITHIN, lane.arm, lane.error_frac, len(measured.lane_laws)
            )
        )
    return goals


def _speed(measured: Measured, family: str, arms: Sequence[str], wanted: float) -> Goal:
    """Judge the best arm of a family by its interval: met by the lower end, missed by the upper."""
    name, said = f"{measured.spot.prefix}{family}_over_ar", f"at least {wanted:g}"
    seen = {arm: interval for arm in arms if (interval := measured.ratios[arm].interval) is not None}
    if not seen:
        return Goal(name=name, wanted=said, found="fewer than two pairs", verdict="undecided")
    best = max(seen, key=lambda arm: sum(seen[arm]))
    low, high = seen[best]
    verdict: Verdict = "met" if low >= wanted else "not met" if high < wanted else "undecided"
    found = f"{low:.2f} .. {high:.2f} with {best}, the best of {len(arms)}"
    return Goal(name=name, wanted=said, found=found, verdict=verdict)


def _near(name: str, within: float, arm: str, error_frac: float, count: int) -> Goal:
    return Goal(
        name=name,
        wanted=f"predicted within {within:.0%} of measured",
        found=f"{error_frac:+.1%} at worst, {arm} of {count}",
        verdict="met" if abs(error_frac) <= within else "not met",
    )
