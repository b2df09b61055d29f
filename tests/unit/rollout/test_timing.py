"""Timing forwards, and contexts made up: what is read is memory of its own, and prompts start at once."""

import mmap
from pathlib import Path

import pytest
import torch

from controller.types import AR_ASSIGNMENT, RoundPlan
from rollout.config import EngineConfig
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, CompiledKV, compiled_unavailable
from rollout.engine.native.pages import PagePool, PrefixIndex
from rollout.engine.native.rows import PAGE_TOKENS
from rollout.engine.native.timing import make_up_prompts, time_forward
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.errors import CapacityError
from rollout.testing import tiny_policy
from rollout.testing_native import tiny_decoder, tiny_engine
from rollout.types import Request, SamplingParams

needs_kernels = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))
reads_proc = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc"
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def compiled_storage(pages: int) -> tuple[CompiledDecoder, CompiledKV]:
    decoder = tiny_decoder(tiny_policy(), compiled=True)
    assert isinstance(decoder, CompiledDecoder)
    return decoder, decoder.new_storage(pages)


@needs_kernels
@reads_proc
def test_a_timed_forward_reads_memory_of_its_own() -> None:
    decoder, storage = compiled_storage(1)
    pages = (64 << 20) // storage.bytes_per_page
    storage = decoder.new_storage(pages)
    before = resident_bytes()
    tokens = (pages // 2 - 1) * PAGE_TOKENS
    # Beyond the rotary tables: nothing is computed, but by then the pages are there.
    with pytest.raises(ValueError, match="rotary"):
        time_forward(decoder, storage, PagePool(pages), rows=2, context_tokens=tokens, sequences=2)
    assert resident_bytes() - before > 0.8 * storage.data.nbytes


@needs_kernels
def test_occupying_pages_keeps_what_they_hold() -> None:
    _, storage = compiled_storage(4)
    storage.data.copy_(torch.randn(storage.data.shape))
    before = storage.data.clone()
    storage.occupy([3, 0])
    storage.occupy([0, 1])
    assert torch.equal(storage.data, before)
    assert storage.occupied.tolist() == [True, True, False, True]


def test_occupying_pages_keeps_what_torch_storage_holds() -> None:
    storage = tiny_decoder(tiny_policy()).new_storage(3)
    assert isinstance(storage, TorchKV)
    for store in (storage.keys, storage.values):
        store.copy_(torch.randn(store.shape))
    before = storage.keys.clone(), storage.values.clone()
    storage.occupy([0, 2])
    storage.occupy([])
    assert torch.equal(storage.keys, before[0])
    assert torch.equal(storage.values, before[1])


def test_made_up_prompts_are_known_page_by_page_and_only_once() -> None:
    storage, pool = tiny_decoder(tiny_policy()).new_storage(8), PagePool(8)
    prefix = PrefixIndex(pool)
    long = tuple(range(2 * PAGE_TOKENS + 1))
    for _ in range(2):
        make_up_prompts(prefix, storage, pool, [long, long[: PAGE_TOKENS + 1]], version=0)
        assert (len(prefix), pool.free) == (2, 6)
    assert len(prefix.match(0, long)) == 2
    assert prefix.match(1, long) == [], "of another version nothing is known"


def test_a_pool_too_small_for_made_up_prompts_says_so_and_loses_no_page() -> None:
    storage, pool = tiny_decoder(tiny_policy()).new_storage(2), PagePool(2)
    prefix = PrefixIndex(pool)
    make_up_prompts(prefix, storage, pool, [(7,) * (PAGE_TOKENS + 1)], version=0)
    with pytest.raises(CapacityError, match="3 more are needed, 2 are free"):
        make_up_prompts(prefix, storage, pool, [tuple(range(3 * PAGE_TOKENS + 1))], version=0)
    assert pool.free == 2, "what nobody used was given up on the way"


def test_a_made_up_prompt_starts_with_a_single_row() -> None:
    engine = tiny_engine(
        tiny_policy(), config=EngineConfig(max_batch=2, max_context_tokens=128, prefix_cache=True)
    )
    prompt = tuple(i % 40 for i in range(4 * PAGE_TOKENS + 1))
    engine.make_up_prompts([prompt])
    engine.add(
        Request(
            prompt_uid="made up",
            sample_index=0,
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=4, ignore_eos=True),
            seed=1,
        )
    )
    load = engine.load(look_up=lambda _: False)
    result = engine.run_round(
        RoundPlan(assignments={s.key: AR_ASSIGNMENT for s in load.sequences}, reason="test")
    )
    assert result.facts.prefill_rows == 1
