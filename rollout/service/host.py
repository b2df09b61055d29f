"""The host: one engine replica, its loop thread, and the calls that reach it from outside.

A plain class whose methods are coroutines. Each of Ray's concurrency groups runs them on an event loop
of its own, so nothing of asyncio is shared between methods: the engine loop's futures, and one lock, are
what they meet at. Compute never runs on an event loop, so control calls answer while rounds run.
"""

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from controller.types import InFlight
from rollout.engine.protocol import Emission
from rollout.errors import WeightUpdateError
from rollout.guard import assert_own_packages
from rollout.policy.manifest import UpdateManifest
from rollout.service.factory import HostSpec
from rollout.service.live import Key, Targets
from rollout.service.loop import EngineLoop
from rollout.service.records import (
    HandedBack,
    HostEvents,
    HostReady,
    Identity,
    LoopStatus,
    RoundRecord,
)
from rollout.tokens import Tokens
from rollout.types import Request

if TYPE_CHECKING:
    from rollout.service.payload import WeightPayload

log = logging.getLogger(__name__)


class PolicyHost:
    """Owns one engine replica. Wrapped by Ray in exactly one place, ``actors.py``."""

    def __init__(self, spec: HostSpec, *, host: str, threads: int, flush_s: float) -> None:
        assert_own_packages()
        self.host, self.threads, self._flush_s = host, threads, flush_s
        self._spec = spec.for_host(host=host, threads=threads)
        self._outbox = Outbox()
        self._loop: Future[EngineLoop] = Future()
        self._loop.set_running_or_notify_cancel()  # who gives up waiting for it must not stop its start
        self._thread = threading.Thread(target=self._own_engine, name=f"engine-{host}", daemon=True)
        self._thread.start()

    def _own_engine(self) -> None:
        """Build the engine on the thread that will run it, then run it until closed."""
        try:
            engine, controller = self._spec.build()
            loop = EngineLoop(engine, controller, host=self.host, deliver=self._outbox.put)
        except Exception as error:
            log.exception("host %s could not start", self.host)
            self._loop.set_exception(error)
            return
        # Libraries leave some hundred thousand objects that live as long as the host. Walking them again and
        # again in the cyclic collector took 7% of the rounds of a small policy.
        gc.collect()
        gc.freeze()
        self._loop.set_result(loop)
        try:
            loop.run()
        except Exception as error:
            log.exception("host %s: its engine thread ended", self.host)
            self._outbox.put(HostEvents(crashed=f"{type(error).__name__}: {error}"))
        finally:
            self._outbox.close()

    async def _ready_loop(self) -> EngineLoop:
        return await asyncio.wrap_future(self._loop)

    async def ready(self) -> HostReady:
        """Return once the engine is built. Raises whatever building it raised."""
        loop = await self._ready_loop()
        return HostReady(
            traits=loop.engine.traits,
            policy_version=loop.engine.policy_version,
            fingerprint=loop.engine.fingerprint,
            pid=os.getpid(),
            threads=self.threads,
        )

    # ---- generation -------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request], begun: Mapping[Key, Identity]) -> HandedBack | None:
        """Queue requests. What becomes of those taken, refusals included, comes through ``events``."""
        return await asyncio.wrap_future((await self._ready_loop()).add(requests, begun=begun))

    async def events(self) -> AsyncIterator[HostEvents]:
        """Yield what happens to all requests, in order, until the host is closed. For one reader."""
        while (events := await self._outbox.take(self._flush_s)) is not None:
            yield events

    # ---- control ----------------------------------------------------------------------------------

    async def prepare_update(
        self, manifest: UpdateManifest, in_flight: InFlight, payload: "WeightPayload"
    ) -> None:
        """Stage a weight update whole and return when it may be committed; on refusal nothing is left of it.

        ``payload`` may lie in shared memory; the engine lets go of it at commit or discard.
        """
        from rollout.service.payload import buckets  # loads torch, which the service's process never needs

        loop = await self._ready_loop()
        await asyncio.wrap_future(loop.begin_update(manifest, in_flight))
        try:
            for bucket in buckets(payload):
                await asyncio.wrap_future(loop.stage(bucket))
            await asyncio.wrap_future(loop.check_update())
            await asyncio.wrap_future(loop.drained())
        except WeightUpdateError:
            await asyncio.wrap_future(loop.discard_update())
            raise

    async def commit_update(self) -> Identity:
        """Switch between two rounds and return what is live now."""
        loop = await self._ready_loop()
        version = await asyncio.wrap_future(loop.commit_update())
        return Identity(policy_version=version, fingerprint=loop.status().fingerprint)

    async def discard_update(self) -> None:
        """Drop the open update, if any."""
        await asyncio.wrap_future((await self._ready_loop()).discard_update())

    async def abort(self, targets: Targets | None, reason: str) -> int:
        """End requests now (None: all) and return how many were alive."""
        return await asyncio.wrap_future((await self._ready_loop()).abort(targets, reason))

    async def pause(self) -> None:
        """Return once no round runs and none will."""
        await asyncio.wrap_future((await self._ready_loop()).pause())

    async def resume(self) -> None:
        """Undo ``pause``."""
        await asyncio.wrap_future((await self._ready_loop()).resume())

    async def sleep(self) -> None:
        """Free the KV memory."""
        await asyncio.wrap_future((await self._ready_loop()).sleep())

    async def wake(self) -> None:
        """Undo ``sleep``."""
        await asyncio.wrap_future((await self._ready_loop()).wake())

    async def status(self) -> LoopStatus:
        """Return how the loop is doing, without waiting for a round boundary."""
        return (await self._ready_loop()).status()

    async def take_rounds(self) -> list[RoundRecord]:
        """Return the round records since the last call."""
        return (await self._ready_loop()).take_records()

    async def close(self) -> None:
        """End everything alive as aborted and free the engine."""
        loop = await self._ready_loop()
        if self._thread.is_alive():
            await asyncio.wrap_future(loop.close())


