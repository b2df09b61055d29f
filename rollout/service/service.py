"""The service: requests in, completions out, whatever happens to the hosts in between.

``RolloutService`` is what Ray wraps. Ray runs each of its concurrency groups on an event loop of its own;
all state lives in ``ServiceCore`` on one more loop, and every method only hops there and back.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from controller.types import InFlight
from rollout.config import ServiceConfig
from rollout.engine.protocol import Emission
from rollout.errors import (
    AbortedError,
    DeadlineError,
    EngineCrashError,
    HostLostError,
    RequestError,
    UnsupportedError,
)
from rollout.guard import assert_own_packages
from rollout.policy.manifest import UpdateManifest
from rollout.service.actors import HostActor
from rollout.service.callers import CallerRef, Callers
from rollout.service.door import check_item, refused_item
from rollout.service.factory import HostSpec
from rollout.service.ledger import AbortNote, Ledger, Sample, Sink
from rollout.service.live import Key
from rollout.service.naming import Namer
from rollout.service.pool import HostPool, Slot
from rollout.service.records import HostEvents, Identity, RoundRecord, ServiceHealth
from rollout.service.routing import HostLoad, choose_host
from rollout.types import Completion, Request

log = logging.getLogger(__name__)

T = TypeVar("T")
StreamItem = Emission | Completion

ENDED_EARLY_KEPT = 256
"""Calls ended before they arrived that are remembered: an interrupt may overtake the call it ends."""


class BatchSink:
    """Waits for the endings of one call's items, in their order."""

    streamed = False

    def __init__(self) -> None:
        self.ending: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    def tokens(self, emission: Emission) -> None:
        """Tokens come with the ending."""

    def ended(self, completion: Completion) -> None:
        """Take the ending."""
        if not self.ending.done():
            self.ending.set_result(completion)


class StreamSink:
    """Hands on what happens to all items of one call, as it happens."""

    streamed = True

    def __init__(self, expected: int) -> None:
        self._left = expected
        self._items: list[StreamItem] = []
        self._news = asyncio.Event()

    def tokens(self, emission: Emission) -> None:
        """Take new tokens."""
        self._items.append(emission)
        self._news.set()

    def ended(self, completion: Completion) -> None:
        """Take an ending."""
        self._left -= 1
        self._items.append(completion)
        self._news.set()

    async def take(self) -> list[StreamItem]:
        """Return what is new, waiting for it; empty once all items have ended."""
        if not self._items and self._left == 0:
            return []
        await self._news.wait()
        self._news.clear()
        items, self._items = self._items, []
        return items


