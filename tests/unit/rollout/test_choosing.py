"""One compiled call computes and chooses what a forward and then a call of the chooser do: the same bits."""

import math
from collections.abc import Sequence

import pytest
import torch

from rollout.config import EngineConfig
from rollout.engine.choice_rows import ChoiceRows
from rollout.engine.chooser_compiled import CompiledChooser
from rollout.engine.native.choosing import ForwardChooser, forward_chooser
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, compiled_unavailable
from rollout.engine.native.depths import Standing
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.pass_clock import PassClock, TimedChooser
from rollout.engine.native.rows import RowBatch, RowMemory, int32
from rollout.engine.target import Choice, TargetRow
from rollout.testing import tiny_looped_policy, tiny_policy
from rollout.testing_looped import CountingDecoder
from rollout.testing_native import (
    MIXED_PARAMS,
    ar_plan,
    requests_for,
    run_engine,
    texts,
    tiny_decoder,
    tiny_engine,
)
from rollout.types import SamplingParams

pytestmark = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))

VOCAB, LOOPS, ROWS = 48, 4, 20
HEADS = [0, 3, 4, 11, 15, 16, 18, 19]


def batch(heads: Sequence[int] = HEADS) -> RowBatch:
    """One sequence's positions over a page's end; some rows want logits."""
    return RowBatch(
        token_ids_M=int32([(7 * m + 3) % VOCAB for m in range(ROWS)]),
        positions_M=int32(range(ROWS)),
        table_M=int32([0] * ROWS),
        page_table_SP=torch.tensor([[1, 0]], dtype=torch.int32),
        head_rows_R=int32(heads),
    )


def targets(params: Sequence[SamplingParams], *, first: int = 0) -> list[TargetRow]:
    return [
        TargetRow(
            seed=-5 + 3 * r,
            position=first + r,
            params=p,
            output_counts={4: 2, 9: 1} if p.has_penalties else {},
            banned=(2, 7) if p.min_tokens else (),
        )
        for r, p in enumerate(params)
    ]


class Both:
    """A decoder, a chooser, and what does both in one call."""

    def __init__(self, *, threads: int = 1) -> None:
        decoder = tiny_decoder(tiny_looped_policy(loops=LOOPS), compiled=True, threads=threads)
        assert isinstance(decoder, CompiledDecoder)
        self.decoder = decoder
        self.clock = PassClock()
        self.chooser = CompiledChooser(threads=threads)
        self.together = ForwardChooser(decoder, self.chooser.port, self.clock)
        self.kv = decoder.new_storage(2)

    def apart(self, rows: Sequence[TargetRow], heads: Sequence[int] = HEADS) -> list[Choice]:
        return self.chooser.choose(self.decoder.forward(batch(heads), self.kv).logits_RV, rows)


@pytest.mark.parametrize("threads", [1, 3])
def test_one_call_gives_the_choices_of_two(threads: int) -> None:
    """Every kind of params at once, then fewer rows of one kind, then others again: memory is used again."""
    both = Both(threads=threads)
    plain = [SamplingParams()] * 3
    for params in (MIXED_PARAMS, plain, plain, MIXED_PARAMS[::-1], MIXED_PARAMS[:5], MIXED_PARAMS[5:]):
        for first in (0, 40):
            rows = targets(params, first=first)
            heads = HEADS[: len(rows)]
            kv = both.decoder.new_storage(2)
            assert both.together.choose(batch(heads), kv, None, rows) == both.apart(rows, heads)
            assert torch.equal(kv.data, both.kv.data)


def test_rows_that_have_had_loops_go_on_from_their_states() -> None:
    both = Both()
    rows = targets(MIXED_PARAMS)
    result = both.decoder.forward(batch(), both.kv, taps=["loop.1"])
    states_ND = result.taps["loop.1"].flip(0).contiguous()
    expected = both.chooser.choose(result.logits_RV, rows)
    standing = Standing(depths=[2] * ROWS, states_ND=states_ND, numbers=list(range(ROWS))[::-1])
    assert both.together.choose(batch(), both.kv, standing, rows) == expected
    # And the next call starts at the tokens again.
    assert both.together.choose(batch(), both.kv, None, rows) == expected
    for depth in (-1, LOOPS):
        wrong = Standing(depths=[depth] + [2] * (ROWS - 1), states_ND=states_ND, numbers=[0] * ROWS)
        with pytest.raises(ValueError, match="loop"):
            both.together.choose(batch(), both.kv, wrong, rows)


