"""What a training run came to: did the reward rise, and where did the time go. Standard library only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NEEDED_ERRORS = 2.0
"""Standard errors of the difference by which the last quarter must beat the first. Were nothing
learned, some runs in a hundred would still pass by luck, so a claim needs several seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One trainer step."""

    step: int
    """From 1."""

    policy_version: int
    """Whose rollouts it learned from."""

    rewards: tuple[float, ...]
    """One per sample."""

    step_s: float
    generate_s: float
    weight_sync_s: float
    mismatch_s: float
    drafted_tokens: int
    accepted_tokens: int
    tokens: int

    @property
    def reward(self) -> float:
        """Mean over samples."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def optimize_s(self) -> float:
        """What rollouts and checks left of the step: the trainer's own forward, backward and update."""
        return max(0.0, self.step_s - self.generate_s - self.weight_sync_s - self.mismatch_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarter:
    """Mean reward of a stretch of steps, each step one observation: samples of a step are not independent."""

    steps: int
    mean: float
    standard_error: float


def quarter(rewards: Sequence[float]) -> Quarter:
    """Return the mean of step rewards and its standard error; raises ``ValueError`` under two steps."""
    count = len(rewards)
    if count < 2:
        raise ValueError("a standard error needs two steps at least")
    mean = sum(rewards) / count
    variance = sum((r - mean) ** 2 for r in rewards) / (count - 1)
    return Quarter(steps=count, mean=mean, standard_error=math.sqrt(variance / count))


def summarize(steps: Sequence[StepResult], *, stopped_by: str, total_s: float) -> dict[str, Any]:
    """Return the summary as plain data. Fewer than eight steps give no verdict (None), not a pass."""
    drafted, accepted = sum(s.drafted_tokens for s in steps), sum(s.accepted_tokens for s in steps)
    tokens, generate_s = sum(s.tokens for s in steps), sum(s.generate_s for s in steps)
    seconds = {
        "total": total_s,
        "generate": generate_s,
        "weight_sync": sum(s.weight_sync_s for s in steps),
        "mismatch": sum(s.mismatch_s for s in steps),
        "optimize": sum(s.optimize_s for s in steps),
    }
    return {
        "schema": 1,
        "steps": len(steps),
        "stopped_by": stopped_by,
        "reward_by_step": [s.reward for s in steps],
        "reward": _verdict([s.reward for s in steps]),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / generate_s if generate_s > 0 else None,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "accept_rate": accepted / drafted if drafted else None,
    }


def _verdict(rewards: Sequence[float]) -> dict[str, Any]:
    size = len(rewards) // 4
    if size < 2:
        return {"improved": None, "reason": "fewer than eight steps: no standard error of a quarter"}
    first, last = quarter(rewards[:size]), quarter(rewards[-size:])
    error = math.hypot(first.standard_error, last.standard_error)
    difference = last.mean - first.mean
    return {
        "improved": difference > NEEDED_ERRORS * error and difference > 0,
        "first_quarter": {"mean": first.mean, "standard_error": first.standard_error, "steps": first.steps},
        "last_quarter": {"mean": last.mean, "standard_error": last.standard_error, "steps": last.steps},
        "difference": difference,
        "difference_standard_error": error,
        "needed_standard_errors": NEEDED_ERRORS,
    }