class ServiceCore:
    """The state of a service. Everything runs on the event loop that created it."""

    def __init__(
        self,
        spec: HostSpec,
        config: ServiceConfig,
        *,
        run_seed: int,
        clock: Callable[[], float] = time.monotonic,
        new_host: Callable[..., Any] = HostActor,
    ) -> None:
        self._config, self._run_seed, self._clock = config, run_seed, clock
        self._ledger = Ledger()
        self._queue: deque[list[Sample]] = deque()
        self._pool = HostPool(spec, config, self, new_host=new_host)
        self._counts: Counter[str] = Counter()
        self._calls: dict[str, list[Sample]] = {}
        """What the calls under way opened, by their callers' names for them."""
        self._ended_early: deque[str] = deque(maxlen=ENDED_EARLY_KEPT)
        self._closed = False

    async def start(self) -> None:
        """Start the hosts."""
        await self._pool.start()

    # ---- generation -------------------------------------------------------------------------------

    async def generate(self, items: Sequence[object], call: str) -> list[Completion]:
        """Return one completion per item, in order. Cancelling it, or ``end_call``, aborts what is left."""
        sinks = [BatchSink() for _ in items]
        self._admit(items, sinks, call)
        try:
            return list(await asyncio.gather(*(sink.ending for sink in sinks)))
        finally:
            self.close_call(call)

    def open_stream(self, items: Sequence[object], call: str) -> StreamSink:
        """Admit items and return where their tokens will arrive; ``close_call`` must follow."""
        sink = StreamSink(len(items))
        self._admit(items, [sink] * len(items), call)
        return sink

    def close_call(self, call: str) -> None:
        """End what is left of a call nobody waits for any more. Harmless when repeated."""
        self._abandon(self._calls.pop(call, ()))

    async def end_call(self, call: str) -> None:
        """Do as ``close_call``, on the caller's wish, also for a call that is still on its way."""
        if call not in self._calls:
            self._ended_early.append(call)
        self.close_call(call)

    def _admit(self, items: Sequence[object], sinks: Sequence[Any], call: str) -> None:
        """Check items at the door; the good ones are queued, the bad ones end here, each alone."""
        if call in self._ended_early:
            raise AbortedError("its caller ended this call before it arrived")
        namer = Namer(lambda key: self._ledger.get(key) is not None)
        opened: list[Sample] = []
        try:
            for index, (item, sink) in enumerate(zip(items, sinks, strict=True)):
                sample = self._open(item, index, sink, namer)
                if sample is not None:
                    opened.append(sample)
            self._counts["admitted"] += len(opened)
            groups: dict[str, list[Sample]] = {}
            for sample in opened:
                groups.setdefault(sample.asked.prompt_uid, []).append(sample)
            self._queue.extend(groups.values())
            for sample in opened:
                self._arm_deadline(sample)
            self._calls[call] = opened
            self._dispatch()
        except BaseException:
            self._calls.pop(call, None)
            self._abandon(opened)  # the caller gets the error and would never hear of them
            raise

    def _open(self, item: object, index: int, sink: Sink, namer: Namer) -> Sample | None:
        """Take an item, or end it; whatever is wrong with it is its own."""
        try:
            item = namer.named(item)
            request = self._checked(item, index)
            self._supersede(request.key, request.attempt)
            return self._ledger.open(request, sink, now_s=self._clock())
        except RequestError as error:
            refused = error
        except Exception as error:
            log.exception("item %d of a call could not be read", index)
            refused = RequestError(f"{type(error).__name__}: {error}")
            refused.__cause__ = error
        self._counts["refused"] += 1
        sink.ended(refused_item(item, index, refused))
        return None

    def _checked(self, item: object, index: int) -> Request:
        if self._closed:
            raise AbortedError("the service is closed")
        return check_item(item, index, context_tokens=self._context_tokens(), run_seed=self._run_seed)

    def _supersede(self, key: Key, attempt: int) -> None:
        """End an older attempt of the same sample: a retry stands in for it, and its results are late."""
        old = self._ledger.get(key)
        if old is not None and attempt > old.asked.attempt:
            self._drop(old, AbortedError(f"attempt {attempt} of {key} stands in for it"))

    def _drop(self, sample: Sample, error: Exception, *, failed: bool = False) -> None:
        """End a sample here and now; its host hears of it later."""
        host = sample.host
        (self._ledger.fail if failed else self._ledger.abort)(sample, error)
        if host is not None:
            targets = {sample.asked.key: sample.serial}
            self._pool.spawn(self._pool.abort({host: targets}, str(error)))

    def _abandon(self, samples: Sequence[Sample]) -> None:
        """End what is left of a call nobody waits for any more."""
        for sample in samples:
            if self._ledger.get(sample.asked.key) is sample:
                self._drop(sample, AbortedError("nobody waits for it"))

    def _arm_deadline(self, sample: Sample) -> None:
        """Hosts end what they hold; only a sample still queued when its time is over is ended here."""
        if sample.asked.deadline_s is not None:
            timer = asyncio.get_running_loop().call_later(sample.asked.deadline_s, self._expire, sample)
            sample.at_end = timer.cancel

    def _expire(self, sample: Sample) -> None:
        if self._ledger.get(sample.asked.key) is sample and sample.host is None:
            self._ledger.abort(sample, DeadlineError(f"{sample.asked.deadline_s} s passed"))

    def _context_tokens(self) -> int:
        return min(s.traits.max_context_tokens for s in self._pool.slots if s.traits is not None)

    # ---- routing ----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send queued groups to hosts while any has room; fail them when no host will ever be there."""
        if self._pool.hopeless:
            error = HostLostError("every host is dead, and its restarts are used up")
            for sample in self._ledger.queued():
                self._ledger.fail(sample, error)
            self._queue.clear()
            return
        slots = {slot.host: slot for slot in self._pool.ready}
        loads = [self._load_of(slot) for slot in slots.values()]
        outgoing: dict[str, list[Request]] = {}
        while self._queue:
            group = [s for s in self._queue[0] if self._ledger.get(s.asked.key) is s and s.host is None]
            if group:
                load = self._choose(group, loads, slots)
                if load is None:
                    break
                outgoing.setdefault(load.host, []).extend(self._assign(group, slots[load.host], load))
            self._queue.popleft()
        for host, requests in outgoing.items():
            if requests:
                self._pool.send(slots[host], requests, self._begun(requests))

    def _begun(self, requests: Sequence[Request]) -> dict[Key, Identity]:
        """Return under what those were begun whose prefix holds tokens of our hosts."""
        samples = [s for r in requests if (s := self._ledger.get(r.key)) is not None and s.records]
        return {s.asked.key: s.identity for s in samples if s.identity is not None}

    def _choose(
        self, group: Sequence[Sample], loads: Sequence[HostLoad], slots: dict[str, Slot]
    ) -> HostLoad | None:
        # A retry goes first of all where its text will be what it would have been.
        last = next((s.identity for s in group if s.identity is not None), None)
        same = [load for load in loads if last in (None, slots[load.host].identity)]
        prefer = self._host_of_prompt(group[0].asked.prompt_uid)
        return choose_host(same or loads, group=len(group), prefer=prefer)

    def _host_of_prompt(self, prompt_uid: str) -> str | None:
        for slot in self._pool.ready:
            if any(s.asked.prompt_uid == prompt_uid for s in self._ledger.held_by(slot.host)):
                return slot.host
        return None

    def _load_of(self, slot: Slot) -> HostLoad:
        assert slot.traits is not None
        held = self._ledger.held_by(slot.host)
        return HostLoad(
            host=slot.host,
            remaining_tokens=sum(s.remaining_tokens(slot.traits.max_context_tokens) for s in held),
            in_flight=len(held),
            cap=self._config.max_in_flight_per_host or 2 * slot.traits.max_batch,
        )

    def _assign(self, group: Sequence[Sample], slot: Slot, load: HostLoad) -> list[Request]:
        """Give a group to a host in the books and return what to send; what may not go there fails."""
        assert slot.identity is not None
        assert slot.traits is not None
        requests = []
        for sample in group:
            try:
                request = self._ledger.send(
                    sample,
                    slot.host,
                    slot.identity,
                    now_s=self._clock(),
                    allow_other=self._config.allow_other_numerics,
                )
            except HostLostError as error:
                self._ledger.fail(sample, error)
                continue
            requests.append(request)
            load.remaining_tokens += sample.remaining_tokens(slot.traits.max_context_tokens)
        load.in_flight += len(requests)
        return requests

    # ---- what the pool tells (PoolListener) -------------------------------------------------------

    def host_events(self, host: str, events: HostEvents) -> None:
        """Pass tokens and endings on; room on the host is used at once."""
        ended = bool(events.completions)
        for emission in events.emissions:
            try:
                self._ledger.emission(host, emission)
            except EngineCrashError as error:  # the others of this host are in order
                log.exception("a sample is given up")
                sample = self._ledger.get(emission.key)
                assert sample is not None
                self._counts["failed"] += 1
                self._drop(sample, error, failed=True)
                ended = True
        for completion in events.completions:
            self._counts[completion.finish_reason] += 1
            self._ledger.completion(host, completion)
        if ended:
            self._dispatch()

    def host_lost(self, host: str, identity: Identity | None, reason: str) -> None:
        """Queue again what the host had, under the same seeds, ahead of everything else."""
        samples = self._ledger.lost(host, identity, carried_since=self._pool.carried_since)
        groups: dict[str, list[Sample]] = {}
        for sample in self._unaborted(samples):
            deadline_s = sample.asked.deadline_s
            if deadline_s is not None and self._clock() - sample.admitted_s >= deadline_s:
                self._ledger.abort(sample, DeadlineError(f"{deadline_s} s passed"))
            elif sample.sent >= self._config.max_attempts:
                error = HostLostError(f"{host}: {reason}; sent {sample.sent} times, service.max_attempts")
                self._ledger.fail(sample, error)
            else:
                self._counts["resent"] += 1
                groups.setdefault(sample.asked.prompt_uid, []).append(sample)
        self._queue.extendleft(reversed(list(groups.values())))
        self._dispatch()

    def handed_back(self, host: str, requests: Sequence[Request]) -> None:
        """Queue again, in front, what a host could not go on with; that was no attempt."""
        samples = self._unaborted(self._ledger.handed_back(requests))
        self._queue.extendleft([sample] for sample in reversed(samples))
        self._dispatch()

    def _unaborted(self, samples: Sequence[Sample]) -> list[Sample]:
        """End those whose abort was under way when their host let go of them; return the others."""
        for sample in samples:
            if sample.abort is not None:
                sample.abort.ended += 1
                self._counts["aborted"] += 1
                self._ledger.abort(sample, AbortedError(sample.abort.reason))
        return [sample for sample in samples if sample.abort is None]

    def hosts_changed(self) -> None:
        """Use a new host, or give up when none is left."""
        self._dispatch()

    # ---- control ----------------------------------------------------------------------------------

    async def update_weights(self, manifest: UpdateManifest, weights: list[Any], in_flight: InFlight) -> int:
        """Switch all hosts, or none. ``weights`` holds one object-store reference."""
        # Whoever asked may go away; a half-told update must not stay behind.
        return await asyncio.shield(self._pool.update(manifest, weights, in_flight))

    async def abort(self, keys: Sequence[Key] | None, reason: str) -> int:
        """End requests (None: all) and return how many were alive. Their callers get what they have."""
        wanted = self._ledger.keys if keys is None else [(uid, index) for uid, index in keys]
        queued, note = 0, AbortNote(reason=reason)
        by_host: dict[str, dict[Key, int]] = {}
        for key in wanted:
            sample = self._ledger.get(key)
            if sample is None:
                continue
            if sample.host is None:
                queued += 1
                self._ledger.abort(sample, AbortedError(reason))
            else:
                sample.abort = note
                by_host.setdefault(sample.host, {})[key] = sample.serial
        answered = await self._pool.abort(by_host, reason)
        return queued + answered + note.ended

    async def pause(self) -> None:
        """Return once no host runs a round."""
        await self._pool.set_paused(True)

    async def resume(self) -> None:
        """Undo ``pause``."""
        await self._pool.set_paused(False)

    async def sleep(self) -> None:
        """Free the hosts' KV memory; refused while requests are alive."""
        if len(self._ledger):
            raise UnsupportedError(
                f"{len(self._ledger)} requests are alive: abort them or let them end first"
            )
        await self._pool.set_asleep(True)

    async def wake(self) -> None:
        """Undo ``sleep``."""
        await self._pool.set_asleep(False)

    async def stats(self) -> dict[str, float]:
        """Return loggable numbers: the service's own, and every host's under ``host/NAME/``."""
        statuses = await self._pool.statuses()
        numbers = {
            "service/live": float(len(self._ledger)),
            "service/queued": float(len(self._ledger.queued())),
            "service/hosts_ready": float(len(self._pool.ready)),
            "service/restarts": float(self._pool.restarts_total),
            "service/late_results": float(self._ledger.late_results),
            "service/policy_version": float(self._pool.policy_version),
        }
        for name in ("admitted", "refused", "resent", "stop", "length", "aborted", "failed"):
            numbers[f"service/{name}"] = float(self._counts[name])
        for host, status in statuses.items():
            numbers[f"host/{host}/rounds"] = float(status.rounds)
            numbers[f"host/{host}/records_dropped"] = float(status.records_dropped)
            numbers.update({f"host/{host}/{name}": value for name, value in status.gauges.items()})
        return numbers

    async def health(self) -> ServiceHealth:
        """Return who serves, fresh."""
        await self._pool.statuses()
        return ServiceHealth(
            ok=bool(self._pool.ready),
            policy_version=self._pool.policy_version,
            paused=self._pool.paused,
            asleep=self._pool.asleep,
            queued=len(self._ledger.queued()),
            hosts=self._pool.health(lambda host: len(self._ledger.held_by(host))),
        )

    async def take_records(self) -> list[RoundRecord]:
        """Return the rounds run since the last call, each host's in order."""
        return await self._pool.take_rounds()

    async def close(self) -> None:
        """End everything alive as aborted, and the hosts."""
        self._closed = True
        for key in self._ledger.keys:
            sample = self._ledger.get(key)
            if sample is not None:
                self._ledger.abort(sample, AbortedError("the service was closed"))
        await self._pool.close()


