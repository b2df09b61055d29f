"""The one entrance: what a controller is, and how one is built."""

from collections.abc import Callable, Mapping
from typing import Protocol

from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.log import Record
from controller.types import EngineTraits, PartShape, RoundFacts, RoundLoad, RoundPlan
from controller.watchdog import WatchdogAction


class Controller(Protocol):
    """Decides rounds for one engine and learns from them. All state is its own; the same inputs in the
    same order give the same plans. Not thread-safe: the loop that owns the engine owns it."""

    def wants_look_up(self, load: RoundLoad) -> bool:
        """Whether deciding ``load`` needs to know what drafters have ready for free. Changes nothing."""
        ...

    def decide(self, load: RoundLoad, *, now_s: float) -> RoundPlan:
        """Return the plan of the next round. ``now_s`` is the caller's clock; it only moves forward."""
        ...

    def observe(self, facts: RoundFacts) -> None:
        """Hear what a round did. Rounds that were never decided here are fine too."""
        ...

    def policy_changed(self, version: int) -> None:
        """Hear that the policy is now ``version``."""
        ...

    def drafter_built(self, drafter: str, version: int) -> None:
        """Hear that a drafter was built from policy ``version``."""
        ...

    def take_actions(self) -> tuple[WatchdogAction, ...]:
        """Return what the host should do about drafters, each once."""
        ...

    def gauges(self) -> dict[str, float]:
        """Return loggable numbers, ``controller/what_unit``."""
        ...

    def decision_record(self) -> Record:
        """Return the last decision as plain data: load, plan, alternatives and their prices, reason."""
        ...

    def controller_record(self) -> Record:
        """Return what this controller was built from, the first line of a log."""
        ...


def _auto(
    config: ControllerConfig,
    traits: EngineTraits,
    shapes: Mapping[str, PartShape],
    calibration: Calibration | None,
) -> Controller:
    from controller.auto import AutoController

    if calibration is None:
        raise ValueError("controller.kind auto needs a calibration of this machine and model")
    return AutoController(config, traits, shapes, calibration)


def _baseline(
    config: ControllerConfig,
    traits: EngineTraits,
    shapes: Mapping[str, PartShape],
    calibration: Calibration | None,
) -> Controller:
    from controller.policies import BaselineController

    return BaselineController(config, traits, shapes, calibration)


Builder = Callable[[ControllerConfig, EngineTraits, Mapping[str, PartShape], Calibration | None], Controller]

BUILDERS: dict[str, Builder] = {
    "auto": _auto,
    "ar": _baseline,
    "fixed": _baseline,
    "threshold": _baseline,
    "ladder": _baseline,
}
"""Every controller there is, by ``controller.kind``."""


def build_controller(
    config: ControllerConfig,
    traits: EngineTraits,
    shapes: Mapping[str, PartShape],
    calibration: Calibration | None,
) -> Controller:
    """Return a fresh controller for one engine; nothing is shared with any other.

    Baselines take ``calibration`` only to predict. Raises ``ValueError`` by full path when the config asks
    for what the engine does not have.
    """
    return BUILDERS[config.kind](config, traits, shapes, calibration)
