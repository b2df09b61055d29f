"""What lanes are refused with, what they may reach, and what a round says of them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from controller.types import Assignment, RoundFacts, RoundLoad, RoundPlan, VerifyMode
from drafters.config import DrafterConfig
from drafters.registry import build
from drafters.types import DraftError, DraftRequest
from rollout.config import EngineConfig
from rollout.engine.native.decoder import ForwardResult, KVStorage
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.errors import ConfigError
from rollout.testing import TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_native import (
    Planner,
    ar_plan,
    fixed_plan,
    requests_for,
    run_engine,
    texts,
    tiny_engine,
)
from rollout.types import Request, SamplingParams

PARAMS = (SamplingParams(max_tokens=20, ignore_eos=True),)


LOOPS = 4


def engine_of(
    policy: TinyPolicy, *, depth: int = 1, passes: int = 32, verify: VerifyMode = "coupled"
) -> NativeEngine:
    return tiny_engine(
        policy,
        [build("wavefront", DrafterConfig(wavefront_depth=depth, wavefront_passes=passes))],
        compiled=True,
        config=EngineConfig(max_batch=4, max_context_tokens=128, verify=verify),
    )


@pytest.mark.parametrize("verify", ["block", "token"])
def test_verification_without_an_own_choice_to_compare_with_is_refused_by_name(verify: VerifyMode) -> None:
    with pytest.raises(ConfigError, match=f"engine.verify={verify} cannot verify the drafter wavefront"):
        engine_of(tiny_looped_policy(), verify=verify)


def test_a_policy_of_too_few_loops_leaves_it_off_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    for policy, depth in ((tiny_policy(), 1), (tiny_looped_policy(loops=2), 2)):
        engine = engine_of(policy, depth=depth)
        assert engine.traits.drafters == ()
        assert f"after {depth} of a policy's loops" in caplog.text
        assert f"has {policy.spec.loops}" in caplog.text
        caplog.clear()
    drafter = build("wavefront", DrafterConfig())
    asked = DraftRequest(key=0, tokens=[3], prompt_tokens=1, gamma=2, prompt_uid="p")
    with pytest.raises(DraftError, match="inside the policy's own passes"):
        drafter.propose([asked])


@pytest.mark.parametrize(
    ("depth", "gamma", "passes", "reach"),
    [(1, 8, 4, 7), (1, 1, 4, 5), (2, 8, 4, 3), (3, 4, 4, 3), (1, 8, 32, 35), (3, 1, 32, 12)],
)
def test_a_round_reaches_no_further_than_its_lanes_can_commit(
    depth: int, gamma: int, passes: int, reach: int
) -> None:
    wavefront = engine_of(tiny_looped_policy(), depth=depth)._wavefront
    assert wavefront.reach(Assignment(drafter="wavefront", gamma=gamma), passes) == reach


def rounds_of(engine: NativeEngine, requests: Sequence[Request], plan: Planner) -> list[RoundFacts]:
    for request in requests:
        engine.add(request)
    facts = []
    while engine.busy:
        facts.append(engine.run_round(plan(engine.load())).facts)
    return facts


def three(params: SamplingParams = PARAMS[0]) -> list[Request]:
    return requests_for(vocab=48, prompts=3, params=(params,), longest_prompt=12)


def test_rounds_tell_passes_rows_and_drafts_apart_from_the_forward_of_the_policy() -> None:
    facts = rounds_of(engine_of(tiny_looped_policy()), three(), fixed_plan("wavefront", 8))
    facts = [f for f in facts if not f.prefill_rows]
    for f in facts:
        in_lanes = [o for o in f.outcomes if o.drafter == "wavefront"]
        assert all(o.judged_singly for o in in_lanes)
        assert f.batch == len(f.outcomes)
        assert f.verify_rows == f.batch - len(in_lanes)
        for draft in f.drafts:
            assert f.batch <= draft.rows <= 4 * draft.passes * f.batch
            assert draft.context_tokens > draft.rows
            # After a wrong draft the next choice takes all loops.
            assert all(o.gamma - o.accepted <= -(-draft.passes // LOOPS) for o in f.outcomes)
        assert all(o.committed >= 1 for o in f.outcomes)
    assert any(o.accepted > 1 for f in facts for o in f.outcomes)
    assert any(f.verify_rows == 0 == f.context_tokens for f in facts)


def test_a_round_has_more_passes_than_loops_only_when_it_is_the_lanes_own() -> None:
    alone = rounds_of(engine_of(tiny_looped_policy()), three(), fixed_plan("wavefront", 8))
    assert max(d.passes for f in alone if f.batch == 3 for d in f.drafts) == 32 // 3
    with_stops = replace(PARAMS[0], stop=("zzzz",))
    for requests, plan in ((three(with_stops), fixed_plan("wavefront", 8)), (three(), one_plainly)):
        facts = rounds_of(engine_of(tiny_looped_policy()), requests, plan)
        assert max(d.passes for f in facts if f.batch == 3 for d in f.drafts) == LOOPS
    short = rounds_of(engine_of(tiny_looped_policy(), passes=1), three(), fixed_plan("wavefront", 8))
    assert max(d.passes for f in short for d in f.drafts) == LOOPS


def one_plainly(load: RoundLoad) -> RoundPlan:
    plan = fixed_plan("wavefront", 8)(load)
    return RoundPlan(assignments=dict(list(plan.assignments.items())[1:]), reason="one plainly")


def test_a_full_pool_shortens_rounds_before_it_takes_anyone_out_of_the_lanes() -> None:
    two = [replace(r, prompt_ids=tuple(range(5, 11))) for r in three()[:2]]
    engine = tiny_engine(
        tiny_looped_policy(),
        [build("wavefront", DrafterConfig())],
        compiled=True,
        config=EngineConfig(max_batch=4, max_context_tokens=32, kv_tokens=3 * PAGE_TOKENS),
    )
    facts = [f for f in rounds_of(engine, two, fixed_plan("wavefront", 8)) if f.batch == 2]
    assert [o.drafter for o in facts[0].outcomes] == ["wavefront"] * 2
    assert [d.passes for d in facts[0].drafts] == [LOOPS]


def test_the_shape_of_a_pass_is_one_loop_and_the_head() -> None:
    policy = tiny_looped_policy()
    shapes = engine_of(policy, depth=2).part_shapes()
    lanes, spec = shapes["wavefront"], policy.spec
    assert lanes.weight_bytes == 2 * (spec.body_linear_params + spec.head_params)
    assert lanes.kv_bytes_per_token * spec.loops == shapes["policy"].kv_bytes_per_token
    assert lanes.flops_per_context_token * spec.loops == shapes["policy"].flops_per_context_token
    assert (lanes.lane_depth, lanes.lane_loops) == (2, 4)


def test_pages_that_do_not_exist_are_refused_before_anything_is_computed() -> None:
    engine = engine_of(tiny_looped_policy())
    engine.add(three()[0])
    plan = fixed_plan("wavefront", 8)
    while not engine.gauges()["engine/lanes"]:
        engine.run_round(plan(engine.load()))
    engine._scheduler.page_table[:] = 10_000
    with pytest.raises(ValueError, match="a row names a page table or a page that does not exist"):
        engine.run_round(plan(engine.load()))


def test_readouts_that_are_not_finite_cost_their_drafts_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_looped_policy()
    requests = requests_for(vocab=48, prompts=3, params=PARAMS)
    expected = texts(run_engine(engine_of(policy), requests, ar_plan))
    engine = engine_of(policy)
    engine._wavefront._compiled = None
    advance = engine._decoder.advance

    def broken(states: Tensor, batch: RowBatch, kv: KVStorage, *, loop_M: Tensor) -> ForwardResult:
        result = advance(states, batch, kv, loop_M=loop_M)
        result.logits_RV[loop_M[batch.head_rows_R] == 0] = math.nan
        return result

    monkeypatch.setattr(engine._decoder, "advance", broken)
    done = run_engine(engine, requests, fixed_plan("wavefront", 8))
    assert texts(done) == expected
    assert {t.origin for c in done.values() for t in c.tokens} == {"plain"}
    assert engine.gauges()["drafter/wavefront_failures"] == 6
    assert engine.gauges()["drafter/wavefront_enabled"] == 0
