"""What a training run came to: did the reward rise, did drafts stay good, where did the time go.

Standard library only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEEDED_ERRORS = 2.0
"""Standard errors of the difference by which the last quarter must beat the first. Were nothing
learned, some runs in a hundred would still pass by luck, so a claim needs several seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftTally:
    """What became of one drafter's drafts in one step."""

    drafted: int
    accepted: int
    first_decided: int
    """Drafts of a block's first position that verification judged."""

    first_kept: int
    """Of those, kept. Unlike ``accepted`` it does not depend on how far was drafted."""


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
    ids_digest: str
    """Of all its samples' token ids, in order: equal in two runs that sampled the same."""

    by_drafter: Mapping[str, DraftTally]
    """Of rounds, so what a dead host did unheard is missing."""

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
    drafters = sorted({name for s in steps for name in s.by_drafter})
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
        "generate_s_by_step": [s.generate_s for s in steps],
        "tokens": tokens,
        "tokens_per_s": tokens / generate_s if generate_s > 0 else None,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "accept_rate": accepted / drafted if drafted else None,
        "drafters": {name: _drafts_of(name, steps) for name in drafters},
        "ids_digest_by_step": [s.ids_digest for s in steps],
    }


def _drafts_of(name: str, steps: Sequence[StepResult]) -> dict[str, Any]:
    """Return a drafter's acceptance over the run; quarters are those of the reward, None without drafts."""
    size = len(steps) // 4
    ends = {"first_quarter": steps[:size], "last_quarter": steps[len(steps) - size :]}
    tallies = [s.by_drafter[name] for s in steps if name in s.by_drafter]
    return {
        "drafted": sum(t.drafted for t in tallies),
        "accepted": sum(t.accepted for t in tallies),
        "accept_rate_by_step": [_share(name, [s], "accepted", "drafted") for s in steps],
        "first_draft_kept": {
            **{end: _share(name, part, "first_kept", "first_decided") for end, part in ends.items()},
            "by_step": [_share(name, [s], "first_kept", "first_decided") for s in steps],
        },
    }


def _share(name: str, steps: Sequence[StepResult], hits: str, trials: str) -> float | None:
    """Return the pooled share of a drafter's ``hits`` among its ``trials``; None without any."""
    tallies = [s.by_drafter[name] for s in steps if name in s.by_drafter]
    total = sum(getattr(t, trials) for t in tallies)
    return sum(getattr(t, hits) for t in tallies) / total if total else None


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
