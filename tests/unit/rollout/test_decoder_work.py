"""Decoders count what they compute, the compiled one and the torch one alike."""

import pytest
import torch

from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, compiled_unavailable
from rollout.engine.native.decoder import Decoder
from rollout.engine.native.decoder_work import DecoderWork, WorkCount
from rollout.engine.native.rows import RowBatch, int32
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.native.torch_forward.forward_graphs import EagerRecorder
from rollout.testing import tiny_looped_policy
from rollout.testing_native import fixed_plan, requests_for, tiny_decoder, tiny_engine
from rollout.types import SamplingParams

LOOPS = 4
COMPILED = pytest.param(
    True,
    id="compiled",
    marks=pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable())),
)


def batch() -> RowBatch:
    return RowBatch(
        token_ids_M=int32([3, 4, 5]),
        positions_M=int32([0, 1, 2]),
        table_M=int32([0, 0, 0]),
        page_table_SP=torch.zeros(1, 1, dtype=torch.int32),
        head_rows_R=int32([2, 1]),
    )


def work(passes: int, head_rows: int, *rows_by_loop: int) -> DecoderWork:
    return DecoderWork(passes=passes, head_rows=head_rows, rows_by_loop=rows_by_loop)


def assert_counts(decoder: Decoder) -> None:
    """Run every method once and compare its count."""
    kv, rows = decoder.new_storage(1), batch()
    embedded_MD = decoder.embed(rows.token_ids_M)
    assert decoder.work == work(0, 0, 0, 0, 0, 0), "embedding is no loop"

    def since(before: DecoderWork) -> DecoderWork:
        return decoder.work - before

    before = decoder.work
    states_MD = decoder.forward(rows, kv).hidden_MD.clone()
    assert since(before) == work(4, 2, 3, 3, 3, 3)
    before = decoder.work
    decoder.forward(rows, kv, states=False)  # a row ends with its last keys, and counts
    assert since(before) == work(4, 2, 3, 3, 3, 3)
    before = decoder.work
    decoder.forward(rows, kv, loops=range(1, 3), hidden_MD=states_MD)
    assert since(before) == work(2, 2, 0, 3, 3, 0)
    before = decoder.work
    decoder.advance(states_MD, rows, kv, loop_M=int32([3, 0, 3]))
    assert since(before) == work(1, 2, 1, 0, 0, 2)
    before = decoder.work
    decoder.block(embedded_MD, rows, kv, loop=2)
    decoder.head(states_MD[:1])
    assert since(before) == work(1, 1, 0, 0, 3, 0)


@pytest.mark.parametrize("compiled", [False, COMPILED])
def test_every_call_counts_its_rows_by_loop_its_passes_and_its_readouts(compiled: bool) -> None:
    assert_counts(tiny_decoder(tiny_looped_policy(loops=LOOPS, layers=1), compiled=compiled))


@pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))
def test_threads_count_a_row_once() -> None:
    assert_counts(tiny_decoder(tiny_looped_policy(loops=LOOPS), compiled=True, threads=3))


def test_a_recorded_forward_counts_every_run_and_not_its_filling() -> None:
    plain = tiny_decoder(tiny_looped_policy(loops=LOOPS, layers=1), exact=False)
    assert isinstance(plain, TorchDecoder)
    decoder = plain.with_fast_paths(plain.attention, EagerRecorder())
    kv = decoder.new_storage(1)
    for runs in (1, 2, 3):
        decoder.forward(batch(), kv)
        assert decoder.work == work(4 * runs, 2 * runs, *[3 * runs] * LOOPS)
    assert plain.work == work(0, 0, 0, 0, 0, 0)


@pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))
def test_a_drafters_own_linears_count_apart_from_the_policys() -> None:
    decoder = tiny_decoder(tiny_looped_policy(loops=LOOPS, layers=1), compiled=True)
    assert isinstance(decoder, CompiledDecoder)
    other = decoder.with_linears({})
    other.forward(batch(), other.new_storage(1))
    assert decoder.work.row_loops == 0
    assert other.work.row_loops == 3 * LOOPS


@pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))
@pytest.mark.parametrize("name", ["shallow_loop_2", "wavefront"])
def test_rounds_count_alike_in_compiled_calls_and_in_torch(name: str) -> None:
    """Greedy texts of both are one here, so is what it took to compute them."""
    policy = tiny_looped_policy(loops=LOOPS, layers=1)
    params = [SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)]
    requests = requests_for(vocab=48, prompts=2, params=params, seed=1, longest_prompt=8)
    counted = []
    for compiled in (True, False):
        decoder = tiny_decoder(policy, compiled=compiled)
        engine = tiny_engine(policy, [build(name, DrafterConfig())], compiled=compiled, decoder=decoder)
        for request in requests:
            engine.add(request)
        rounds, plan = [], fixed_plan(name, 3)
        while engine.busy:
            before = decoder.work
            engine.run_round(plan(engine.load()))
            rounds.append(decoder.work - before)
        counted.append(rounds)
        assert engine.gauges()["engine/computed_row_loops"] == decoder.work.row_loops > 0
    assert counted[0] == counted[1]


def test_no_rows_are_no_pass() -> None:
    count = WorkCount(2)
    count.through(range(2), 0)
    count.advanced([])
    assert count.total() == work(0, 0, 0, 0)
