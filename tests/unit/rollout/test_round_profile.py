"""Where a round's time goes: what is told adds up, and what cannot be told is not made up."""

import time
from dataclasses import replace

import pytest
import torch

from controller.types import PassSeconds, RoundFacts
from drafters.config import DrafterConfig
from drafters.registry import build
from drafters.w4 import W4Drafter
from drafters.wavefront import WavefrontDrafter
from rollout.engine.native.compiled_forward.decoder import compiled_unavailable
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.pass_clock import PassClock
from rollout.engine.native.rows import RowBatch
from rollout.testing import tiny_looped_policy, tiny_policy
from rollout.testing_native import Planner, ar_plan, fixed_plan, requests_for, tiny_engine
from rollout.tracking.reduce import RolloutPool
from rollout.tracking.time_parts import CHOICE, DRAFTING, FORWARD, OTHER, drafting_parts, time_parts

needs_kernels = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))
SPLIT = {"linears", "attention", "head", "norms"}


def _facts(engine: NativeEngine, plan: Planner) -> list[RoundFacts]:
    for request in requests_for(vocab=48, prompts=3):
        engine.add(request)
    out = []
    while engine.busy:
        out.append(engine.run_round(plan(engine.load())).facts)
    return out


@pytest.fixture(scope="module")
def torch_facts() -> list[RoundFacts]:
    """A few rounds of the torch decoder, which is slow."""
    engine = tiny_engine(tiny_policy(family="smollm2"), dtype=torch.float32)
    for request in requests_for(vocab=48, prompts=2, longest_prompt=6):
        engine.add(request)
    return [engine.run_round(ar_plan(engine.load())).facts for _ in range(3)]


def _drafting_engine() -> NativeEngine:
    return tiny_engine(tiny_policy(family="smollm2"), [W4Drafter(DrafterConfig(w4_group=32))], compiled=True)


@needs_kernels
def test_the_parts_of_real_rounds_sum_to_their_time() -> None:
    engine = _drafting_engine()
    for facts in _facts(engine, ar_plan) + _facts(engine, fixed_plan("w4", 3)):
        parts = time_parts(facts)
        assert set(parts) == SPLIT | {CHOICE, DRAFTING, OTHER}
        assert sum(parts.values()) == pytest.approx(facts.total_s, abs=1e-9)
        assert all(seconds >= 0 for seconds in parts.values())
        policy = facts.policy_pass
        assert policy is not None
        assert policy.forward_s + policy.choose_s <= facts.verify_s
        assert policy.split is not None
        assert min(parts[name] for name in SPLIT) > 0
        assert policy.split.total_s <= policy.forward_s


@needs_kernels
def test_drafting_tells_its_own_forwards_and_choices_only_when_a_model_drafts() -> None:
    engine = _drafting_engine()
    assert all(f.draft_pass is None for f in _facts(engine, ar_plan))
    drafted = [f for f in _facts(engine, fixed_plan("w4", 3)) if f.drafts]
    assert drafted
    for facts in drafted:
        draft = facts.draft_pass
        assert draft is not None
        assert 0 < draft.forward_s + draft.choose_s <= facts.draft_s
        assert draft.choose_s > 0
        assert draft.split is not None
        assert draft.split.total_s <= draft.forward_s


@needs_kernels
def test_a_round_all_in_lanes_is_drafting_and_tells_of_no_forward_it_did_not_run() -> None:
    engine = tiny_engine(tiny_looped_policy(), [WavefrontDrafter(DrafterConfig())], compiled=True)
    rounds = [f for f in _facts(engine, fixed_plan("wavefront", 8)) if not f.verify_rows + f.prefill_rows]
    assert rounds
    for facts in rounds:
        parts = time_parts(facts)
        assert set(parts) == {CHOICE, DRAFTING, OTHER}
        assert sum(parts.values()) == pytest.approx(facts.total_s, abs=1e-9)
        assert facts.policy_pass is not None
        assert facts.policy_pass.forward_s == 0.0
        draft = facts.draft_pass
        assert draft is not None
        assert 0 < draft.forward_s < draft.forward_s + draft.choose_s <= facts.draft_s


@needs_kernels
def test_what_drafting_consists_of_sums_to_it_whatever_drafts() -> None:
    looped, config = tiny_looped_policy(), DrafterConfig()
    engines = {
        "w4": _drafting_engine(),
        "wavefront": tiny_engine(looped, [WavefrontDrafter(config)], compiled=True),
        "shallow_loop_1": tiny_engine(looped, [build("shallow_loop_1", config)], compiled=True),
    }
    for name, engine in engines.items():
        drafted = [f for f in _facts(engine, fixed_plan(name, 3)) if f.draft_pass is not None]
        assert drafted, name
        for facts in drafted:
            parts = drafting_parts(facts)
            assert set(parts) == SPLIT | {CHOICE, OTHER}
            assert sum(parts.values()) == pytest.approx(facts.draft_s, abs=1e-9)
            assert all(seconds >= 0 for seconds in parts.values())
            assert parts["linears"] > 0


def test_drafting_without_a_model_is_pythons(torch_facts: list[RoundFacts]) -> None:
    for facts in torch_facts:
        assert drafting_parts(facts) == {OTHER: facts.draft_s}


@needs_kernels
def test_the_split_of_a_long_forward_is_nearly_all_of_it() -> None:
    # As long as eight layers make it: what Python takes around it is little then, on a fast machine as well.
    engine = tiny_engine(tiny_policy(family="smollm2", layers=8), compiled=True)
    rows = torch.arange(96, dtype=torch.int32)
    batch = RowBatch(
        token_ids_M=rows % 48,
        positions_M=rows,
        table_M=torch.zeros_like(rows),
        page_table_SP=torch.arange(6, dtype=torch.int32)[None],
        head_rows_R=rows,
    )
    decoder = engine._decoder
    storage = decoder.new_storage(6)
    shares = []
    for _ in range(20):
        started = time.perf_counter()
        split = decoder.forward(batch, storage).seconds
        assert split is not None
        shares.append(split.total_s / (time.perf_counter() - started))
    # The best of many: a stall between two clocks is no fault of theirs.
    assert 0.7 < max(shares) <= 1.0


def test_a_decoder_that_cannot_split_its_forward_says_so(torch_facts: list[RoundFacts]) -> None:
    for facts in torch_facts:
        assert facts.policy_pass is not None
        assert facts.policy_pass.split is None
        assert set(time_parts(facts)) == {FORWARD, CHOICE, DRAFTING, OTHER}


def test_an_engine_that_does_not_say_has_no_parts(torch_facts: list[RoundFacts]) -> None:
    assert time_parts(replace(torch_facts[0], policy_pass=None)) == {}


def test_a_step_charts_the_parts_as_shares_of_the_rounds_that_told(torch_facts: list[RoundFacts]) -> None:
    pool = RolloutPool()
    for one in (*torch_facts, replace(torch_facts[0], policy_pass=None)):
        pool.add_round(one)
    shares = {n: v for n, v in pool.metrics(wall_s=1.0).items() if n.startswith("rollout/time_frac_")}
    assert set(shares) == {f"rollout/time_frac_{part}" for part in (FORWARD, CHOICE, DRAFTING, OTHER)}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert "rollout/time_frac_other" not in RolloutPool().metrics(wall_s=1.0)


def test_a_clock_that_was_read_starts_anew() -> None:
    clock = PassClock()
    clock.chose(0.5)
    clock.chose(0.25)
    assert clock.take() == PassSeconds(forward_s=0.0, choose_s=0.75)
    assert clock.take() == PassSeconds(forward_s=0.0, choose_s=0.0)
