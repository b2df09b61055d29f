"""The passes of a round in one compiled call leave what passes run one by one leave, bit for bit.

Rounds are compared one by one: tokens, logprobs and origins committed, what they cost, the lanes that wait
for the next round and their states. Wrong proposals, and none, are planted behind the chooser.
"""

import ctypes
from collections.abc import Sequence

import pytest
import torch

from controller.types import RoundFacts
from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.config import EngineConfig
from rollout.engine.chooser_call import CallStruct
from rollout.engine.native.engine import NativeEngine
from rollout.errors import NumericError
from rollout.testing import TinyPolicy, tiny_looped_policy
from rollout.testing_forced import Alter, AlteredPort, cell_of, is_proposal
from rollout.testing_native import Planner, ar_plan, fixed_plan, requests_for, run_engine, texts, tiny_engine
from rollout.types import Request, SamplingParams

pytestmark = pytest.mark.lossless

LOOPS = 4
PARAMS = (
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.7, top_k=7, ignore_eos=True),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=2, top_p=0.8),
    SamplingParams(max_tokens=24, temperature=1.3, min_p=0.1, ignore_eos=True),
    SamplingParams(max_tokens=30, stop_ids=(9, 11, 20, 31), ignore_eos=True),
    SamplingParams(max_tokens=24, stop=("ab", "e"), ignore_eos=True),
)
"""No edits, so that every sequence can run in the compiled call; ends of every kind."""

ENDLESS = SamplingParams(max_tokens=18, ignore_eos=True)


def engine_of(
    policy: TinyPolicy, *, depth: int = 1, passes: int = 32, compiled_passes: bool = True, batch: int = 6
) -> NativeEngine:
    engine = tiny_engine(
        policy,
        [build("wavefront", DrafterConfig(wavefront_depth=depth, wavefront_passes=passes))],
        compiled=True,
        config=EngineConfig(max_batch=batch, max_context_tokens=128),
    )
    assert engine._wavefront._compiled is not None
    if not compiled_passes:
        engine._wavefront._compiled = None
    return engine


def requests_of(count: int = 12) -> list[Request]:
    return requests_for(vocab=48, prompts=count, params=PARAMS, seed=3)


def costs(facts: RoundFacts) -> list[tuple[int, int, int, int]]:
    return [(d.passes, d.rows, d.context_tokens, d.failures) for d in facts.drafts]


def assert_equal_rounds(
    engines: Sequence[NativeEngine], requests: Sequence[Request], plan: Planner, *, same_passes: bool = True
) -> int:
    """Run both to their end in step; return the draft tokens compared."""
    drafted = 0
    for request in requests:
        for engine in engines:
            engine.add(request)
    one, other = engines
    while one.busy or other.busy:
        found, wanted = (engine.run_round(plan(engine.load())) for engine in engines)
        assert found.emissions == wanted.emissions
        assert found.facts.outcomes == wanted.facts.outcomes
        drafted += sum(o.gamma for o in found.facts.outcomes)
        if same_passes:
            assert costs(found.facts) == costs(wanted.facts)
        assert one._wavefront._lanes == other._wavefront._lanes
        assert_equal_states(one, other)
    return drafted


def assert_equal_states(one: NativeEngine, other: NativeEngine) -> None:
    """Compare the states of lanes that have any: a lane that has not run yet starts at its token."""
    for key, lanes in one._wavefront._lanes.items():
        sequence = one._scheduler.running[key]
        first = len(sequence.tokens) - 1
        places = [first + i for i, lane in enumerate(lanes) if lane.loops_run]
        found, wanted = (states_of(e, sequence.slot, places) for e in (one, other))
        assert torch.equal(found, wanted)


def states_of(engine: NativeEngine, slot: int, positions: Sequence[int]) -> torch.Tensor:
    states = engine._wavefront._states
    assert states is not None
    return states.states_ND[states.places([slot] * len(positions), positions).long()]


@pytest.mark.parametrize("passes", [1, 32])
@pytest.mark.parametrize(("depth", "gamma"), [(1, 8), (1, 1), (2, 8), (3, 8)])
def test_every_round_leaves_the_same_tokens_costs_lanes_and_states(
    depth: int, gamma: int, passes: int
) -> None:
    policy = tiny_looped_policy()
    pair = [engine_of(policy, depth=depth, passes=passes, compiled_passes=c) for c in (True, False)]
    assert assert_equal_rounds(pair, requests_of(), fixed_plan("wavefront", gamma)) > 20
    alone = [engine_of(policy, depth=depth, passes=passes, compiled_passes=c, batch=1) for c in (True, False)]
    assert assert_equal_rounds(alone, requests_of(8), fixed_plan("wavefront", gamma)) > 10


