"""Weight updates, sleep and rebuilds of the native engine, between rounds and never half."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from controller.types import InFlight
from drafters.config import DrafterConfig
from drafters.registry import build
from drafters.testing import FailingDrafter
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.errors import WeightUpdateError
from rollout.policy.manifest import UpdateManifest
from rollout.policy.weights import manifest
from rollout.testing import TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_native import ar_plan, fixed_plan, requests_for, run_engine, texts, tiny_engine
from rollout.types import Completion, SamplingParams

LOOPS = 4
PARAMS = (SamplingParams(max_tokens=16, ignore_eos=True),)


def _engine(policy: TinyPolicy, *, compiled: bool = True, **config: int) -> NativeEngine:
    settings = EngineConfig(**{"max_batch": 8, "max_context_tokens": 128, **config})  # type: ignore[arg-type]
    drafter = build("w4", DrafterConfig(w4_kernel="auto" if compiled else "torch"))
    return tiny_engine(policy, [drafter], compiled=compiled, config=settings)


def _push(engine: NativeEngine, policy: TinyPolicy, version: int) -> int:
    engine.begin_update(manifest(policy.state, version), in_flight="drain")
    engine.stage(policy.state.items())
    engine.check_update()
    return engine.commit_update()


def _check(engine: NativeEngine, declared: UpdateManifest, state: dict[str, torch.Tensor]) -> None:
    engine.begin_update(declared, in_flight="drain")
    engine.stage(state.items())
    engine.check_update()


def _faulty(policy: TinyPolicy, fault: str) -> tuple[UpdateManifest, dict[str, torch.Tensor]]:
    state = dict(policy.state)
    name = "model.layers.1.mlp.up_proj.weight"
    declared = manifest(state, 0 if fault == "version" else 1)
    if fault == "missing":
        del state[name]
    elif fault == "extra":
        state["model.layers.7.mlp.up_proj.weight"] = state[name]
    elif fault == "shape":
        state[name] = state[name].T.contiguous()
    elif fault == "nan":
        state[name] = state[name].clone()
        state[name][3, 5] = math.nan
        declared = manifest(state, 1)
    elif fault == "changed":
        state[name] = state[name] + 1
    return declared, state


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "nan", "version", "changed"])
def test_a_faulty_update_is_refused_whole_and_the_old_version_serves_on(fault: str) -> None:
    """A25: through the engine."""
    policy = tiny_policy()
    requests = requests_for(vocab=48, prompts=3, params=PARAMS)
    engine = _engine(policy)
    before = texts(run_engine(engine, requests, ar_plan))
    fingerprint = engine.fingerprint
    declared, state = _faulty(policy, fault)
    with pytest.raises(WeightUpdateError):
        _check(engine, declared, state)
    assert (engine.policy_version, engine.fingerprint) == (0, fingerprint)
    assert texts(run_engine(engine, requests, fixed_plan("w4", 3))) == before
    assert _push(engine, tiny_policy(seed=1), 1) == 1


def test_an_update_of_a_looped_policy_is_as_if_it_had_been_loaded() -> None:
    old, new = tiny_looped_policy(seed=0), tiny_looped_policy(seed=1)
    requests = requests_for(vocab=48, prompts=3, params=PARAMS)
    engine, fresh = _engine(old), _engine(new)
    before = texts(run_engine(engine, requests, fixed_plan("w4", 3)))
    assert _push(engine, new, 1) == 1
    after = texts(run_engine(engine, requests, fixed_plan("w4", 3)))
    assert after == texts(run_engine(fresh, requests, ar_plan)) != before
    shapes = engine.part_shapes()
    spec = old.spec
    assert shapes["policy"].weight_bytes == 2 * (LOOPS * spec.body_linear_params + spec.head_params)
    assert shapes["policy"].kv_bytes_per_token == 4 * LOOPS * spec.layers * spec.kv_heads * spec.head_dim
    assert shapes["w4"].weight_bytes > LOOPS * spec.body_linear_params / 2


def _broken_stream(policy: TinyPolicy) -> Iterator[tuple[str, torch.Tensor]]:
    yield next(iter(policy.state.items()))
    raise OSError("the sender went away")


@pytest.mark.parametrize("moment", ["opened", "staged by a stream that breaks", "staged without tensors"])
def test_whatever_goes_wrong_before_the_commit_ends_that_update_and_nothing_else(moment: str) -> None:
    policy = tiny_policy()
    requests = requests_for(vocab=48, prompts=2, params=PARAMS)
    engine = _engine(policy)
    before = texts(run_engine(engine, requests, ar_plan))
    declared = manifest(tiny_policy(seed=1).state, 1)
    if moment == "opened":
        forged = replace(declared, tensors=(None,))  # type: ignore[arg-type]
        with pytest.raises(WeightUpdateError, match="AttributeError"):
            engine.begin_update(forged, in_flight="drain")
    else:
        engine.begin_update(declared, in_flight="drain")
        bucket = _broken_stream(policy) if "stream" in moment else [(declared.tensors[0].name, None)]
        with pytest.raises(WeightUpdateError, match="Error"):
            engine.stage(bucket)  # type: ignore[arg-type]
    with pytest.raises(WeightUpdateError, match="no update is open"):
        engine.commit_update()
    assert texts(run_engine(engine, requests, ar_plan)) == before
    assert _push(engine, tiny_policy(seed=1), 1) == 1


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_update_reaches_the_drafter_as_well_as_the_policy(compiled: bool) -> None:
    """A26: it accepts what a drafter built from those weights accepts."""
    engine = _engine(tiny_policy(), compiled=compiled)
    for version in (1, 2, 5):
        policy = tiny_policy(seed=version)
        assert _push(engine, policy, version) == version
        assert engine.drafter_versions() == {"w4": version}
        requests = requests_for(vocab=48, prompts=3, params=PARAMS)
        done = run_engine(engine, requests, fixed_plan("w4", 3))
        fresh = run_engine(_engine(policy, compiled=compiled), requests, fixed_plan("w4", 3))
        assert texts(done) == texts(fresh)
        for key, completion in done.items():
            assert completion.provenance is not None
            assert fresh[key].provenance is not None
            assert completion.provenance.accepted == fresh[key].provenance.accepted


def test_drain_waits_for_preempted_sequences_too() -> None:
    policy = tiny_policy()
    engine = _engine(policy, kv_tokens=5 * 16, max_batch=4)
    requests = requests_for(vocab=48, prompts=4, params=(SamplingParams(max_tokens=40, ignore_eos=True),))
    for request in requests:
        engine.add(request)
    preempted = 0.0
    while not preempted:
        engine.run_round(ar_plan(engine.load()))
        preempted = engine.gauges()["engine/preemptions"]
    other = tiny_policy(seed=1)
    engine.begin_update(manifest(other.state, 1), in_flight="drain")
    engine.stage(other.state.items())
    versions: set[int] = set()
    while engine.running:
        for completion in engine.run_round(ar_plan(engine.load())).completions:
            versions |= {t.policy_version for t in completion.tokens}
    assert versions == {0}
    assert engine.commit_update() == 1


def test_a_sleeping_engine_forgets_its_memory_and_not_its_work() -> None:
    policy = tiny_policy()
    requests = requests_for(vocab=48, prompts=3, params=PARAMS)
    expected = texts(run_engine(_engine(policy), requests, ar_plan))
    engine = _engine(policy)
    for request in requests:
        engine.add(request)
    plan = fixed_plan("w4", 2)
    for _ in range(4):
        engine.run_round(plan(engine.load()))
    engine.sleep()
    assert engine.gauges()["engine/kv_pages_used"] == 0
    engine.wake()
    assert texts(run_engine(engine, [], plan, pending=len(requests))) == expected


def test_a_drafter_that_cannot_be_built_is_off_until_a_rebuild_succeeds() -> None:
    drafter = FailingDrafter(failing_rebuilds=(0,), failing_proposals=(), tokens=(3,))
    engine = tiny_engine(tiny_policy(), [drafter])
    assert engine.traits.drafters == ()
    requests = requests_for(vocab=48, prompts=2, params=PARAMS)
    done = run_engine(engine, requests, fixed_plan(drafter.name, 1))
    assert all(c.provenance is not None and c.provenance.drafted == 0 for c in done.values())
    engine.rebuild_drafter(drafter.name)
    assert [d.name for d in engine.traits.drafters] == [drafter.name]


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_an_update_leaves_no_text_begun_under_old_weights_in_the_line(mode: InFlight) -> None:
    """Neither of a sequence that lost its pages, nor of one that another engine began."""
    engine = _engine(tiny_policy(), max_batch=1)
    fresh, begun, preempted = requests_for(vocab=48, prompts=3, params=PARAMS)
    engine.add(preempted)
    done = [*_rounds(engine, 4)]
    engine.sleep()
    engine.wake()
    engine.add(fresh)
    engine.add(replace(begun, prefix_ids=(5, 6, 7)), resumed=True)
    assert engine.running == 2
    new = tiny_policy(seed=1)
    engine.begin_update(manifest(new.state, 1), in_flight=mode)
    engine.stage(new.state.items())
    engine.check_update()
    while mode == "drain" and engine.running:
        done += _rounds(engine, 1)
    done += engine.settle_running()
    engine.commit_update()
    assert {c.prompt_uid for c in done} == {begun.prompt_uid, preempted.prompt_uid}
    assert {c.finish_reason for c in done} == {"length" if mode == "drain" else "aborted"}
    while engine.busy:
        done += _rounds(engine, 1)
    assert {t.policy_version for c in done[:2] for t in c.tokens} == {0}
    assert {t.policy_version for t in done[2].tokens} == {1}


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_prompt_pages_that_samples_share_hold_keys_of_one_version_only(mode: InFlight) -> None:
    """Old keys of a prompt whose prefill an update falls into reach no sample, then or later."""
    new = tiny_policy(seed=1)
    (prompt,) = requests_for(vocab=48, prompts=1, params=PARAMS)
    prompt = replace(prompt, prompt_ids=tuple(3 + 7 * i % 45 for i in range(60)))
    samples = [replace(prompt, sample_index=i, seed=i) for i in range(6)]
    engine = _engine(tiny_policy(), prefill_chunk_tokens=20)
    (decoding,) = requests_for(vocab=48, prompts=1, seed=3, params=PARAMS, longest_prompt=12)
    engine.add(replace(decoding, prompt_uid="decoding"))
    done = [*_rounds(engine, 3)]
    for sample in samples[:4]:
        engine.add(sample)
    done += _rounds(engine, 2)
    assert engine.load().prefill_tokens == 20, "the leader is in the middle of its prompt, the others wait"
    engine.begin_update(manifest(new.state, 1), in_flight=mode)
    engine.stage(new.state.items())
    engine.check_update()
    done += engine.settle_running()
    engine.commit_update()
    while engine.busy:
        done += _rounds(engine, 1)
    hits = engine.gauges()["engine/prefix_hit_tokens"]
    told = texts({(c.prompt_uid, c.sample_index): c for c in done})
    told |= texts(run_engine(engine, samples[4:], ar_plan))
    assert engine.gauges()["engine/prefix_hit_tokens"] > hits > 0, "pages were shared"
    assert {t.policy_version for c in done if c.prompt_uid == prompt.prompt_uid for t in c.tokens} == {1}
    only_new = texts(run_engine(_engine(new, prefill_chunk_tokens=20), samples, ar_plan))
    assert {key: told[key] for key in only_new} == only_new


def _rounds(engine: NativeEngine, count: int) -> Iterator[Completion]:
    for _ in range(count):
        yield from engine.run_round(ar_plan(engine.load())).completions
