"""The service and its pool over real hosts on threads of this process: no Ray, and calls held at will."""

import asyncio
import gc
import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from controller.types import InFlight
from rollout.config import ServiceConfig
from rollout.errors import AbortedError, WeightUpdateError
from rollout.policy.weights import manifest
from rollout.service.actors import HostGoneError
from rollout.service.host import PolicyHost
from rollout.service.payload import pack
from rollout.service.records import HostEvents, Identity
from rollout.service.service import RolloutService, ServiceCore
from rollout.testing_engine import Faults, ScriptedSpec, scripted_requests, scripted_weights
from rollout.types import Completion, Request

CALLS = itertools.count()
CONFIG = ServiceConfig(threads_per_host=1, health_every_s=60.0, flush_s=0.001)


class ThreadHost:
    """Does for a host in this process what ``HostActor`` does for one in another."""

    def __init__(
        self, hosts: "Hosts", spec: ScriptedSpec, *, host: str, threads: int, flush_s: float
    ) -> None:
        self.hosts, self.name = hosts, host
        self.host = PolicyHost(spec, host=host, threads=threads, flush_s=flush_s)
        self.gone = asyncio.Event()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def ask(*args: Any) -> Any:
            if method in ("ready", "status", "close"):
                args = args[:-1]
            if method == "prepare_update":
                args = (*args[:-1], args[-1][0])
            await self._unless_gone(self.hosts.passing(self.name, method))
            answer = await self._unless_gone(getattr(self.host, method)(*args))
            await self._unless_gone(self.hosts.passing(self.name, f"{method} answered"))
            return answer

        return ask

    async def events(self) -> AsyncIterator[HostEvents]:
        source = self.host.events()
        while True:
            try:
                yield await self._unless_gone(anext(source))
            except StopAsyncIteration:
                return

    def kill(self) -> None:
        self.gone.set()

    async def _unless_gone(self, work: Any) -> Any:
        asked, gone = asyncio.ensure_future(work), asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait([asked, gone], return_when=asyncio.FIRST_COMPLETED)
            if self.gone.is_set():
                raise HostGoneError("it was killed")
            return asked.result()
        finally:
            asked.cancel()
            gone.cancel()


class Hosts:
    """All hosts of one test, and which of their calls are held back."""

    def __init__(self) -> None:
        self.started: dict[str, ThreadHost] = {}
        self.held: dict[tuple[str, str], asyncio.Event] = {}
        self.reached: defaultdict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)

    def __call__(self, spec: ScriptedSpec, *, host: str, cpus: float, gpus: float, **how: Any) -> ThreadHost:
        self.started[host] = ThreadHost(self, spec.for_host(host=host, threads=1), host=host, **how)
        return self.started[host]

    async def passing(self, host: str, method: str) -> None:
        self.reached[host, method].set()
        if (host, method) in self.held:
            await self.held[host, method].wait()

    @contextmanager
    def holding(self, host: str, method: str) -> Iterator[asyncio.Event]:
        """Hold calls back until this is left; the event says that one has come."""
        self.reached[host, method].clear()
        self.held[host, method] = asyncio.Event()
        try:
            yield self.reached[host, method]
        finally:
            self.held.pop((host, method)).set()


@asynccontextmanager
async def serving(
    spec: ScriptedSpec | None = None, **settings: Any
) -> AsyncIterator[tuple[ServiceCore, Hosts]]:
    hosts = Hosts()
    core = ServiceCore(spec or ScriptedSpec(), replace(CONFIG, **settings), run_seed=0, new_host=hosts)
    await core.start()
    try:
        async with asyncio.timeout(30):
            yield core, hosts
    finally:
        await core.close()
        await ended(hosts)


async def ended(hosts: Hosts) -> None:
    for one in hosts.started.values():
        await one.host.close()
        await asyncio.to_thread(one.host._thread.join)


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.005)


async def state_of(hosts: Hosts, host: str) -> str:
    return (await hosts.started[host].host.status()).state


async def generated(core: ServiceCore, requests: Sequence[Request]) -> list[Completion]:
    return await core.generate(requests, f"call {next(CALLS)}")


def ready(core: ServiceCore) -> list[str]:
    return [slot.host for slot in core._pool.ready]


async def test_a_host_that_restarts_while_the_others_are_woken_is_awake_when_it_gets_requests():
    async with serving(ScriptedSpec(can_sleep=True), hosts=2) as (core, hosts):
        await core.sleep()
        with hosts.holding("host-0", "wake") as asked:
            waking = asyncio.create_task(core.wake())
            await asked.wait()
            hosts.started["host-1"].kill()
            await until(lambda: "host-1.1" in ready(core))
        await waking
        assert not core._pool.asleep
        assert [await state_of(hosts, host) for host in ready(core)] == ["running"] * 2
        done = await generated(core, scripted_requests(6, tokens=4))
        assert {c.finish_reason for c in done} == {"length"}


