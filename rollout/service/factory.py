"""What a host is made of, as plain data that crosses a process border, and how it is put together there."""

import logging
import os
from dataclasses import dataclass, field, replace
from typing import Protocol

from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.decide import Controller
from drafters.config import DrafterConfig
from rollout.config import EngineConfig, PolicyConfig
from rollout.engine.protocol import Engine

log = logging.getLogger(__name__)


class HostSpec(Protocol):
    """A recipe for a host. Picklable, and cheap until it is built."""

    def for_host(self, *, host: str, threads: int) -> "HostSpec":
        """Return the recipe of the host named ``host``, which may use ``threads`` threads."""
        ...

    def build(self) -> tuple[Engine, Controller]:
        """Load the policy and return the engine that serves it and the controller that drives it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """The native engine and its controller, as settings."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    calibration: str | None = None
    """As JSON text (``Calibration.to_json``). None: the cached one of this machine and policy is used, and
    measured first where there is none and ``controller.kind`` needs it."""

    host: str = "local"

    def for_host(self, *, host: str, threads: int) -> "EngineSpec":
        """Return the recipe of one host; threads set in ``engine`` win over the service's share."""
        engine = self.engine if self.engine.threads else replace(self.engine, threads=threads)
        return replace(self, host=host, engine=engine)

    def build(self) -> tuple[Engine, Controller]:
        """Load the policy, build the drafters, and put a controller on top."""
        from controller.decide import build_controller
        from rollout.engine.native.build import build_engine

        set_threads(self.engine.threads)
        engine = build_engine(self.policy, self.engine, self.drafter, host=self.host)
        calibration = self._calibration(engine)
        return engine, build_controller(self.controller, engine.traits, engine.part_shapes(), calibration)

    def _calibration(self, engine: Engine) -> Calibration | None:
        if self.calibration is not None:
            return Calibration.from_json(self.calibration)
        if self.controller.kind != "auto":
            return None
        from rollout.calibration.store import load_or_calibrate

        return load_or_calibrate(engine, self.controller, self.engine)


def set_threads(threads: int) -> None:
    """Give torch its threads. Ray sets OMP_NUM_THREADS from an actor's CPUs, which says nothing of ours."""
    if threads == 0:
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    log.info(
        "torch threads: %d -> %d (OMP_NUM_THREADS=%s)", before, threads, os.environ.get("OMP_NUM_THREADS")
    )
