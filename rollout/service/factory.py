"""What a host is made of, as plain data that crosses a process border, and how it is put together there."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from controller.config import ControllerConfig
from drafters.config import DrafterConfig
from rollout.config import EngineConfig, PolicyConfig
from rollout.engine.protocol import Engine
from rollout.service.loop import RoundController


class HostSpec(Protocol):
    """A recipe for a host. Picklable, and cheap until it is built."""

    def for_host(self, *, host: str, threads: int) -> "HostSpec":
        """Return the recipe of the host named ``host``, which may use ``threads`` threads."""
        ...

    def build(self) -> tuple[Engine, RoundController]:
        """Load the policy and return the engine that serves it and the controller that drives it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """The native engine and its controller, as settings."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    calibration: Mapping[str, Any] | None = None
    """As JSON data. None: the controller starts from what it is shipped with."""

    host: str = "local"

    def for_host(self, *, host: str, threads: int) -> "EngineSpec":
        """Return the recipe of one host; threads set in ``engine`` win over the service's share."""
        engine = self.engine if self.engine.threads else replace(self.engine, threads=threads)
        return replace(self, host=host, engine=engine)

    def build(self) -> tuple[Engine, RoundController]:
        """Load the policy, build the drafters, and put a controller on top."""
        raise NotImplementedError
