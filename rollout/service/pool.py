"""Keeps hosts alive and of one version: starts them, notices their death, restarts and re-loads them.

Lives on one event loop. What happens to requests is its listener's business; whether a host may get any
is decided here: a host is ``ready`` only once it serves the current weights.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from controller.types import EngineTraits, InFlight
from rollout.config import ServiceConfig
from rollout.cores import usable_cores
from rollout.errors import (
    ConfigError,
    EngineCrashError,
    FingerprintError,
    RolloutError,
    UnsupportedError,
    WeightUpdateError,
)
from rollout.policy.manifest import UpdateManifest
from rollout.service.actors import HostActor, HostGoneError, WeightsRef, node_count, resource_summary
from rollout.service.factory import HostSpec
from rollout.service.live import Key, Targets
from rollout.service.records import (
    HandedBack,
    HostEvents,
    Identity,
    LoopStatus,
    RoundRecord,
    SlotHealth,
    SlotState,
)
from rollout.types import Request

log = logging.getLogger(__name__)

T = TypeVar("T")

FRESH_STATUS_S = 0.5
"""How long a caller of ``health`` or ``stats`` waits for one host's word before its last one is shown."""


DISCARD_AGAIN_S = 0.2
"""While hosts are still preparing a refused update it is discarded again so often."""


class PoolListener(Protocol):
    """Whoever has requests on the hosts. Called on the pool's event loop; must not block."""

    def host_events(self, host: str, events: HostEvents) -> None:
        """Take what happened on a host."""
        ...

    def host_lost(self, host: str, identity: Identity | None, reason: str) -> None:
        """Take back everything that host had. No event of it will follow."""
        ...

    def handed_back(self, host: str, requests: Sequence[Request]) -> None:
        """Take back requests that host did not take; it now serves other weights than they began under."""
        ...

    def hosts_changed(self) -> None:
        """Hear that a host became ready, or that one will never be again."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class Slot:
    """A place for a host, and the host now in it."""

    index: int
    state: SlotState = "starting"
    restarts: int = 0
    actor: Any = None
    traits: EngineTraits | None = None
    identity: Identity | None = None
    pid: int | None = None
    status: LoopStatus | None = None
    last_error: str | None = None
    reader: asyncio.Task[None] | None = None
    submits: set[asyncio.Task[Any]] = field(default_factory=set)
    """Requests on their way to a host here."""

    @property
    def host(self) -> str:
        """The host's name; a successor has another."""
        return f"host-{self.index}" if self.restarts == 0 else f"host-{self.index}.{self.restarts}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentWeights:
    """The live version, as every host that starts later must load it."""

    manifest: UpdateManifest
    weights: WeightsRef
    """The object-store reference, in a list. The store keeps the object while this is held."""


