"""What every controller does beside deciding: listen, keep count, price its plans, explain itself."""

from collections.abc import Mapping
from typing import Any

from controller.acceptance import AcceptanceModel
from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.cost import CostModel
from controller.log import Record, controller_record, decision_record
from controller.pipeline import pipelines_of
from controller.types import (
    AR,
    POLICY,
    Assignment,
    DrafterTraits,
    EngineTraits,
    PartShape,
    RoundFacts,
    RoundLoad,
    RoundPlan,
    SequenceLoad,
)
from controller.watchdog import Watchdog, WatchdogAction

COST_EVERY_S = 0.01
"""Time between rounds the cost model learns from; probes always count. At 5 ms a round says little that
the one before did not, and learning from it would cost a percent of it."""

COST_EVERY_ALIKE_S = 0.1
"""The same for a plain round with as many rows as the last one learned from, once the machine is known: that
is most of the rounds where speculation does not pay, and where its price must not show."""

COST_KNOWN_ROUNDS = 20
"""Rounds learned from after which it is: twice as many as a machine parameter needs to settle."""

ERROR_FADE = 0.98
"""Weight kept per round by the running error of predictions: about fifty rounds are averaged."""


def refuse_unknown_parts(traits: EngineTraits, shapes: Mapping[str, PartShape]) -> None:
    """Raise ``ValueError`` when a drafter of the engine, or its policy, has no shape."""
    missing = [name for name in (POLICY, *(d.name for d in traits.drafters)) if name not in shapes]
    if missing:
        raise ValueError(f"no shape of {', '.join(missing)}: the engine's part_shapes() must name every part")


