"""What crosses borders: weights without copies, imports without weight, events from one thread to another."""

import asyncio
import subprocess
import sys
import threading

import pytest
import torch

from rollout.policy.weights import checksum
from rollout.service.host import Outbox, PolicyHost
from rollout.service.payload import buckets, pack
from rollout.service.records import HostEvents
from rollout.testing_engine import FixedController, ScriptedEngine, ScriptedSpec


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
