"""How long the proof's texts may be, so that all its arms fit the time there is.

A few forwards are timed and every arm is priced from them. The price needs to be right within a factor of
two only: it decides lengths, never a verdict.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.types import AR, POLICY
from rollout.engine.native.engine import NativeEngine
from rollout.errors import CapacityError, UnsupportedError

TIMED_ROWS = (1, 8, 32, 128)
CONTEXT_TOKENS = 48
ASSUMED_ACCEPTANCE = 0.75
"""Of a draft token. On the low side: arms that accept more only end sooner."""

DRAIN_FRAC = 0.6
"""Mean share of a full batch that still runs while texts of different lengths end."""

SLACK = 1.2
"""For choosing and committing, which the forwards do not show."""

PROMPT_ROWS = 8
"""Of a request whose full prompt pages are shared: the rest of the last page, on average."""

LEAST_TOKENS = 6
"""Shorter texts would not cross a draft of eight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedArm:
    """What an arm's time depends on."""

    batch: int
    drafter: str
    """``AR`` for plain decoding."""

    gamma: int


def affordable_tokens(
    engine: NativeEngine, arms: Sequence[PricedArm], *, requests: int, within_s: float, most: int
) -> int:
    """Return the mean new tokens per request, ``most`` at most, with which all arms end in time."""
    times = {part: _forward_times(engine, part) for part in {POLICY, *(a.drafter for a in arms if a.gamma)}}
    prompts_s = len(arms) * _at(times[POLICY], requests * PROMPT_ROWS)
    per_token_s = SLACK * requests * sum(_token_s(arm, times) for arm in arms)
    return max(LEAST_TOKENS, min(most, int((within_s - prompts_s) / per_token_s)))


def _token_s(arm: PricedArm, times: dict[str, dict[int, float]]) -> float:
    """Return the seconds one token of one request costs in an arm."""
    running = max(1.0, arm.batch * (DRAIN_FRAC if arm.batch > 1 else 1.0))
    verify_s = _at(times[POLICY], running * (arm.gamma + 1))
    draft_s = arm.gamma * _at(times[arm.drafter], running) if arm.drafter != AR else 0.0
    survival = ASSUMED_ACCEPTANCE ** np.arange(arm.gamma + 1)
    return float((verify_s + draft_s) / (running * survival.sum()))


def _at(times: dict[int, float], rows: float) -> float:
    if not times:
        return 0.0
    known = sorted(times)
    inside = float(np.interp(rows, known, [times[r] for r in known]))
    return inside * max(1.0, rows / known[-1])


def _forward_times(engine: NativeEngine, part: str) -> dict[int, float]:
    """Return seconds by rows; empty for a part that runs no forward."""
    times: dict[int, float] = {}
    for rows in TIMED_ROWS:
        sequences = min(rows, engine.traits.max_batch)
        try:
            times[rows] = statistics.median(
                engine.time_forward(part, rows=rows, context_tokens=CONTEXT_TOKENS, sequences=sequences)
                for _ in range(3)
            )
        except (CapacityError, UnsupportedError):
            break
    return times
