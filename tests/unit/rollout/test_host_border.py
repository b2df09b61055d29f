"""What crosses borders: weights without copies, imports without weight, events from one thread to another."""

import asyncio
import subprocess
import sys
import threading

import pytest
import torch

from rollout.engine.protocol import Emission
from rollout.errors import AbortedError
from rollout.policy.weights import checksum
from rollout.service.host import Outbox, PolicyHost
from rollout.service.live import failed_completion
from rollout.service.payload import buckets, pack
from rollout.service.records import HostEvents
from rollout.testing_engine import FixedController, ScriptedEngine, ScriptedSpec, scripted_requests
from rollout.tokens import TokenLog


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_arrive_bit_for_bit_and_uncopied(dtype):
    state = {"a": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype), "b": torch.ones(2)}
    packed = pack(state)
    assert packed["a"].array.ctypes.data == state["a"].data_ptr()
    for item in packed.values():
        item.array.flags.writeable = False
    arrived = dict(pair for bucket in buckets(packed) for pair in bucket)
    assert checksum(arrived) == checksum(state)
    assert arrived["a"].dtype == dtype
    assert arrived["a"].data_ptr() == state["a"].data_ptr()


@pytest.mark.slow
def test_the_service_and_a_host_that_waits_load_no_torch():
    code = (
        "import sys, rollout.service.service, rollout.service.host, rollout.testing_engine;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_events_of_another_thread_arrive_merged_in_order_and_then_end():
    outbox = Outbox()

    def other_thread() -> None:
        for number in range(50):
            outbox.put(HostEvents(crashed=str(number)))
        outbox.close()

    thread = threading.Thread(target=other_thread)
    reader = asyncio.create_task(outbox.take(0.01))
    await asyncio.sleep(0)
    thread.start()
    first = await reader
    assert first.crashed == "0"
    while (events := await outbox.take(0.0)) is not None:
        assert events.crashed != "0"
    thread.join()


def _told(number: int, *, ends: bool = False) -> HostEvents:
    logs = (-1.0, -1.0, -1.0, 0.0)
    tokens = TokenLog()
    tokens.add(number, logs, policy_version=0, origin="plain", drafter="ar")
    request = scripted_requests(1)[0]
    ended = (failed_completion(request, AbortedError("over")),) if ends else ()
    return HostEvents(emissions=(Emission(request.key, 0, number, tokens[:]),), completions=ended)


async def _token_ids(outbox: Outbox, flush_s: float) -> tuple[int, ...]:
    """What is told next; of one request it is one emission."""
    events = await asyncio.wait_for(outbox.take(flush_s), 20.0)
    (emission,) = events.emissions
    assert emission.first_index == emission.tokens[0].token_id, "here a token's id is its place"
    return emission.tokens.ids


async def test_tokens_are_told_once_in_a_while_the_first_at_once_and_endings_at_once() -> None:
    now_s, hour = [0.0], 3600.0
    outbox = Outbox(clock=lambda: now_s[0])
    outbox.put(_told(0))
    assert await _token_ids(outbox, hour) == (0,), "after a pause nobody waits"
    for number in (1, 2, 3):
        outbox.put(_told(number))
    waiting = asyncio.create_task(_token_ids(outbox, hour))
    await asyncio.sleep(0.05)
    assert not waiting.done(), "soon after, tokens are gathered"
    outbox.put(_told(4, ends=True))
    assert await waiting == (1, 2, 3, 4), "an ending takes along what waits"
    outbox.put(_told(5))
    waiting = asyncio.create_task(_token_ids(outbox, 0.05))
    now_s[0] += 0.05
    assert await waiting == (5,), "and time does"
    outbox.put(_told(6))
    outbox.close()
    assert await _token_ids(outbox, hour) == (6,)
    assert await outbox.take(hour) is None


async def test_a_reader_is_not_woken_for_tokens_it_will_gather_anyway() -> None:
    outbox = Outbox()
    outbox.put(_told(0))
    await _token_ids(outbox, 3600.0)
    waiting = asyncio.create_task(_token_ids(outbox, 3600.0))
    await asyncio.sleep(0.01)
    woken: list[object] = []
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *args: woken.append(args) or call_soon(*args)
    try:
        for number in range(1, 20):
            outbox.put(_told(number))
            await asyncio.sleep(0.001)
        assert len(woken) == 1
        outbox.put(_told(20, ends=True))
        assert await waiting == tuple(range(1, 21))
    finally:
        loop.call_soon_threadsafe = call_soon


class Unwell(ScriptedSpec):
    """An engine that breaks where no command and no round is to blame."""

    def build(self):
        class Engine(ScriptedEngine):
            reads = 0

            def gauges(self):
                self.reads += 1
                if self.reads == 2:
                    raise RuntimeError("no gauges")
                return {}

        return Engine(self), FixedController(0)


async def test_a_host_whose_engine_thread_ends_says_why_and_ends_its_events():
    host = PolicyHost(Unwell(), host="local", threads=1, flush_s=0.0)
    async with asyncio.timeout(20):
        told = [events async for events in host.events()]
    assert [events.crashed for events in told] == ["RuntimeError: no gauges"]
    await asyncio.to_thread(host._thread.join)


async def test_who_gives_up_waiting_for_a_host_does_not_stop_its_start():
    go = threading.Event()

    class Slow(ScriptedSpec):
        def for_host(self, *, host, threads):
            return self

        def build(self):
            go.wait()
            return ScriptedSpec().build()

    host = PolicyHost(Slow(), host="local", threads=1, flush_s=0.0)
    waiting = asyncio.create_task(host.ready())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    go.set()
    assert (await host.ready()).policy_version == 0
    await host.close()
    await asyncio.to_thread(host._thread.join)