class HostPool:
    """All hosts of one service."""

    def __init__(
        self,
        spec: HostSpec,
        config: ServiceConfig,
        listener: PoolListener,
        *,
        new_host: Callable[..., Any] = HostActor,
    ) -> None:
        """``new_host`` makes what stands for one host here, as ``HostActor`` does."""
        self._spec, self._config, self._listener = spec, config, listener
        self._new_host = new_host
        self.slots = [Slot(index=i) for i in range(config.hosts)]
        self._current: CurrentWeights | None = None
        self._weights_lock = asyncio.Lock()
        self.paused = self.asleep = False
        self.carried_since = 0
        """Version of the last update that carried no text over: it let all end, or ended all."""

        self._changed = asyncio.Event()
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.restarts_total = 0

    # ---- what there is ----------------------------------------------------------------------------

    @property
    def ready(self) -> list[Slot]:
        """Slots whose host may get requests."""
        return [slot for slot in self.slots if slot.state == "ready"]

    @property
    def hopeless(self) -> bool:
        """Whether no host is left and none will come."""
        return all(slot.state == "retired" for slot in self.slots)

    @property
    def policy_version(self) -> int:
        """The version every ready host serves, or is just being switched to."""
        if self._current is not None:
            return self._current.manifest.version
        versions = [slot.identity.policy_version for slot in self.slots if slot.identity is not None]
        return max(versions, default=0)

    def health(self, in_flight: Callable[[str], int]) -> tuple[SlotHealth, ...]:
        """Return every slot's state; ``in_flight`` counts the requests of a host."""
        return tuple(
            SlotHealth(
                host=slot.host,
                state=slot.state,
                restarts=slot.restarts,
                pid=slot.pid,
                policy_version=slot.identity.policy_version if slot.identity else None,
                fingerprint=slot.identity.fingerprint if slot.identity else None,
                in_flight=in_flight(slot.host),
                loop=slot.status,
                last_error=slot.last_error,
            )
            for slot in self.slots
        )

    # ---- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all hosts. Raises when one does not start, or their numerics differ."""
        try:
            await asyncio.gather(*(self._start_host(slot) for slot in self.slots))
            self._check_fingerprints()
        except BaseException:
            await self.close()
            raise
        for slot in self.slots:
            self._open(slot)
        self.spawn(self._watch())

    async def close(self) -> None:
        """End all hosts."""
        self._closing = True
        for task in (*self._tasks, *(s.reader for s in self.slots if s.reader is not None)):
            task.cancel()
        await asyncio.gather(*(self._close_slot(slot) for slot in self.slots))

    async def _close_slot(self, slot: Slot) -> None:
        was, slot.state = slot.state, "retired"
        if slot.actor is None:
            return
        if was == "ready":
            try:
                await slot.actor.close(min(5.0, self._config.call_timeout_s))
            except (TimeoutError, RolloutError) as error:
                log.warning("%s did not close: %s", slot.host, error)
            except Exception as error:  # noqa: BLE001 - it is killed next, whatever ailed it
                log.debug("%s was gone already: %s", slot.host, error)
        slot.actor.kill()

    async def _start_host(self, slot: Slot) -> None:
        config = self._config
        threads = config.threads_per_host or threads_for(config.hosts, nodes=node_count())
        slot.state, slot.status = "starting", None
        slot.actor = self._new_host(
            self._spec,
            host=slot.host,
            threads=threads,
            flush_s=config.flush_s,
            cpus=config.host_cpus,
            gpus=config.host_gpus,
        )
        try:
            first_words = await slot.actor.ready(config.start_timeout_s)
        except TimeoutError:
            raise ConfigError(
                f"service.start_timeout_s: {slot.host} was not ready after {config.start_timeout_s:g} s; it "
                f"wants {config.host_cpus:g} CPU and {config.host_gpus:g} GPU, the cluster has "
                f"{resource_summary()}"
            ) from None
        slot.traits, slot.pid = first_words.traits, first_words.pid
        slot.identity = Identity(
            policy_version=first_words.policy_version, fingerprint=first_words.fingerprint
        )
        log.info(
            "%s: pid %d, %d threads, %s", slot.host, slot.pid, first_words.threads, first_words.fingerprint
        )

    def _open(self, slot: Slot) -> None:
        """Let a host have requests."""
        slot.state = "ready"
        slot.reader = asyncio.create_task(self._read(slot, slot.host))
        self._tell_changed()

    def _tell_changed(self) -> None:
        self._changed.set()
        self._listener.hosts_changed()

    async def _read(self, slot: Slot, host: str) -> None:
        """Pass a host's events on until it dies."""
        reason = "its events ended"
        try:
            async for events in slot.actor.events():
                self._listener.host_events(host, events)
                if events.crashed is not None:
                    reason = f"its engine crashed: {events.crashed}"
                    break
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - a host that cannot be heard is lost, whatever the reason
            reason = f"{type(error).__name__}: {error}"
        self._lose(slot, host, reason)

    def _lose(self, slot: Slot, host: str, reason: str) -> None:
        """Give a host up: end its process, take its requests back, start a successor."""
        if slot.state != "ready" or slot.host != host or self._closing:
            return
        log.warning("%s is lost: %s", host, reason)
        slot.state, slot.last_error = "dead", reason
        if slot.reader is not None and slot.reader is not asyncio.current_task():
            slot.reader.cancel()
        slot.actor.kill()
        self._listener.host_lost(host, slot.identity, reason)
        self.spawn(self._revive(slot))

    async def _revive(self, slot: Slot) -> None:
        """Restart a dead host until one comes up with the current weights, or the restarts are used up."""
        while slot.restarts < self._config.max_restarts:
            slot.restarts += 1
            self.restarts_total += 1
            try:
                await self._start_host(slot)
                async with self._weights_lock:
                    await self._bring_up_to_date(slot)
                    self._open(slot)
            except Exception as error:
                slot.last_error = f"{type(error).__name__}: {error}"
                log.exception("%s did not come up", slot.host)
                slot.actor.kill()
                slot.state = "dead"
                continue
            log.info("%s is ready at version %d", slot.host, self.policy_version)
            return
        slot.state = "retired"
        log.error("host-%d stays dead after %d restarts: %s", slot.index, slot.restarts, slot.last_error)
        self._tell_changed()

    async def _bring_up_to_date(self, slot: Slot) -> None:
        """Make a new host what the others are. Raises when it is not, after ``start_timeout_s``."""
        timeout_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._load_current(slot)
                self._check_fingerprints(slot)
                await self._apply_states(slot)
        except TimeoutError:
            raise HostGoneError(f"it had not loaded the current weights after {timeout_s:g} s") from None

    async def _load_current(self, slot: Slot) -> None:
        current = self._current
        if current is not None:
            await slot.actor.prepare_update(current.manifest, "drain", current.weights)
            slot.identity = await slot.actor.commit_update()

    async def _apply_states(self, slot: Slot) -> None:
        # Read again after every wait: the state may have been changed meanwhile, and this host not told.
        paused = asleep = False
        while (paused, asleep) != (self.paused, self.asleep):
            if paused != self.paused:
                paused = self.paused
                await (slot.actor.pause() if paused else slot.actor.resume())
            if asleep != self.asleep:
                asleep = self.asleep
                try:
                    await (slot.actor.sleep() if asleep else slot.actor.wake())
                except UnsupportedError as error:  # no reason to give up a sound host
                    log.warning("%s cannot sleep, so all are woken: %s", slot.host, error)
                    await self.set_asleep(False)

    def _check_fingerprints(self, newcomer: Slot | None = None) -> None:
        """Raise unless all hosts that serve, and the newcomer, promise the same text for the same seed."""
        serving = [s for s in self.slots if s.state == "ready" or s is newcomer or newcomer is None]
        different = {s.identity for s in serving}
        if len(different) > 1 and not self._config.allow_other_numerics:
            told = "; ".join(f"{s.host}: {s.identity}" for s in serving)
            raise FingerprintError(
                f"hosts differ in their numerics, so a seed's text depends on its host ({told}); "
                "service.allow_other_numerics=true serves anyway"
            )

    async def _watch(self) -> None:
        """Ask every ready host how it is, for ever."""
        while True:
            await asyncio.sleep(self._config.health_every_s)
            await asyncio.gather(*(self._check(slot, slot.host) for slot in self.ready))

    async def _check(self, slot: Slot, host: str) -> None:
        try:
            status = await slot.actor.status(self._config.call_timeout_s)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - a host that cannot answer is lost, whatever the reason
            self._lose(slot, host, f"{type(error).__name__}: {error}")
            return
        if slot.host == host:
            slot.status = status
        if status.in_round_s > self._config.stall_timeout_s:
            self._lose(slot, host, f"its round or command has been running for {status.in_round_s:.0f} s")

    # ---- requests ---------------------------------------------------------------------------------

    def send(self, slot: Slot, requests: Sequence[Request], begun: Mapping[Key, Identity]) -> None:
        """Send requests to a ready host. When that fails, the listener gets them back as lost.

        ``begun`` says under what the prefixes were made that hosts of ours began.
        """
        task = self.spawn(self._submit(slot, slot.host, requests, begun))
        slot.submits.add(task)
        task.add_done_callback(slot.submits.discard)

    async def _submit(
        self, slot: Slot, host: str, requests: Sequence[Request], begun: Mapping[Key, Identity]
    ) -> None:
        back: HandedBack | None
        try:
            back = await slot.actor.submit(requests, begun)
        except asyncio.CancelledError:
            raise
        except EngineCrashError:
            return  # its events say so too, after the endings of what it had; then these are taken back
        except Exception as error:  # noqa: BLE001 - nobody knows what of it arrived
            self._lose(slot, host, f"{type(error).__name__}: {error}")
            return
        if back is not None and slot.state == "ready" and slot.host == host:
            if slot.identity is None or back.identity.policy_version > slot.identity.policy_version:
                slot.identity = back.identity  # it switched weights, its word of that is still on the way
            self._listener.handed_back(host, back.requests)

    async def abort(self, targets_of: Mapping[str, Targets], reason: str) -> int:
        """End requests, by host, and return how many were alive."""
        slots = [s for s in self.ready if targets_of.get(s.host)]
        ended = await self._each(slots, lambda s: self._abort_on(s, targets_of[s.host], reason))
        return sum(ended.values())

    async def _abort_on(self, slot: Slot, targets: Targets, reason: str) -> int:
        # Submits and aborts go different ways into a host: one that came first would find nothing to end.
        actor, submits = slot.actor, tuple(slot.submits)
        if submits:
            await asyncio.wait(submits)  # not gather: who asked may be cancelled, these are others'
        return cast(int, await actor.abort(targets, reason))

    # ---- all hosts --------------------------------------------------------------------------------

    async def set_paused(self, paused: bool) -> None:
        """Pause or resume every host, and those to come."""
        self.paused = paused
        await self._each(self.ready, lambda s: s.actor.pause() if paused else s.actor.resume())

    async def set_asleep(self, asleep: bool) -> None:
        """Free or restore the KV memory of every host, and those to come. When one refuses, all are awake."""
        self.asleep = asleep  # first: a host that opens while the others are asked does as they do
        try:
            await self._each(self.ready, lambda s: s.actor.sleep() if asleep else s.actor.wake())
        except RolloutError:
            if asleep:
                await self.set_asleep(False)
            raise

    async def statuses(self) -> dict[str, LoopStatus]:
        """Return a status of every ready host: a fresh one from all that answer at once."""
        for slot, host in [(s, s.host) for s in self.ready]:
            with contextlib.suppress(HostGoneError):  # the watch decides whether it is lost
                status = await slot.actor.status(min(FRESH_STATUS_S, self._config.call_timeout_s))
                slot.status = status if slot.host == host else slot.status
        return {s.host: s.status for s in self.ready if s.status is not None}

    async def take_rounds(self) -> list[RoundRecord]:
        """Return the round records of all hosts since the last call."""
        taken = await self._each(self.ready, lambda s: s.actor.take_rounds())
        return [record for host in sorted(taken) for record in taken[host]]

    async def _each(self, slots: Sequence[Slot], ask: Callable[[Slot], Awaitable[T]]) -> dict[str, T]:
        """Ask hosts at once. One that dies meanwhile is left out; the first refusal is raised after all."""
        named = [(slot, slot.host) for slot in slots]
        answers = await asyncio.gather(*(ask(slot) for slot, _ in named), return_exceptions=True)
        good: dict[str, T] = {}
        refusals: list[BaseException] = []
        for (slot, host), answer in zip(named, answers, strict=True):
            if isinstance(answer, HostGoneError):
                self._lose(slot, host, str(answer))
            elif isinstance(answer, BaseException):
                refusals.append(answer)
            else:
                good[host] = answer
        if refusals:
            raise refusals[0]
        return good

    # ---- weights ----------------------------------------------------------------------------------

    async def update(self, manifest: UpdateManifest, weights: WeightsRef, in_flight: InFlight) -> int:
        """Switch every host to new weights, or none: all stage and check, then all commit.

        Returns the live version. The version already live, sent again, is answered without any work.
        """
        await self._some_ready()
        async with self._weights_lock:
            live = self._current.manifest if self._current is not None else None
            if live is not None and (live.version, live.checksum) == (manifest.version, manifest.checksum):
                return live.version
            slots = self.ready
            if not slots:
                raise WeightUpdateError(f"no host is ready; version {self.policy_version} is current")
            prepared = await self._prepare(slots, manifest, weights, in_flight)
            if not prepared:
                raise WeightUpdateError(f"every host died; version {self.policy_version} is current")
            # From here on the new version is current: a host that fails now is replaced by one that loads it.
            self._current = CurrentWeights(manifest=manifest, weights=weights)
            if in_flight in ("drain", "abort"):
                self.carried_since = manifest.version
            await asyncio.gather(*(self._commit(slot, slot.host) for slot in prepared))
            return manifest.version

    async def _some_ready(self) -> None:
        """Wait while hosts are only being restarted. Not under the lock: a restart takes it too."""
        while not self.ready and not self.hopeless:
            await self._changed.wait()
            self._changed.clear()

    async def _prepare(
        self, slots: Sequence[Slot], manifest: UpdateManifest, weights: WeightsRef, in_flight: InFlight
    ) -> list[Slot]:
        """Return the slots whose hosts are prepared; raise the first refusal once nothing is left open.

        A host that dies or crashes meanwhile refuses nothing: its successor loads what is current then.
        """

        async def prepared(slot: Slot) -> bool:
            try:
                await slot.actor.prepare_update(manifest, in_flight, weights)
            except EngineCrashError:
                return False  # its events say so too, after the endings of what it had
            return True

        tasks = [asyncio.ensure_future(self._each([slot], prepared)) for slot in slots]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        refusal = next((error for task in done if (error := task.exception()) is not None), None)
        if refusal is None:
            good = [all(task.result().values()) for task in tasks]
            return [s for s, ok in zip(slots, good, strict=True) if ok and s.state == "ready"]
        # Discarding also ends the waiting of hosts that still drain, and those that only begin to.
        while pending:
            await self._discard(slots)
            _, pending = await asyncio.wait(pending, timeout=DISCARD_AGAIN_S)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._discard(slots)
        raise refusal

    async def _discard(self, slots: Sequence[Slot]) -> None:
        await self._each([s for s in slots if s.state == "ready"], lambda s: s.actor.discard_update())

    async def _commit(self, slot: Slot, host: str) -> None:
        try:
            slot.identity = await slot.actor.commit_update()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - it checked out and still failed: replace it
            self._lose(slot, host, f"it did not switch weights: {type(error).__name__}: {error}")

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside everything else; its failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the host pool failed", exc_info=task.exception())


def threads_for(hosts: int, *, nodes: int) -> int:
    """Return each host's share of a machine's cores, hosts being spread evenly."""
    return max(1, len(usable_cores()) // math.ceil(hosts / nodes))
