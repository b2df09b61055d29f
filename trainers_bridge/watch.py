"""What a trainer's steps took, and what they learned from: read off while a transformers trainer runs."""

import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

from transformers import TrainerCallback

from rollout.progress import Progress
from rollout.settings import to_plain
from rollout.tracking.reduce import AcceptanceCounts
from rollout.tracking.tracker import Tracker
from trainers_bridge.config import TrainerConfig
from trainers_bridge.rollouts import TrainerRollouts
from trainers_bridge.summary import DraftTally, StepResult

STEPS = "steps"
"""Kind of the journal's records of trainer steps: the fields of ``StepResult``, plus ``reward`` and
``optimize_s``."""


class StepWatch(TrainerCallback):  # type: ignore[misc]
    """Times trainer steps, keeps their rewards, reports each, and stops the run when its time is over."""

    def __init__(
        self,
        rollouts: TrainerRollouts,
        *,
        config: TrainerConfig,
        tracker: Tracker,
        progress: Progress | None = None,
    ) -> None:
        self.steps: list[StepResult] = []
        self.stopped_by = "steps"
        self._rollouts, self._config, self._tracker, self._progress = rollouts, config, tracker, progress
        self._rewards: list[float] = []
        self._counts = {"drafted_tokens": 0, "accepted_tokens": 0, "tokens": 0}
        self._ids = blake2b(digest_size=8)
        self._started_s = self._step_started_s = time.perf_counter()

    def rewards(self, reward: Callable[..., list[float]]) -> Callable[..., list[float]]:
        """Return ``reward``, overheard."""

        def overheard(**kwargs: Any) -> list[float]:
            values = reward(**kwargs)
            self._rewards += values
            for name in ("drafted_tokens", "accepted_tokens"):
                self._counts[name] += sum(kwargs[name])
            self._counts["tokens"] += sum(map(len, kwargs["completion_ids"]))
            self._ids.update(repr([list(map(int, ids)) for ids in kwargs["completion_ids"]]).encode())
            return values

        overheard.__name__ = "task_reward"
        return overheard

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._started_s = self._step_started_s = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the step's clock."""
        self._step_started_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the step: keep it, report it, and ask for a stop when ``max_minutes`` are over."""
        now_s = time.perf_counter()
        spent = self._rollouts.clock.take()
        result = StepResult(
            step=int(state.global_step),
            policy_version=self._rollouts.policy_version or 0,
            rewards=tuple(self._rewards),
            step_s=now_s - self._step_started_s,
            generate_s=spent.generate_s,
            weight_sync_s=spent.weight_sync_s,
            mismatch_s=spent.mismatch_s,
            ids_digest=self._ids.hexdigest(),
            by_drafter=tallies_of(spent.acceptance),
            **self._counts,
        )
        self._rewards = []
        self._counts, self._ids = dict.fromkeys(self._counts, 0), blake2b(digest_size=8)
        self.steps.append(result)
        self._report(result, spent.gauges)
        limit_s = self._config.max_minutes * 60
        if limit_s and now_s - self._started_s >= limit_s:
            control.should_training_stop = True
            if result.step < self._config.steps:
                self.stopped_by = "time"

    def _report(self, result: StepResult, gauges: dict[str, float]) -> None:
        self._tracker.record(STEPS, step_fields(result))
        values = {
            "reward/mean": result.reward,
            "trainer/step_s": result.step_s,
            "trainer/generate_s": result.generate_s,
            "trainer/weight_sync_s": result.weight_sync_s,
            "trainer/mismatch_s": result.mismatch_s,
            "trainer/optimize_s": result.optimize_s,
        }
        self._tracker.log({**values, **gauges}, clock="trainer/step", at=result.step)
        if self._progress is not None:
            took = f"step {result.step_s:.1f} s of which rollouts {result.generate_s:.1f} s"
            self._progress.advance(note=f"reward {result.reward:.3f}, {took}")


def tallies_of(rollouts: Iterable[Mapping[str, AcceptanceCounts]]) -> dict[str, DraftTally]:
    """Return what the rollouts of one step say of each drafter, in plain numbers."""
    counts: dict[str, AcceptanceCounts] = {}
    for by_drafter in rollouts:
        for name, found in by_drafter.items():
            counts.setdefault(name, AcceptanceCounts()).add_all(found)
    return {
        name: DraftTally(
            drafted=c.drafted,
            accepted=c.accepted,
            first_decided=c.decided_by_position[0],
            first_kept=c.accepted_by_position[0],
        )
        for name, c in sorted(counts.items())
    }


def step_fields(result: StepResult) -> dict[str, Any]:
    """Return the journal's record of one step."""
    return {**to_plain(result), "reward": result.reward, "optimize_s": result.optimize_s}
