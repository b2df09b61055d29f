"""Wavefront gives the text of plain decoding, and leaves the KV that plain decoding leaves.

Float64 torch first, where no near-tie can be an excuse, then the compiled kernels. Every comparison is
equality of ids and of all four logprobs, or of every bit of the cache.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.types import Assignment, InFlight, RoundFacts, RoundLoad, RoundPlan
from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.calibration.measure import calibrate
from rollout.config import EngineConfig, PolicyConfig
from rollout.engine.native.build import build_engine
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.lanes.chain import Chain, Lane
from rollout.engine.native.rows import PAGE_TOKENS
from rollout.engine.target import Choice
from rollout.errors import ConfigError
from rollout.policy.weights import manifest
from rollout.proof.steering import Steering, controlled, drive, nominal_calibration
from rollout.testing import TinyPolicy, save_tiny_folder, tiny_looped_policy
from rollout.testing_native import (
    MIXED_PARAMS,
    Planner,
    Text,
    ar_plan,
    fixed_plan,
    random_plan,
    requests_for,
    run_engine,
    texts,
    tiny_engine,
)
from rollout.testing_planes import planes_of, same_bits
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless

KINDS = [pytest.param(False, id="float64"), pytest.param(True, id="compiled")]
PARAMS = (*MIXED_PARAMS, SamplingParams(max_tokens=24, stop=("e", "0"), ignore_eos=True))
LOOPS = 4
ENDLESS = (SamplingParams(max_tokens=60, ignore_eos=True), SamplingParams(max_tokens=60, temperature=0.0))


def engine_of(
    policy: TinyPolicy,
    *,
    compiled: bool,
    depth: int = 1,
    drafters: Sequence[str] = ("wavefront",),
    **config: int,
) -> NativeEngine:
    settings = EngineConfig(**{"max_batch": 8, "max_context_tokens": 128, **config})  # type: ignore[arg-type]
    # Rounds short enough for these texts to have several of them.
    drafter = DrafterConfig(
        wavefront_depth=depth, wavefront_passes=32, w4_kernel="auto" if compiled else "torch"
    )
    return tiny_engine(policy, [build(n, drafter) for n in drafters], compiled=compiled, config=settings)


def pass_by_pass(engine: NativeEngine) -> NativeEngine:
    """Let Python run the passes of every sequence, so that a test can stand between two of them."""
    engine._wavefront._compiled = None
    return engine


def requests_of(count: int = 9) -> list[Request]:
    return requests_for(vocab=48, prompts=count, params=PARAMS, seed=3)


def plain(policy: TinyPolicy, requests: Sequence[Request], *, compiled: bool) -> dict[tuple[str, int], Text]:
    """Each request alone, without speculation: the definition of its text."""
    engine = engine_of(policy, compiled=compiled, drafters=())
    out: dict[tuple[str, int], Text] = {}
    for request in requests:
        out.update(texts(run_engine(engine, [request], ar_plan)))
    return out


def accepted(done: dict[tuple[str, int], Completion]) -> int:
    return sum(c.provenance.accepted for c in done.values() if c.provenance)


@pytest.mark.parametrize("compiled", KINDS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_depth_and_batch_gives_the_text_of_plain_decoding(depth: int, compiled: bool) -> None:
    policy, requests = tiny_looped_policy(), requests_of()
    expected = plain(policy, requests, compiled=compiled)
    assert len({t.ids for t in expected.values()}) > 4
    settings = ((1, 8), (3, 8), (8, 8), (8, 1), (8, 2)) if compiled else ((8, 8), (3, 2))
    for batch, gamma in settings:
        engine = engine_of(policy, compiled=compiled, depth=depth, max_batch=batch)
        done = run_engine(engine, requests, fixed_plan("wavefront", gamma))
        assert texts(done) == expected, f"batch {batch}, gamma {gamma}"
        assert accepted(done) > 10
        assert engine.gauges()["engine/lanes"] == 0


def test_a_policy_of_other_loops_and_seeds_gives_the_text_of_plain_decoding() -> None:
    requests = requests_of()
    for seed, loops, depth in ((1, 2, 1), (2, 3, 1), (3, 3, 2), (4, 6, 1), (5, 6, 4)):
        policy = tiny_looped_policy(seed, loops=loops)
        engine = engine_of(policy, compiled=True, depth=depth)
        done = run_engine(engine, requests, fixed_plan("wavefront", 8))
        assert texts(done) == plain(policy, requests, compiled=True), f"{depth} of {loops} loops"


def mixed_plan(seed: int) -> Planner:
    """Sequences join lanes, leave them for w4 or plain decoding, and come back, round by round."""
    rng = random.Random(seed)

    def plan(load: RoundLoad) -> RoundPlan:
        assignments = {}
        for s in load.sequences:
            drafter = rng.choice(["wavefront", "wavefront", "w4", "ar"])
            if drafter != "ar":
                assignments[s.key] = Assignment(drafter=drafter, gamma=rng.randrange(1, 6))
        return RoundPlan(assignments=assignments, reason="mixed")

    return plan


@pytest.mark.parametrize("compiled", KINDS)
def test_rounds_mixed_with_prompts_w4_and_plain_decoding_change_nothing(compiled: bool) -> None:
    policy, requests = tiny_looped_policy(), requests_of(14 if compiled else 9)
    expected = plain(policy, requests, compiled=compiled)
    for seed, chunk in ((1, 512), (2, 5)) if compiled else ((2, 5),):
        engine = engine_of(
            policy, compiled=compiled, drafters=("wavefront", "w4"), prefill_chunk_tokens=chunk, max_batch=5
        )
        assert texts(run_engine(engine, requests, mixed_plan(seed))) == expected


@pytest.mark.parametrize("compiled", KINDS)
def test_preemption_changes_nothing_and_leaks_neither_page_nor_lane(compiled: bool) -> None:
    policy, requests = tiny_looped_policy(), requests_of(12 if compiled else 8)
    expected = plain(policy, requests, compiled=compiled)
    plans = [random_plan(["wavefront"], max_gamma=4, seed=2), fixed_plan("wavefront", 8)]
    for plan in plans if compiled else plans[1:]:
        engine = engine_of(policy, compiled=compiled, kv_tokens=9 * PAGE_TOKENS, max_batch=6)
        assert texts(run_engine(engine, requests, plan)) == expected
        assert engine.gauges()["engine/preemptions"] > 0
        engine.close()
        gauges = engine.gauges()
        assert (gauges["engine/kv_pages_used"], gauges["engine/lanes"]) == (0, 0)


@pytest.mark.parametrize("compiled", KINDS)
def test_sequences_join_leave_and_are_aborted_between_any_two_rounds(compiled: bool) -> None:
    policy, requests = tiny_looped_policy(), requests_of(16 if compiled else 8)
    expected = plain(policy, requests, compiled=compiled)
    engine = engine_of(policy, compiled=compiled)
    rng, plan = random.Random(7), fixed_plan("wavefront", 8)
    waiting, victims = list(requests), {r.key for r in requests[::4]}
    done: dict[tuple[str, int], Completion] = {}
    while waiting or engine.busy:
        for _ in range(rng.randrange(3)):
            if waiting:
                engine.add(waiting.pop(0))
        for key in sorted(victims):
            completion = engine.abort(key) if rng.random() < 0.3 else None
            if completion is not None:
                victims.discard(key)
                done[key] = completion
        for completion in engine.run_round(plan(engine.load())).completions:
            done[completion.prompt_uid, completion.sample_index] = completion
    found = texts(done)
    cut = [key for key, text in found.items() if text.finish_reason == "aborted"]
    assert cut
    assert any(found[key].ids for key in cut)
    for key, text in found.items():
        if key in cut:
            length = len(text.ids)
            assert (text.ids, text.logprobs) == (expected[key].ids[:length], expected[key].logprobs[:length])
        else:
            assert text == expected[key]
    assert engine.gauges()["engine/lanes"] == 0


def test_an_abort_forgets_the_lanes_at_once() -> None:
    engine = engine_of(tiny_looped_policy(), compiled=True)
    (request,) = requests_for(vocab=48, prompts=1, params=ENDLESS)
    engine.add(request)
    for _ in range(4):
        engine.run_round(fixed_plan("wavefront", 8)(engine.load()))
    assert engine.gauges()["engine/lanes"] > 0
    engine.abort(request.key)
    assert engine.gauges()["engine/lanes"] == 0


@pytest.mark.parametrize("mode", ["recompute", "keep"])
@pytest.mark.parametrize("compiled", KINDS)
def test_weights_that_change_in_mid_text_give_what_plain_decoding_gives(
    compiled: bool, mode: InFlight
) -> None:
    """Each sequence changes its weights after some token; plain decoding is led to the same tokens."""
    old, new = tiny_looped_policy(1), tiny_looped_policy(2)
    requests = requests_for(vocab=48, prompts=5 if compiled else 2, params=ENDLESS, seed=9)
    plan = fixed_plan("wavefront", 8)
    engine = engine_of(old, compiled=compiled)
    for request in requests:
        engine.add(request)
    for _ in range(5):
        engine.run_round(plan(engine.load()))
    update(engine, new, mode)
    done = run_engine(engine, [], plan, pending=len(requests))
    for request in requests:
        cut = sum(t.policy_version == 0 for t in done[request.key].tokens)
        assert 3 < cut < 60
        reference = engine_of(old, compiled=compiled)
        reference.add(request)
        while not reference.load().sequences or reference.load().sequences[0].generated_tokens < cut:
            reference.run_round(ar_plan(reference.load()))
        update(reference, new, mode)
        whole = run_engine(reference, [], ar_plan, pending=1)
        assert texts(whole)[request.key] == texts(done)[request.key]
        assert accepted({request.key: done[request.key]}) > 5


def update(engine: NativeEngine, policy: TinyPolicy, mode: InFlight) -> None:
    engine.begin_update(manifest(policy.state, 1), in_flight=mode)
    engine.stage(policy.state.items())
    engine.settle_running()
    engine.commit_update()


def test_sleep_in_mid_text_changes_nothing() -> None:
    policy = tiny_looped_policy()
    requests = requests_for(vocab=48, prompts=3, params=ENDLESS, seed=4)
    engine, plan = engine_of(policy, compiled=True), fixed_plan("wavefront", 8)
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.run_round(plan(engine.load()))
    engine.sleep()
    engine.wake()
    done = run_engine(engine, [], plan, pending=len(requests))
    assert texts(done) == plain(policy, requests, compiled=True)


# ---- the cache


@pytest.mark.parametrize("compiled", KINDS)
def test_every_plane_holds_what_plain_decoding_writes_at_all_positions_but_the_last(compiled: bool) -> None:
    policy = tiny_looped_policy()
    requests = requests_for(vocab=48, prompts=4, params=ENDLESS, seed=5)
    engines = [engine_of(policy, compiled=compiled) for _ in range(2)]
    plans = [fixed_plan("wavefront", 8), ar_plan]
    for engine, plan in zip(engines, plans, strict=True):
        for request in requests:
            engine.add(request)
        while not engine.load().sequences or min(s.generated_tokens for s in engine.load().sequences) < 40:
            engine.run_round(plan(engine.load()))
    lanes = engines[0].gauges()["engine/lanes"]
    assert lanes > 4
    for key in range(4):
        ends = [len(e._scheduler.running[key].tokens) for e in engines]
        frontiers = [e._scheduler.running[key].frontier for e in engines]
        assert frontiers == [end - 1 for end in ends]
        covered = min(frontiers)
        assert covered >= 40
        found, wanted = (planes_of(e, key, covered) for e in engines)
        assert same_bits(found, wanted)


# ---- what it costs


def run_rounds(engine: NativeEngine, requests: Sequence[Request], plan: Planner) -> list[RoundFacts]:
    for request in requests:
        engine.add(request)
    facts = []
    while engine.busy:
        facts.append(engine.run_round(plan(engine.load())).facts)
    return facts


@pytest.mark.parametrize("depth", [1, 2])
def test_passes_per_token_are_those_of_the_measured_acceptance(depth: int) -> None:
    policy = tiny_looped_policy()
    params = (SamplingParams(max_tokens=200, ignore_eos=True),)
    passes = tokens = tried = kept = 0
    for request in requests_for(vocab=48, prompts=8, params=params, longest_prompt=9):
        engine = engine_of(policy, compiled=True, depth=depth, max_context_tokens=256)
        for facts in run_rounds(engine, [request], fixed_plan("wavefront", 8)):
            for draft in facts.drafts:
                passes += draft.passes
                tokens += facts.decoded
                tried += sum(o.gamma for o in facts.outcomes)
                kept += sum(o.accepted for o in facts.outcomes)
    alpha = kept / tried
    assert tokens > 1500
    assert 0.3 < alpha < 0.98
    assert passes / tokens == pytest.approx(alpha * depth + (1 - alpha) * LOOPS, rel=0.05)


def test_a_pass_has_at_most_a_lane_per_readout_depth_and_sequence() -> None:
    policy = tiny_looped_policy()
    engine = pass_by_pass(engine_of(policy, compiled=True))
    rows: list[int] = []
    advance = engine._decoder.advance

    def counted(hidden_MD: Tensor, batch, kv, *, loop_M: Tensor):  # type: ignore[no-untyped-def]
        rows.append(batch.rows)
        where = list(zip(batch.table_M.tolist(), loop_M.tolist(), strict=True))
        assert len(set(where)) == len(where), "two lanes of a sequence at one depth"
        return advance(hidden_MD, batch, kv, loop_M=loop_M)

    engine._decoder.advance = counted  # type: ignore[method-assign]
    facts = run_rounds(engine, requests_of(), fixed_plan("wavefront", 8))
    assert max(rows) <= 8 * LOOPS
    assert sum(rows) == sum(d.rows for f in facts for d in f.drafts)
    for fact in facts:
        assert all(d.passes <= 32 for d in fact.drafts)
        assert fact.batch == len(fact.outcomes)


def test_a_folder_of_a_looped_policy_is_decoded_with_it_under_a_fixed_controller(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path, family="ouro")
    policy = PolicyConfig(source=str(tmp_path))
    settings = EngineConfig(max_batch=4, max_context_tokens=128, threads=1)
    drafters = DrafterConfig(names=("wavefront",))
    engine = build_engine(policy, settings, drafters)
    config = ControllerConfig(kind="fixed", drafter="wavefront")
    run = drive(engine, requests_of(), controlled(engine, config), batch=4)
    wanted = run_engine(build_engine(policy, settings, DrafterConfig(names=())), requests_of(), ar_plan)
    assert texts(run.completions) == texts(wanted)
    assert run.accepted > 10
    with pytest.raises(ConfigError, match="verify=token cannot verify the drafter wavefront"):
        build_engine(policy, replace(settings, verify="token"), drafters)


def test_auto_prices_it_from_a_calibration_and_no_plan_changes_a_text() -> None:
    policy, requests = tiny_looped_policy(), requests_of(12)
    expected = plain(policy, requests, compiled=True)
    engine = engine_of(policy, compiled=True, drafters=("wavefront", "history"))
    config = ControllerConfig(prior_acceptance=0.9)
    calibration = calibrate(engine, config, key="tiny", budget_s=1.0)
    assert calibration.parts["wavefront"].samples >= 4
    assert {t.rows for t in calibration.timings if t.part == "wavefront"} >= {1, 8, 32}
    # As on a machine where moving this policy's weights is all that costs: there lanes pay.
    shapes = {
        name: replace(shape, weight_bytes=10_000 * shape.weight_bytes)
        for name, shape in engine.part_shapes().items()
    }
    controller = build_controller(config, engine.traits, shapes, nominal_calibration(shapes))
    for name in ("wavefront", "history"):
        controller.drafter_built(name, engine.policy_version)
    run = drive(engine, requests, Steering(plan=lambda load: controller.decide(load, now_s=0.0)), batch=5)
    assert texts(run.completions) == expected
    assert any(t.drafter == "wavefront" for c in run.completions.values() for t in c.tokens)
    assert run.accepted > 0


# ---- the comparison can fail


def kept_whatever(chain: Chain, choice: Choice) -> None:
    """Commit as ever, but let the lane behind live on."""
    behind = chain.lanes[1:]
    honest_commit(chain, choice)
    if behind:
        chain.lanes = [replace_token(behind[0], choice.token), *behind[1:]]


def replace_token(lane: Lane, token: int) -> Lane:
    """The state is that of another token: its keys are stale."""
    return replace(lane, token=token)


honest_commit: Callable[[Chain, Choice], None] = Chain.commit


def test_lanes_that_outlive_a_rejection_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, requests = tiny_looped_policy(), requests_of()
    expected = plain(policy, requests, compiled=True)
    monkeypatch.setattr(Chain, "commit", kept_whatever)
    engine = pass_by_pass(engine_of(policy, compiled=True))
    done = run_engine(engine, requests, fixed_plan("wavefront", 8))
    assert texts(done) != expected
