"""Where plain classes become Ray actors, and Ray's errors become ours. Nothing else here, and nowhere else.

Each kind of call has its concurrency group, so that a control call never waits behind generation.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayTaskError

from controller.types import InFlight
from rollout.config import ServiceConfig
from rollout.errors import RolloutError
from rollout.policy.manifest import UpdateManifest
from rollout.service.factory import HostSpec
from rollout.service.host import PolicyHost
from rollout.service.live import Key, Targets
from rollout.service.records import (
    HandedBack,
    HostEvents,
    HostReady,
    Identity,
    LoopStatus,
    RoundRecord,
)
from rollout.types import Request

NAMESPACE = "taildraft"
"""Of every name we give: a lookup from another process must name it too."""

CONTROL_SLOTS = 32
"""Control calls in progress at once. One may wait for a drain as long as the longest rollout runs."""

HOLD_SLOTS = 1000
"""Clients of one service, over its life: each takes one for good. One too many waits, and is served."""

WeightsRef = list[Any]
"""One object-store reference, in a list: Ray resolves bare references before the call, not those in lists."""


class HostGoneError(Exception):
    """A host died or does not answer. Never leaves the service."""


class HostActor:
    """A host in another process: its methods by name, its death as ``HostGoneError``."""

    def __init__(
        self, spec: HostSpec, *, host: str, threads: int, flush_s: float, cpus: float, gpus: float
    ) -> None:
        """Start the process. Returns at once; ``ready`` tells when it can be used."""
        remote = ray.remote(concurrency_groups={"generate": 8, "events": 2, "control": CONTROL_SLOTS})(
            PolicyHost
        )
        self._actor = remote.options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0).remote(
            spec, host=host, threads=threads, flush_s=flush_s
        )

    async def ready(self, timeout_s: float) -> HostReady:
        """Return its first words. Raises ``TimeoutError``, or what building the engine raised."""
        return cast(HostReady, await self._ask("ready", timeout_s=timeout_s))

    async def submit(self, requests: Sequence[Request], begun: Mapping[Key, Identity]) -> HandedBack | None:
        """Queue requests there; see ``EngineLoop.add``."""
        answer = await self._ask("submit", list(requests), dict(begun), group="generate")
        return cast(HandedBack | None, answer)

    async def events(self) -> AsyncIterator[HostEvents]:
        """Yield what happens to requests there. Raises ``HostGoneError`` when the host dies."""
        method = self._actor.events.options(concurrency_group="events", num_returns="streaming")
        try:
            async for reference in method.remote():
                yield await asyncio.wrap_future(reference.future())
        except RayActorError as error:
            raise HostGoneError(_first_line(error)) from error

    async def prepare_update(
        self, manifest: UpdateManifest, in_flight: InFlight, weights: WeightsRef
    ) -> None:
        """Stage a weight update there; the weights go from the object store straight to the host."""
        await self._ask("prepare_update", manifest, in_flight, weights[0])

    async def commit_update(self) -> Identity:
        """Switch there."""
        return cast(Identity, await self._ask("commit_update"))

    async def discard_update(self) -> None:
        """Drop an open update there."""
        await self._ask("discard_update")

    async def abort(self, targets: Targets, reason: str) -> int:
        """End requests there."""
        return cast(int, await self._ask("abort", targets, reason))

    async def pause(self) -> None:
        """Stop its rounds."""
        await self._ask("pause")

    async def resume(self) -> None:
        """Let its rounds go on."""
        await self._ask("resume")

    async def sleep(self) -> None:
        """Free its KV memory."""
        await self._ask("sleep")

    async def wake(self) -> None:
        """Give it its KV memory back."""
        await self._ask("wake")

    async def status(self, timeout_s: float) -> LoopStatus:
        """Return how it is doing. Raises ``HostGoneError`` when it does not answer in time."""
        try:
            return cast(LoopStatus, await self._ask("status", timeout_s=timeout_s))
        except TimeoutError:
            raise HostGoneError(f"no answer to a status call within {timeout_s} s") from None

    async def take_rounds(self) -> list[RoundRecord]:
        """Return its round records since the last call."""
        return cast(list[RoundRecord], await self._ask("take_rounds"))

    async def close(self, timeout_s: float) -> None:
        """Close it. Raises ``TimeoutError``."""
        await self._ask("close", timeout_s=timeout_s)

    def kill(self) -> None:
        """End its process now. Idempotent."""
        ray.kill(self._actor, no_restart=True)

    async def _ask(
        self, method: str, *args: object, group: str = "control", timeout_s: float | None = None
    ) -> Any:
        reference = getattr(self._actor, method).options(concurrency_group=group).remote(*args)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)
        except RayTaskError as error:
            raise plain_error(error) from None
        except RayActorError as error:
            raise HostGoneError(_first_line(error)) from error


def create_service(service: type, spec: HostSpec, config: ServiceConfig, *, run_seed: int) -> Any:
    """Return the handle of a new ``service``, named ``config.name``. It lives as long as its creator.

    The class is handed in because it starts its hosts through this file.
    """
    groups = {"generate": config.generate_slots, "control": CONTROL_SLOTS, "hold": HOLD_SLOTS}
    remote = ray.remote(concurrency_groups=groups)(service)
    return remote.options(
        name=config.name, namespace=NAMESPACE, num_cpus=0, max_restarts=0, max_task_retries=0
    ).remote(spec, config, run_seed=run_seed)


def plain_error(error: RayTaskError) -> BaseException:
    """Return the error as it was raised where the task ran, if it is one of ours; Ray's own otherwise."""
    cause = error.cause
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause if isinstance(cause, RolloutError) else error


def node_count() -> int:
    """Return how many machines the cluster has."""
    return max(1, sum(bool(node["Alive"]) for node in ray.nodes()))


def resource_summary() -> str:
    """Return what the cluster has and what is free, for messages."""
    total, free = ray.cluster_resources(), ray.available_resources()
    names = ("CPU", "GPU")
    return ", ".join(f"{free.get(n, 0):g} of {total.get(n, 0):g} {n} free" for n in names)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