async def test_a_host_that_restarts_while_the_others_are_put_to_sleep_sleeps_too():
    async with serving(ScriptedSpec(can_sleep=True), hosts=2) as (core, hosts):
        with hosts.holding("host-0", "sleep") as asked:
            sleeping = asyncio.create_task(core.sleep())
            await asked.wait()
            hosts.started["host-1"].kill()
            await until(lambda: "host-1.1" in ready(core))
        await sleeping
        assert [await state_of(hosts, host) for host in ready(core)] == ["asleep"] * 2


async def test_a_sleep_that_engines_cannot_costs_no_host_also_not_one_that_restarts():
    async with serving(hosts=1) as (core, hosts):
        with hosts.holding("host-0.1", "ready"):
            hosts.started["host-0"].kill()
            await until(lambda: not ready(core))
            await core.sleep()  # nobody is there to refuse
        await until(lambda: bool(ready(core)))
        assert (ready(core), core._pool.asleep) == (["host-0.1"], False)


async def test_a_caller_that_gives_up_its_abort_takes_nothing_from_others():
    async with serving() as (core, hosts):
        with hosts.holding("host-0", "submit") as sent:
            mine, theirs = scripted_requests(2, tokens=4)
            answers = asyncio.create_task(generated(core, [mine, theirs]))
            await sent.wait()
            abort = asyncio.create_task(core.abort([mine.key], "enough"))
            await asyncio.sleep(0.01)
            abort.cancel()
            await asyncio.wait([abort])
        assert [c.finish_reason for c in await answers][1] == "length"


ENDLESS = ScriptedSpec(max_context_tokens=10**9)


def endless(prompts: int, **how: Any) -> list[Any]:
    return [replace(r, params=replace(r.params, max_tokens=None), **how) for r in scripted_requests(prompts)]


async def pushed(core: ServiceCore, version: int, *, mode: InFlight = "drain") -> int:
    state = scripted_weights(version)
    return await core.update_weights(manifest(state, version), [pack(state)], mode)


async def test_an_abort_holds_for_a_sample_whose_host_dies_before_it_has_answered():
    async with serving(ENDLESS, hosts=2) as (core, hosts):
        first, second = endless(2)
        calls = [asyncio.create_task(generated(core, [r])) for r in (first, second)]
        await until(lambda: len(core._ledger.held_by("host-1")) == 1)
        (lost,) = core._ledger.held_by("host-1")
        with hosts.holding("host-1", "abort") as asked:
            abort = asyncio.create_task(core.abort(None, "enough"))
            await asked.wait()
            hosts.started["host-1"].kill()
            assert await abort == 2
        endings = [ending for call in calls for ending in await call]
        assert {c.error for c in endings} == {"AbortedError: enough"}
        assert lost.sent == 1


async def test_an_abort_holds_for_a_sample_that_its_host_hands_back():
    async with serving(hosts=2) as (core, hosts):
        (request,) = scripted_requests(1)
        with hosts.holding("host-0", "submit") as asked:
            call = asyncio.create_task(generated(core, [request]))
            await asked.wait()
            abort = asyncio.create_task(core.abort([request.key], "enough"))
            await asyncio.sleep(0)
            sample = core._ledger.get(request.key)
            assert sample is not None
            core.handed_back("host-0", [replace(sample.request, attempt=sample.serial)])
            assert (await call)[0].error == "AbortedError: enough"
        await abort


async def test_a_sample_that_was_sent_on_is_asked_again_by_its_callers_next_attempt():
    async with serving(ENDLESS, hosts=2) as (core, hosts):
        (request,) = endless(1)
        old = asyncio.create_task(generated(core, [request]))
        await until(lambda: bool(core._ledger.held_by("host-0")))
        hosts.started["host-0"].kill()
        await until(lambda: bool(core._ledger.held_by("host-1")))
        (new,) = await generated(core, [replace(scripted_requests(1, tokens=5)[0], attempt=1)])
        assert (new.finish_reason, new.attempt) == ("length", 1)
        assert (await old)[0].error == "AbortedError: attempt 1 of ('p0', 0) stands in for it"


async def test_what_has_ended_is_forgotten_though_its_deadline_is_far():
    async with serving() as (core, _):
        stream = core.open_stream([replace(scripted_requests(1)[0], deadline_s=1e6)], "call")
        while await stream.take():
            pass
        core.close_call("call")
        forgotten = weakref.ref(stream)
        del stream
        gc.collect()
        assert forgotten() is None