def test_a_row_that_is_not_finite_is_told_and_the_others_stand() -> None:
    both = Both()
    rows = targets([SamplingParams(), SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -math.inf))] * 4)
    found = both.together.choose(batch(), both.kv, None, rows)
    assert [choice.finite for choice in found] == [True, False] * 4
    assert found == both.apart(rows)


def test_without_head_rows_keys_are_written_and_nothing_is_chosen() -> None:
    both, written = Both(), Both()
    assert both.together.choose(batch([]), both.kv, None, []) == []
    written.decoder.forward(batch(), written.kv)
    assert torch.equal(both.kv.data, written.kv.data)
    taken = both.clock.take()
    assert taken.choose_s == 0
    assert taken.forward_s > 0


def test_what_is_spent_on_forward_and_choice_is_told_apart() -> None:
    both = Both()
    both.together.choose(batch(), both.kv, None, targets(MIXED_PARAMS))
    taken = both.clock.take()
    assert taken.split is not None
    assert taken.forward_s == pytest.approx(taken.split.total_s)
    assert taken.split.linears_s > 0
    assert taken.choose_s > 0


def test_what_cannot_be_chosen_from_is_refused() -> None:
    both = Both()
    with pytest.raises(ValueError, match="head rows"):
        both.together.choose(batch(), both.kv, None, targets(MIXED_PARAMS[:3]))
    rows = targets([SamplingParams(logit_bias={VOCAB: 1.0})] * len(HEADS))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        both.together.choose(batch(), both.kv, None, rows)


def test_only_coupled_rounds_of_compiled_parts_are_one_call() -> None:
    decoder = tiny_decoder(tiny_policy(), compiled=True)
    clock = PassClock()
    chooser = TimedChooser(CompiledChooser(threads=1), clock)
    assert forward_chooser(decoder, chooser, verify="coupled", clock=clock) is not None
    assert forward_chooser(decoder, chooser, verify="block", clock=clock) is None
    assert forward_chooser(CountingDecoder(decoder), chooser, verify="coupled", clock=clock) is None


def engine_of(*, apart: bool = False) -> NativeEngine:
    config = EngineConfig(max_batch=4, max_context_tokens=128)
    engine = tiny_engine(tiny_policy(), compiled=True, config=config)
    if apart:
        engine._choosing = None
    return engine


def test_rollouts_are_those_of_rounds_in_two_calls() -> None:
    """Sequences come and go, prompts among them, with params of every kind."""
    requests = requests_for(vocab=VOCAB, prompts=8, params=MIXED_PARAMS, seed=3)
    together = texts(run_engine(engine_of(), requests, ar_plan))
    assert together == texts(run_engine(engine_of(apart=True), requests, ar_plan))


def test_rows_of_a_call_keep_no_trace_of_the_call_before() -> None:
    rows = ChoiceRows(vocab_size=VOCAB)
    rows.fill(targets(MIXED_PARAMS))
    assert rows.call.edit_starts
    assert rows.call.top_k
    rows.fill(targets([SamplingParams()] * 2))
    assert (rows.call.rows, rows.call.edit_starts, rows.call.top_k) == (2, None, None)
    banned = targets([SamplingParams()] * 2)[1]._replace(banned=(3,))
    rows.fill([banned, banned])
    assert rows.call.edit_starts
    rows.fill(targets([SamplingParams()] * 2))
    assert rows.call.edit_starts is None


def test_a_rounds_rows_lie_where_those_of_the_last_round_lay() -> None:
    memory = RowMemory(torch.zeros(2, 3, dtype=torch.int32).numpy())
    first = memory.batch([1, 2, 3], [4, 5, 6], [0, 0, 1], [0, 2])
    assert [first.token_ids_M.tolist(), first.positions_M.tolist()] == [[1, 2, 3], [4, 5, 6]]
    assert [first.table_M.tolist(), first.head_rows_R.tolist()] == [[0, 0, 1], [0, 2]]
    again = memory.batch([7, 8], [9, 9], [1, 1], [])
    assert again.token_ids_M.data_ptr() == first.token_ids_M.data_ptr()
    assert (again.token_ids_M.tolist(), again.head_rows_R.tolist()) == ([7, 8], [])
    many = memory.batch(list(range(100)), [0] * 100, [1] * 100, [99])
    assert many.token_ids_M.tolist() == list(range(100))