class RolloutService:
    """The face of a ``ServiceCore`` to Ray: every method may be called from any event loop."""

    def __init__(
        self,
        spec: HostSpec,
        config: ServiceConfig,
        *,
        run_seed: int,
        new_host: Callable[..., Any] = HostActor,
    ) -> None:
        assert_own_packages()
        self._callers = Callers()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="service", daemon=True).start()
        self._core: ServiceCore = asyncio.run_coroutine_threadsafe(
            _build(spec, config, run_seed, new_host), self._loop
        ).result()

    async def start(self) -> ServiceHealth:
        """Return once all hosts are ready. Raises what keeps one from starting."""
        await self._there(self._core.start())
        return await self._there(self._core.health())

    async def hold(self) -> None:
        """Never return. Whoever calls this owns the reference; see ``callers``."""
        await asyncio.Event().wait()

    async def generate(
        self, items: Sequence[object], call: str, caller: CallerRef | None = None
    ) -> list[Completion]:
        """Return one completion per item (``Request`` or mapping), in order, each ended exactly once.

        ``call`` is the caller's name for this call, never used twice; ``end_call`` ends it by that.
        """
        work = asyncio.run_coroutine_threadsafe(self._core.generate(items, call), self._loop)
        with self._callers.watching(caller, work.cancel):
            return await asyncio.wrap_future(work)

    async def generate_stream(
        self, items: Sequence[object], call: str, caller: CallerRef | None = None
    ) -> AsyncIterator[list[StreamItem]]:
        """Yield tokens and endings of all items as they come, several at a time."""
        opening = asyncio.run_coroutine_threadsafe(_call(self._core.open_stream, items, call), self._loop)

        def close(*_: object) -> None:
            self._loop.call_soon_threadsafe(self._core.close_call, call)

        try:
            stream = await asyncio.shield(asyncio.wrap_future(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(close)  # it is opened all the same, and nobody will read it
            raise

        try:
            with self._callers.watching(caller, close):
                while batch := await self._there(stream.take()):
                    yield batch
        finally:
            close()

    async def end_call(self, call: str) -> None:
        """Return once nothing of that call is alive here, also if it has not arrived yet."""
        await self._there(self._core.end_call(call))

    async def update_weights(self, manifest: UpdateManifest, weights: list[Any], in_flight: InFlight) -> int:
        """Switch all hosts to new weights, or none; returns the live version."""
        return await self._there(self._core.update_weights(manifest, weights, in_flight))

    async def abort(self, keys: Sequence[Key] | None = None, reason: str = "aborted by the caller") -> int:
        """End requests now, with what they have; None: all. Idempotent."""
        return await self._there(self._core.abort(keys, reason))

    async def pause(self) -> None:
        """Stop all rounds at their boundaries; requests keep what they have."""
        await self._there(self._core.pause())

    async def resume(self) -> None:
        """Undo ``pause``."""
        await self._there(self._core.resume())

    async def sleep(self) -> None:
        """Free the KV memory of idle hosts. Raises ``UnsupportedError``."""
        await self._there(self._core.sleep())

    async def wake(self) -> None:
        """Undo ``sleep``."""
        await self._there(self._core.wake())

    async def stats(self) -> dict[str, float]:
        """Return loggable numbers."""
        return await self._there(self._core.stats())

    async def health(self) -> ServiceHealth:
        """Return who serves."""
        return await self._there(self._core.health())

    async def take_records(self) -> list[RoundRecord]:
        """Return the rounds run since the last call."""
        return await self._there(self._core.take_records())

    async def close(self) -> None:
        """End everything. The process may be killed afterwards."""
        await self._there(self._core.close())

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


async def _build(
    spec: HostSpec, config: ServiceConfig, run_seed: int, new_host: Callable[..., Any]
) -> ServiceCore:
    return ServiceCore(spec, config, run_seed=run_seed, new_host=new_host)


async def _call(function: Callable[..., T], *args: object) -> T:
    return function(*args)
