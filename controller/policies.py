"""The baselines: plain decoding, one fixed gamma, a one-way threshold, and the published ladder."""

from collections.abc import Mapping

from controller.base import BaseController
from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.types import Assignment, EngineTraits, PartShape, RoundFacts, RoundLoad, RoundPlan


def baseline_problem(config: ControllerConfig, max_gammas: Mapping[str, int]) -> str:
    """Return why a baseline cannot draft with these drafters, by full path; nothing where it can.

    ``max_gammas`` holds the most draft tokens of every drafter there is. ``auto`` and ``ar`` take any.
    """
    if config.kind in ("auto", "ar"):
        return ""
    most = max_gammas.get(config.drafter)
    if most is None:
        known = ", ".join(max_gammas) or "none"
        return f"controller.drafter {config.drafter!r} is not in the engine (it has: {known})"
    ladder = config.kind == "ladder"
    path, asked = ("ladder_gammas", max(config.ladder_gammas)) if ladder else ("gamma", config.gamma)
    if asked <= most:
        return ""
    return (
        f"controller.{path} asks for {asked}, but {config.drafter} drafts at most {most} (drafter.max_gamma)"
    )


class BaselineController(BaseController):
    """``ar``, ``fixed``, ``threshold`` and ``ladder``.

    A rollout starts, for the one-way rules, when no sequence of the last round is still there: keys are
    never reused.
    """

    def __init__(
        self,
        config: ControllerConfig,
        traits: EngineTraits,
        shapes: Mapping[str, PartShape],
        calibration: Calibration | None,
    ) -> None:
        """Raises ``ValueError`` when the engine has no such drafter, or not with that many draft tokens."""
        super().__init__(config, traits, shapes, calibration)
        problem = baseline_problem(config, {name: d.max_gamma for name, d in self._drafters.items()})
        if problem:
            raise ValueError(problem)
        self._gamma = config.ladder_gammas[0] if config.kind == "ladder" else config.gamma
        self._running: frozenset[int] = frozenset()
        self._on = False
        self._drafted = self._accepted = 0
        self._votes = 0
        """Equal votes in a row; positive raises gamma."""

    def wants_look_up(self, load: RoundLoad) -> bool:
        """Whether the one drafter there is runs no model, so that all it can offer is what it has ready."""
        return self._config.kind != "ar" and not self._shapes[self._config.drafter].rows_per_draft_token

    def _plan(self, load: RoundLoad) -> RoundPlan:
        keys = frozenset(load.keys)
        if not keys & self._running:
            self._start_rollout()
        self._running = keys
        kind, batch = self._config.kind, len(keys)
        if kind == "ar":
            return self._priced(load, {}, "always plain")
        if kind == "fixed":
            return self._speculate(load, "fixed gamma")
        # A rollout that is still filling up looks like a tail; only what cannot grow counts.
        filling = load.waiting > 0 or load.prefill_tokens > 0
        self._on = self._on or (batch <= self._config.threshold_batch and not filling)
        if not self._on:
            return self._priced(load, {}, "batch above the threshold")
        return self._speculate(load, "batch fell to the threshold in this rollout")

    def _speculate(self, load: RoundLoad, reason: str) -> RoundPlan:
        drafter = self._config.drafter
        if not self._watchdog.usable(drafter):
            return self._priced(load, {}, f"{drafter} is off")
        rooms = {s.key: min(self._gamma, self._room(s, drafter)) for s in load.sequences}
        assignments: dict[int, Assignment] = {
            key: self._assignment(drafter, room) for key, room in rooms.items() if room > 0
        }
        return self._priced(
            load, assignments, f"{reason} {self._gamma}" if assignments else "nothing to draft"
        )

    def _start_rollout(self) -> None:
        self._on = False
        if self._config.kind == "ladder" and self._drafted:
            self._climb(self._accepted / self._drafted)
        self._drafted = self._accepted = 0

    def _climb(self, accepted_frac: float) -> None:
        """Move gamma one rung after enough equal votes in a row (EfficientRollout's rule)."""
        config = self._config
        vote = (accepted_frac >= config.ladder_raise_frac) - (accepted_frac <= config.ladder_lower_frac)
        self._votes = self._votes + vote if vote and self._votes * vote >= 0 else vote
        if abs(self._votes) < config.ladder_patience_rollouts:
            return
        rungs = config.ladder_gammas
        at = rungs.index(self._gamma) + (1 if self._votes > 0 else -1)
        self._gamma = rungs[min(len(rungs) - 1, max(0, at))]
        self._votes = 0

    def _learn(self, facts: RoundFacts, plan: RoundPlan | None) -> None:
        for o in facts.telling:
            if o.gamma > 0 and not o.censored:
                self._drafted += o.gamma
                self._accepted += o.accepted

    def gauges(self) -> dict[str, float]:
        """Return loggable numbers."""
        gamma = 0 if self._config.kind == "ar" else self._gamma
        return {**super().gauges(), "controller/gamma_tokens": float(gamma)}
