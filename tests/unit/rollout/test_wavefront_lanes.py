"""What lanes are refused with, what they may reach, and what a round says of them."""

import math

import pytest
from torch import Tensor

from controller.types import Assignment, RoundFacts, VerifyMode
from drafters.config import DrafterConfig
from drafters.registry import build
from drafters.types import DraftError, DraftRequest
from rollout.config import EngineConfig
from rollout.engine.native.decoder import ForwardResult, KVStorage
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.rows import RowBatch
from rollout.errors import ConfigError
from rollout.testing import TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_native import ar_plan, fixed_plan, requests_for, run_engine, texts, tiny_engine
from rollout.types import SamplingParams

PARAMS = (SamplingParams(max_tokens=20, ignore_eos=True),)


def engine_of(policy: TinyPolicy, *, depth: int = 1, verify: VerifyMode = "coupled") -> NativeEngine:
    return tiny_engine(
        policy,
        [build("wavefront", DrafterConfig(wavefront_depth=depth))],
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


@pytest.mark.parametrize(("depth", "gamma", "reach"), [(1, 8, 7), (1, 1, 5), (2, 8, 3), (3, 4, 3)])
def test_a_round_reaches_no_further_than_its_lanes_can_commit(depth: int, gamma: int, reach: int) -> None:
    wavefront = engine_of(tiny_looped_policy(), depth=depth)._wavefront
    assert wavefront.reach(Assignment(drafter="wavefront", gamma=gamma)) == reach


def rounds_of(engine: NativeEngine, gamma: int = 8) -> list[RoundFacts]:
    for request in requests_for(vocab=48, prompts=3, params=PARAMS, longest_prompt=12):
        engine.add(request)
    facts = []
    while engine.busy:
        facts.append(engine.run_round(fixed_plan("wavefront", gamma)(engine.load())).facts)
    return facts


def test_rounds_tell_passes_rows_and_drafts_apart_from_the_forward_of_the_policy() -> None:
    facts = [f for f in rounds_of(engine_of(tiny_looped_policy())) if not f.prefill_rows]
    for f in facts:
        in_lanes = [o for o in f.outcomes if o.drafter == "wavefront"]
        assert f.batch == len(f.outcomes)
        assert f.verify_rows == f.batch - len(in_lanes)
        assert all(o.committed >= 1 and o.gamma - o.accepted in (0, 1) for o in f.outcomes)
        for draft in f.drafts:
            assert 0 < draft.passes <= 4
            assert f.batch <= draft.rows <= 4 * 4 * f.batch
            assert draft.context_tokens > draft.rows
    assert any(o.accepted > 1 for f in facts for o in f.outcomes)
    assert any(f.verify_rows == 0 == f.context_tokens for f in facts)


def test_the_shape_of_a_pass_is_one_loop_and_the_head() -> None:
    policy = tiny_looped_policy()
    shapes = engine_of(policy, depth=2).part_shapes()
    lanes, spec = shapes["wavefront"], policy.spec
    assert lanes.weight_bytes == 2 * (spec.body_linear_params + spec.head_params)
    assert lanes.kv_bytes_per_token * spec.loops == shapes["policy"].kv_bytes_per_token
    assert lanes.flops_per_context_token * spec.loops == shapes["policy"].flops_per_context_token
    assert (lanes.lane_depth, lanes.lane_loops) == (2, 4)


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
