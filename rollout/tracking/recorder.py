"""From the service's records to the tracker: what a driver calls once per rollout step and weight update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.types import ByColumn, RoundFacts, RoundLoad, RoundPlan, SequenceLoad, SequenceOutcome
from rollout.settings import to_plain
from rollout.tracking.control_log import ControlLogs
from rollout.tracking.reduce import AcceptanceCounts, RolloutPool, completion_record, round_gauges
from rollout.tracking.tracker import Tracker
from rollout.types import Completion

if TYPE_CHECKING:
    from rollout.service.records import RoundRecord

ROUNDS = "rounds"
COMPLETIONS = "completions"
EVENTS = "events"


class RolloutRecorder:
    """Counts, journals and charts a run's rounds and completions. Lives in the driver, beside its tracker.

    Rounds of several hosts share the clock ``engine/round``: it counts rounds in the order they arrive.
    ``first_round`` continues it after a resume. With ``folder`` every host's control log is written there.
    """

    def __init__(self, tracker: Tracker, *, first_round: int = 0, folder: Path | None = None) -> None:
        self._tracker = tracker
        self._control = None if folder is None else ControlLogs(folder)
        self._pool = RolloutPool()
        self._next_round = first_round

    def rounds(self, records: Iterable[RoundRecord]) -> None:
        """Take rounds in the order they ran on each host."""
        ran = list(records)
        if self._control is not None:
            self._control.rounds(ran)
        for record in ran:
            self._pool.add_round(record.facts, record.plan)
            line = round_record(
                host=record.host, at_s=record.at_s, load=record.load, plan=record.plan, facts=record.facts
            )
            self._tracker.record(ROUNDS, {"round": self._next_round, **line})
            gauges = round_gauges(record.facts, record.plan)
            self._tracker.log(gauges, clock="engine/round", at=self._next_round)
            self._next_round += 1

    def completions(self, completions: Iterable[Completion], *, rollout_step: int) -> None:
        """Take requests that ended, each once."""
        ended = list(completions)
        self._pool.add_completions(ended)
        for completion in ended:
            self._tracker.record(COMPLETIONS, {"rollout_step": rollout_step, **completion_record(completion)})

    def update(self, *, version: int, update_s: float, drafter_build_s: float | None = None) -> None:
        """Take one weight update; ``drafter_build_s`` is the share that rebuilt drafters, None if unknown."""
        self._pool.add_update(version=version, update_s=update_s, drafter_build_s=drafter_build_s)
        self.event("weight_update", version=version, update_s=update_s, drafter_build_s=drafter_build_s)

    def event(self, name: str, **fields: Any) -> None:
        """Journal something that happened once."""
        self._tracker.record(EVENTS, {"event": name, **fields})

    @property
    def acceptance_by_drafter(self) -> Mapping[str, AcceptanceCounts]:
        """What verification said since the last rollout step, by drafter."""
        return self._pool.acceptance_by_drafter

    def step(
        self, rollout_step: int, *, wall_s: float, more: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Chart the numbers of one rollout step that took ``wall_s`` and return them."""
        metrics = {**self._pool.metrics(wall_s=wall_s), **(more or {})}
        self._pool = RolloutPool(policy_version=self._pool.policy_version)
        self._tracker.log(metrics, clock="rollout/step", at=rollout_step)
        return metrics


def round_record(
    *, host: str, at_s: float, load: RoundLoad, plan: RoundPlan, facts: RoundFacts
) -> dict[str, Any]:
    """Return one decision and what came of it as plain data; sequences are columns, to keep lines short."""
    facts_plain = to_plain(replace(facts, outcomes=()))
    facts_plain["outcomes"] = _columns(facts.outcomes)
    load_plain = to_plain(replace(load, sequences=()))
    load_plain["sequences"] = _columns(load.sequences)
    plan_plain = to_plain(plan)
    plan_plain["assignments"] = {
        "key": list(plan.assignments),
        "drafter": [a.drafter for a in plan.assignments.values()],
        "gamma": [a.gamma for a in plan.assignments.values()],
    }
    return {"host": host, "at_s": at_s, "load": load_plain, "plan": plan_plain, "facts": facts_plain}


def _columns(rows: Sequence[SequenceLoad] | Sequence[SequenceOutcome]) -> dict[str, list[Any]]:
    if not rows:
        return {}
    if isinstance(rows, ByColumn):
        return {name: to_plain(column) for name, column in rows.columns().items()}
    return {
        name: to_plain(list(column))
        for name, column in zip(rows[0]._fields, zip(*rows, strict=True), strict=True)
    }