async def test_a_host_whose_engine_breaks_while_it_prepares_is_replaced_and_the_others_update():
    async with serving(ScriptedSpec(faults=Faults(only_host="host-1", crash_stage=True)), hosts=2) as (
        core,
        _,
    ):
        assert await pushed(core, 1) == 1
        await until(lambda: ready(core) == ["host-0", "host-1.1"])
        assert {slot.identity.policy_version for slot in core._pool.slots if slot.identity} == {1}


async def test_an_update_that_breaks_every_engine_is_refused():
    async with serving(ScriptedSpec(faults=Faults(crash_stage=True)), max_restarts=1) as (core, _):
        with pytest.raises(WeightUpdateError, match="version 0 is current"):
            await pushed(core, 1)
        await until(lambda: ready(core) == ["host-0.1"])


async def test_a_refusal_is_told_at_once_though_another_host_only_begins_to_drain():
    spec = replace(ENDLESS, faults=Faults(only_host="host-0", refuse_stage=True))
    async with serving(spec, hosts=2) as (core, hosts):
        calls = [asyncio.create_task(generated(core, [r])) for r in endless(2)]
        await until(lambda: bool(core._ledger.held_by("host-1")))
        with hosts.holding("host-1", "prepare_update") as asked:
            update = asyncio.create_task(pushed(core, 1))
            await asked.wait()
            hosts.reached["host-1", "discard_update"].clear()
            await hosts.reached["host-1", "discard_update"].wait()
        with pytest.raises(WeightUpdateError, match="told to refuse"):
            await update
        assert await core.abort(None, "enough") == 2
        await asyncio.wait(calls)


async def test_a_late_word_of_older_weights_does_not_rename_those_a_host_serves():
    async with serving() as (core, hosts):
        (slot,), (request,) = core._pool.ready, scripted_requests(1)
        elsewhere = Identity(policy_version=0, fingerprint="another")
        with hosts.holding("host-0", "submit answered") as handed_back:
            core._pool.send(slot, [request], {request.key: elsewhere})
            await handed_back.wait()
            assert await pushed(core, 1) == 1
        await until(lambda: not slot.submits)
        assert slot.identity is not None
        assert slot.identity.policy_version == 1


async def test_a_successor_that_hangs_while_it_loads_the_weights_is_replaced_too():
    async with serving(hosts=2, max_restarts=50) as (core, hosts):
        assert await pushed(core, 1) == 1
        # From here on, and with restarts enough for a machine on which a sound host may take longer, too.
        core._pool._config = replace(core._pool._config, start_timeout_s=0.3)
        with hosts.holding("host-1.1", "prepare_update") as hangs:
            hosts.started["host-1"].kill()
            await hangs.wait()
            await until(lambda: len(ready(core)) == 2)
        assert ready(core)[0] == "host-0"
        assert ready(core)[1] not in ("host-1", "host-1.1")
        assert await pushed(core, 2) == 2


async def test_a_stream_whose_reader_goes_away_while_it_is_opened_leaves_nothing_running():
    hosts = Hosts()
    service = RolloutService(ENDLESS, CONFIG, run_seed=0, new_host=hosts)
    await service.start()
    reading = asyncio.create_task(anext(service.generate_stream(endless(2), "call")))
    await asyncio.sleep(0)
    while len(service._core._ledger) < 2:
        time.sleep(0.001)  # blocks this loop, so that the reader has not heard of it yet
    reading.cancel()
    await asyncio.wait([reading])
    async with asyncio.timeout(20):
        while (await service.stats())["service/live"]:
            await asyncio.sleep(0.005)
    await service.close()
    await ended(hosts)


async def test_what_an_ended_call_asked_for_can_be_asked_for_again_at_once():
    async with serving(ENDLESS) as (core, _):
        requests = endless(2)
        for call in ("batch", "stream"):
            if call == "batch":
                old = asyncio.create_task(core.generate(requests, call))
                await until(lambda: len(core._ledger.held_by("host-0")) == 2)
            else:
                core.open_stream(requests, call)
            await core.end_call(call)
            again = asyncio.create_task(generated(core, requests))
            await until(lambda: len(core._ledger.held_by("host-0")) == 2)
            assert await core.abort(None, "enough") == 2
            assert [c.error for c in await again] == ["AbortedError: enough"] * 2
        assert [c.error for c in await old] == ["AbortedError: nobody waits for it"] * 2


async def test_a_call_that_was_ended_before_it_came_takes_nothing():
    async with serving(ENDLESS) as (core, _):
        await core.end_call("overtaken")
        with pytest.raises(AbortedError, match="before it arrived"):
            core.open_stream(endless(2), "overtaken")
        assert len(core._ledger) == 0
        await core.end_call("overtaken")