def test_sequences_with_edited_logits_run_beside_in_passes_of_their_own() -> None:
    policy = tiny_looped_policy()
    params = (
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=20, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_tokens=20, stop_ids=(9, 11), min_tokens=7),
        SamplingParams(max_tokens=20, logit_bias={5: 2.0}, temperature=0.0, ignore_eos=True),
    )
    requests = requests_for(vocab=48, prompts=6, params=params, seed=4)
    # Rounds of as many passes as loops: longer ones end with a sequence that is over, in each group apart.
    pair = [engine_of(policy, passes=1, compiled_passes=c) for c in (True, False)]
    assert assert_equal_rounds(pair, requests, fixed_plan("wavefront", 8), same_passes=False) > 20
    expected = texts(run_engine(engine_of(policy), requests, ar_plan))
    assert texts(run_engine(engine_of(policy), requests, fixed_plan("wavefront", 8))) == expected


# ---- what a readout may say


def altered_port(engine: NativeEngine, alter: Alter) -> AlteredPort:
    """Put ``alter`` behind the chooser that compiled passes call; keep what is returned while they do."""
    lanes = engine._wavefront._compiled
    assert lanes is not None
    altered = AlteredPort(lanes._port, alter)
    lanes._port = altered.port
    return altered


@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrong_proposal_at_any_position_is_replaced_by_the_token_of_plain_decoding(depth: int) -> None:
    policy = tiny_looped_policy()
    requests = requests_for(vocab=48, prompts=2, params=(ENDLESS,), seed=6, longest_prompt=20)
    expected = texts(run_engine(engine_of(policy), requests, ar_plan))
    for request in requests:
        corrected = 0
        for index in range(1, 18):
            wrong = len(request.prompt_ids) + index

            def alter(call: CallStruct, row: int, wrong: int = wrong) -> None:
                if is_proposal(call) and cell_of(call.positions, ctypes.c_int64, row)[0] == wrong:
                    token = cell_of(call.tokens, ctypes.c_int32, row)
                    token[0] = (token[0] + 1) % 48

            engine = engine_of(policy, depth=depth)
            kept = altered_port(engine, alter)
            done = run_engine(engine, [request], fixed_plan("wavefront", 8))
            assert texts(done)[request.key] == expected[request.key]
            corrected += done[request.key].tokens[index].origin == "corrected"
            del kept
        assert corrected > 8


def test_proposals_that_are_all_wrong_leave_plain_decoding() -> None:
    policy, requests = tiny_looped_policy(), requests_of()
    expected = texts(run_engine(engine_of(policy), requests, ar_plan))

    def alter(call: CallStruct, row: int) -> None:
        if is_proposal(call):
            token = cell_of(call.tokens, ctypes.c_int32, row)
            token[0] = (token[0] + 1) % 48

    engine = engine_of(policy)
    kept = altered_port(engine, alter)
    assert texts(run_engine(engine, requests, fixed_plan("wavefront", 8))) == expected
    del kept


def test_a_proposal_that_is_not_finite_costs_its_drafts_and_is_told() -> None:
    policy, requests = tiny_looped_policy(), requests_of(3)
    expected = texts(run_engine(engine_of(policy), requests, ar_plan))

    def alter(call: CallStruct, row: int) -> None:
        if is_proposal(call):
            cell_of(call.finite, ctypes.c_uint8, row)[0] = 0

    engine = engine_of(policy)
    kept = altered_port(engine, alter)
    done = run_engine(engine, requests, fixed_plan("wavefront", 8))
    del kept
    assert texts(done) == expected
    assert {t.origin for c in done.values() for t in c.tokens} == {"plain"}
    assert engine.gauges()["drafter/wavefront_failures"] >= 3


def test_a_choice_of_the_target_that_is_not_finite_fails_its_request_alone() -> None:
    policy = tiny_looped_policy()
    requests = requests_for(vocab=48, prompts=3, params=(ENDLESS,), seed=8)
    expected = texts(run_engine(engine_of(policy), requests, ar_plan))
    victim = requests[1]

    def alter(call: CallStruct, row: int) -> None:
        seed = cell_of(call.seeds, ctypes.c_uint64, row)[0]
        late = cell_of(call.positions, ctypes.c_int64, row)[0] >= len(victim.prompt_ids) + 7
        if not is_proposal(call) and seed == victim.seed and late:
            cell_of(call.finite, ctypes.c_uint8, row)[0] = 0

    engine = engine_of(policy)
    kept = altered_port(engine, alter)
    done = run_engine(engine, requests, fixed_plan("wavefront", 8))
    del kept
    failed = done.pop(victim.key)
    assert failed.finish_reason == "failed"
    assert (failed.error or "").startswith(NumericError.__name__)
    assert failed.token_ids == expected[victim.key].ids[:7]
    assert texts(done) == {key: text for key, text in expected.items() if key != victim.key}