class BaseController:
    """State shared by all kinds. Subclasses implement ``_plan`` and may extend ``_learn``."""

    def __init__(
        self,
        config: ControllerConfig,
        traits: EngineTraits,
        shapes: Mapping[str, PartShape],
        calibration: Calibration | None,
    ) -> None:
        refuse_unknown_parts(traits, shapes)
        self._config, self._traits = config, traits
        self._shapes, self._calibration = dict(shapes), calibration
        self._drafters: dict[str, DrafterTraits] = {d.name: d for d in traits.drafters}
        self._cost = CostModel(shapes, calibration, config) if calibration is not None else None
        self._acceptance = AcceptanceModel(
            config,
            {d.name: d.max_gamma for d in traits.drafters},
            copying=[d.name for d in traits.drafters if not shapes[d.name].rows_per_draft_token],
            pipelines=[d.name for d in traits.drafters if shapes[d.name].lane_loops],
            reuse_frac={d.name: shapes[d.name].reuse_frac for d in traits.drafters},
        )
        self._pipelines = pipelines_of(shapes)
        self._watchdog = Watchdog(config, self._drafters)
        self._assignments: dict[tuple[str, int], Assignment] = {}
        self._version: int | None = None
        self._last_load: RoundLoad | None = None
        self._last_plan: RoundPlan | None = None
        self._last_now_s = 0.0
        self._elapsed_s = 0.0
        self._since_cost_s = 0.0
        self._cost_rows = self._cost_rounds = 0
        """Rows of the round last learned from, and how many there were."""
        self._error_frac = 0.0
        self._counts = {"rounds_ar": 0, "rounds_sd": 0, "rounds_probe": 0, "switches": 0}
        self._was_speculating = False

    # What subclasses decide and learn.

    def _plan(self, load: RoundLoad) -> RoundPlan:
        raise NotImplementedError

    def _learn(self, facts: RoundFacts, plan: RoundPlan | None) -> None:
        """Take a round's facts; ``plan`` is this controller's plan for it, if it made one."""

    def _alternatives(self) -> list[Record]:
        return []

    # The Controller protocol.

    def wants_look_up(self, load: RoundLoad) -> bool:
        """Whether deciding ``load`` needs to know what drafters have ready for free."""
        return True

    def decide(self, load: RoundLoad, *, now_s: float) -> RoundPlan:
        """Return the plan of the next round."""
        self._watchdog.tick(now_s)
        if self._version is None:
            self._version = load.policy_version
        elif load.policy_version != self._version:
            # The engine may move its version before the host tells us; both ways lead here once.
            self.policy_changed(load.policy_version)
        self._acceptance.keep_only((s.key for s in load.sequences), most=4 * self._traits.max_batch)
        plan = self._plan(load) if load.sequences else RoundPlan(assignments={}, reason="nothing decodes")
        speculating = bool(plan.assignments)
        if load.sequences:
            kind = "probe" if plan.probe else "sd" if speculating else "ar"
            self._counts[f"rounds_{kind}"] += 1
            if not plan.probe:
                self._counts["switches"] += speculating != self._was_speculating
                self._was_speculating = speculating
        self._last_load, self._last_plan, self._last_now_s = load, plan, now_s
        return plan

    def observe(self, facts: RoundFacts) -> None:
        """Hear what a round did."""
        load, plan = self._last_load, self._last_plan
        mine = plan if load is not None and load.round_index == facts.round_index else None
        self._elapsed_s += facts.total_s
        if mine is not None and mine.predicted_s > 0.0 and facts.total_s > 0.0:
            error = mine.predicted_s / facts.total_s - 1.0
            self._error_frac = ERROR_FADE * self._error_frac + (1.0 - ERROR_FADE) * error
        probing = mine is not None and mine.probe
        self._since_cost_s += facts.total_s
        if self._cost is not None and (probing or self._since_cost_s >= self._cost_due_s(facts)):
            self._since_cost_s = 0.0
            self._cost_rows, self._cost_rounds = facts.verify_rows, self._cost_rounds + 1
            self._cost.observe(facts)
        told = facts.telling
        if told:
            self._acceptance.observe(told, probing=probing)
        self._watchdog.observe(facts, told)
        self._learn(facts, mine)

    def _cost_due_s(self, facts: RoundFacts) -> float:
        """Return the time since the cost model last learned after which it learns from this round."""
        alike = not facts.drafts and facts.verify_rows == self._cost_rows
        return COST_EVERY_ALIKE_S if alike and self._cost_rounds >= COST_KNOWN_ROUNDS else COST_EVERY_S

    def policy_changed(self, version: int) -> None:
        """Hear that the policy is now ``version``; said twice, it counts once."""
        if version != self._version:
            if self._version is not None:
                self._acceptance.policy_changed()
            self._version = version

    def drafter_built(self, drafter: str, version: int) -> None:
        """Hear that a drafter was built from policy ``version``."""
        self._watchdog.drafter_built(drafter, version)

    def take_actions(self) -> tuple[WatchdogAction, ...]:
        """Return what the host should do about drafters, each once."""
        return self._watchdog.take_actions()

    def gauges(self) -> dict[str, float]:
        """Return loggable numbers."""
        out = {f"controller/{name}": float(count) for name, count in self._counts.items()}
        out["controller/prediction_error_frac"] = self._error_frac
        out["controller/watchdog_alarms"] = float(self._watchdog.alarms)
        if self._cost is not None:
            out["controller/bandwidth_bytes_per_s"] = self._cost.bandwidth_bytes_per_s
            out["controller/rate_flops_per_s"] = self._cost.flops_per_s
        for name in self._drafters:
            out[f"controller/acceptance_frac/{name}"] = self._acceptance.mean(name)
            out[f"controller/usable/{name}"] = float(self._watchdog.usable(name))
        return out

    def decision_record(self) -> Record:
        """Return the last decision as plain data. Raises ``ValueError`` before the first."""
        if self._last_load is None or self._last_plan is None:
            raise ValueError("nothing was decided yet")
        return {
            **decision_record(self._last_load, self._last_plan, now_s=self._last_now_s),
            "alternatives": self._alternatives(),
            "state": self._state(),
        }

    def controller_record(self) -> Record:
        """Return what this controller was built from."""
        return controller_record(self._config, self._traits, self._shapes, self._calibration)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"acceptance_frac": {d: self._acceptance.mean(d) for d in self._drafters}}
        if self._cost is not None:
            state["bandwidth_bytes_per_s"] = self._cost.bandwidth_bytes_per_s
            state["rate_flops_per_s"] = self._cost.flops_per_s
        return state

    # Shared by the kinds.

    def _room(self, sequence: SequenceLoad, drafter: str) -> int:
        """Return the most draft tokens ``drafter`` can usefully offer the sequence."""
        ready = sequence.history_match_tokens.get(drafter)
        if ready is None:
            # A drafter that runs no model and reports nothing has nothing.
            ready = self._drafters[drafter].max_gamma if self._shapes[drafter].rows_per_draft_token else 0
        # The last token needs no draft, but it may be under way in a pipeline already.
        useful = max(sequence.remaining_tokens - 1, int(drafter in self._pipelines))
        return max(0, min(self._drafters[drafter].max_gamma, useful, ready))

    def _assignment(self, drafter: str, gamma: int) -> Assignment:
        """Return one shared record per (drafter, gamma): plans are built every round."""
        key = (drafter, gamma)
        if key not in self._assignments:
            self._assignments[key] = Assignment(drafter=drafter if gamma else AR, gamma=gamma)
        return self._assignments[key]

    def _expected_tokens(self, load: RoundLoad, assignments: Mapping[int, Assignment]) -> float:
        more = sum([self._expected_more(load, assignments, key) for key in assignments])
        return len(load.sequences) + more

    def _expected_more(
        self, load: RoundLoad, assignments: Mapping[int, Assignment], key: int, *, fresh: bool = False
    ) -> float:
        """Return the tokens a sequence is expected to commit beyond the one it gets anyway.

        ``fresh``: it begins, so that a pipeline has to fill first, which takes the passes of one token.
        """
        assignment = assignments[key]
        drafter = assignment.drafter
        if drafter not in self._pipelines:
            return self._acceptance.expected_accepted(drafter, assignment.gamma, key)
        pipeline = self._pipelines[drafter]
        in_lanes = sum([a.drafter == drafter for a in assignments.values()])
        alone = in_lanes == len(load.sequences) and not load.prefill_tokens
        alpha = self._acceptance.expected_accepted(drafter, 1, key)
        passes = pipeline.shape.passes_of(in_lanes, alone=alone)
        if fresh:
            return (passes - pipeline.loops) / pipeline.passes_per_token(alpha)
        return passes / pipeline.passes_per_token(alpha) - 1.0

    def _predicted_s(self, load: RoundLoad, assignments: Mapping[int, Assignment]) -> float:
        """Return the seconds a round is expected to take; 0 without a cost model."""
        if self._cost is None:
            return 0.0
        lanes = {n: p.mean_lanes(self._acceptance.mean(n)) for n, p in self._pipelines.items()}
        return self._cost.predict_round(load, assignments, lanes=lanes).total_s

    def _priced(
        self, load: RoundLoad, assignments: Mapping[int, Assignment], reason: str, *, probe: bool = False
    ) -> RoundPlan:
        """Return a plan with its predictions; none without a cost model: they cost time in every round."""
        if self._cost is None:
            return RoundPlan(assignments=assignments, reason=reason, probe=probe)
        return RoundPlan(
            assignments=assignments,
            reason=reason,
            predicted_s=self._predicted_s(load, assignments),
            predicted_tokens=self._expected_tokens(load, assignments),
            probe=probe,
        )
