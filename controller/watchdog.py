"""Notices a drafter that broke, and says what the host should do about it: rebuild, then off.

A drafter can only cost time, so the watchdog protects speed, never correctness. It decides; the host acts
and reports back with ``drafter_built``.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from controller.acceptance import tried_and_kept
from controller.config import ControllerConfig
from controller.types import RoundFacts, SequenceOutcome

ActionKind = Literal["rebuild", "off"]

BLOCK_TOKENS = 256
"""Draft tokens judged at once: enough that chance alone moves their mean by under 0.17."""

FALSE_ALARM_ODDS = 1e-6
"""Chance per block that a healthy drafter is called collapsed (Hoeffding's bound)."""

HISTORY_FADE = 0.9
"""Weight of a drafter's own past when a healthy block joins it: about ten blocks are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchdogAction:
    """What the host should do with one drafter."""

    drafter: str
    action: ActionKind
    reason: str


@dataclass(slots=True)
class _State:
    """One drafter's health."""

    version: int | None = None
    history: float | None = None
    tried: int = 0
    kept: int = 0
    failing_rounds: int = 0
    probation_until_s: float = -math.inf
    off_until_s: float = -math.inf
    asked_version: int | None = None
    """Policy version a lagging drafter was last asked to catch up with, so one lag is one action."""


class Watchdog:
    """Health of every drafter of one engine."""

    def __init__(self, config: ControllerConfig, drafters: Iterable[str]) -> None:
        self._config = config
        self._states = {name: _State() for name in drafters}
        self._actions: list[WatchdogAction] = []
        self._now_s = 0.0
        self._latest_off_s = -math.inf
        """Until when the drafter switched off last stays so; it may be back earlier."""
        self._judged_version: int | None = None
        """Policy version at which every drafter's lag was judged; None since one was built."""
        self.alarms = 0

    def tick(self, now_s: float) -> None:
        """Hear the time; it only moves forward."""
        self._now_s = max(self._now_s, now_s)

    @property
    def all_usable(self) -> bool:
        """Whether surely no drafter is off now."""
        return self._now_s >= self._latest_off_s

    def usable(self, drafter: str) -> bool:
        """Whether plans may use the drafter now."""
        return self._now_s >= self._states[drafter].off_until_s

    def take_actions(self) -> tuple[WatchdogAction, ...]:
        """Return what the host should do since last asked, oldest first."""
        actions, self._actions = tuple(self._actions), []
        return actions

    def drafter_built(self, drafter: str, version: int) -> None:
        """Hear that the host rebuilt a drafter from policy ``version``."""
        state = self._states.get(drafter)
        if state is None:
            return
        self._judged_version = None
        if state.version is not None and version > state.version:
            # Built from a newer policy it is another drafter: what was wrong with the old one is over.
            state.off_until_s = state.probation_until_s = -math.inf
        state.version = version
        state.tried = state.kept = state.failing_rounds = 0

    def observe(self, facts: RoundFacts, drafted: Collection[SequenceOutcome]) -> None:
        """Judge one round. ``drafted`` holds at least its outcomes with draft tokens."""
        if not facts.drafts and not drafted and facts.policy_version == self._judged_version:
            return
        self._judged_version = facts.policy_version
        for draft in facts.drafts:
            state = self._states.get(draft.drafter)
            if state is None:
                continue
            state.failing_rounds = state.failing_rounds + 1 if draft.failures else 0
            if state.failing_rounds >= self._config.watchdog_failures:
                self._alarm(draft.drafter, state, f"{state.failing_rounds} rounds in a row failed to draft")
        for outcome in drafted:
            state = self._states.get(outcome.drafter)
            if state is not None and outcome.gamma > 0:
                tried, kept = tried_and_kept(outcome)
                state.tried += tried
                state.kept += kept
        for name, state in self._states.items():
            if state.tried >= BLOCK_TOKENS:
                self._judge_block(name, state)
            self._judge_lag(name, state, facts.policy_version)

    def _judge_block(self, name: str, state: _State) -> None:
        mean, tried = state.kept / state.tried, state.tried
        state.tried = state.kept = 0
        if state.history is None:
            state.history = mean
            return
        highest = mean + math.sqrt(math.log(1.0 / FALSE_ALARM_ODDS) / (2.0 * tried))
        if highest < self._config.watchdog_collapse_frac * state.history:
            self._alarm(name, state, f"accepts {mean:.2f} of its draft tokens, had {state.history:.2f}")
        else:
            state.history = HISTORY_FADE * state.history + (1.0 - HISTORY_FADE) * mean

    def _judge_lag(self, name: str, state: _State, policy_version: int) -> None:
        if state.version is None or state.asked_version == policy_version:
            return
        lag = policy_version - state.version
        if lag > self._config.watchdog_version_lag:
            state.asked_version = policy_version
            self._alarm(name, state, f"lies {lag} versions behind the policy")

    def _alarm(self, name: str, state: _State, reason: str) -> None:
        """Ask for a rebuild; for a drafter still on probation from the last one, switch it off."""
        self.alarms += 1
        state.failing_rounds = state.tried = state.kept = 0
        until = self._now_s + self._config.watchdog_cooldown_s
        if self._now_s < state.probation_until_s:
            state.off_until_s, state.probation_until_s = until, -math.inf
            self._latest_off_s = max(self._latest_off_s, until)
            self._actions.append(WatchdogAction(drafter=name, action="off", reason=reason))
        else:
            state.probation_until_s = until
            self._actions.append(WatchdogAction(drafter=name, action="rebuild", reason=reason))