class Outbox:
    """Events on their way from the loop's thread to one reader's event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: list[HostEvents] = []
        self._urgent = False
        """Whether something of that must not wait."""

        self._closed = False
        self._taken_s = float("-inf")
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, events: HostEvents) -> None:
        """Add events. From the loop's thread."""
        with self._lock:
            first = not self._pending
            self._pending.append(events)
            self._urgent = urgent = self._urgent or bool(events.completions or events.crashed)
        if first or urgent:  # else whoever reads knows already, and its waking would be taken from the rounds
            self._wake()

    def close(self) -> None:
        """No more will come."""
        with self._lock:
            self._closed = True
        self._wake()

    async def take(self, flush_s: float) -> HostEvents | None:
        """Wait for events and return all as one; None when closed and empty.

        Tokens are told once in ``flush_s``, the first after a pause at once, and endings always.
        """
        while True:
            with self._lock:
                left_s = self._taken_s + flush_s - self._clock()
                if self._pending and (self._urgent or self._closed or left_s <= 0):
                    taken, self._pending, self._urgent = self._pending, [], False
                    self._taken_s = self._clock()
                    return merge(taken)
                if self._closed:
                    return None
                if self._reader is None or self._reader[0] is not asyncio.get_running_loop():
                    self._reader = (asyncio.get_running_loop(), asyncio.Event())
                event, wait_s = self._reader[1], left_s if self._pending else None
                event.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), wait_s)

    def _wake(self) -> None:
        with self._lock:
            reader = self._reader
        if reader is not None:
            reader[0].call_soon_threadsafe(reader[1].set)


def merge(parts: Sequence[HostEvents]) -> HostEvents:
    """Return several reports as one. Completions give up their tokens: the emissions carry them.

    What a request committed in several rounds is one emission. The order between requests means nothing.
    """
    emissions: dict[tuple[Key, int], list[Emission]] = {}
    for part in parts:
        for emission in part.emissions:
            emissions.setdefault((emission.key, emission.attempt), []).append(emission)
    return HostEvents(
        emissions=tuple(_joined(told) for told in emissions.values()),
        completions=tuple(replace(c, tokens=Tokens()) for part in parts for c in part.completions),
        crashed=next((part.crashed for part in parts if part.crashed), None),
    )


def _joined(parts: Sequence[Emission]) -> Emission:
    """Return consecutive emissions of one request as one."""
    if len(parts) == 1:
        return parts[0]
    return parts[0]._replace(tokens=reduce(add, [part.tokens for part in parts]))
