"""More failures users reported: drafts, caches and weights where the life of a sequence is disturbed.

Ids in docstrings name the retold report. ``OwnWords`` drafts with the policy's own forward over the policy's
own pages, so in exact numerics every one of its drafts must be kept: any stale key or value shows.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from controller.types import RoundLoad, RoundPlan
from drafters.config import DrafterConfig
from drafters.registry import build
from drafters.types import Drafter, DraftModel, DraftRequest, PolicyView, Proposal
from drafters.w4 import W4Drafter
from rollout.config import EngineConfig
from rollout.engine.native.compiled_forward.scratch import RowBuffer
from rollout.engine.native.engine import NativeEngine
from rollout.policy.weights import EMBEDDING, HEAD, manifest
from rollout.testing import TinyPolicy, tiny_policy
from rollout.testing_native import (
    MIXED_PARAMS,
    ar_plan,
    fixed_plan,
    requests_for,
    run_engine,
    texts,
    tiny_engine,
)
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless

KINDS = [pytest.param(False, id="float64"), pytest.param(True, id="compiled")]


class OwnWords(W4Drafter):
    """Drafts as ``w4`` does, with none of the policy's linears replaced."""

    name = "own"

    def __init__(self) -> None:
        super().__init__(DrafterConfig())
        self.asked: list[DraftRequest] = []

    def _rebuilt_model(self, view: PolicyView) -> DraftModel:
        return view.with_linears({})

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        self.asked += [replace(r, tokens=tuple(r.tokens)) for r in requests]
        return super().propose(requests)


def _engine(policy: TinyPolicy, drafters: Sequence[Drafter], compiled: bool, **config: Any) -> NativeEngine:
    settings = EngineConfig(**{"max_batch": 8, "max_context_tokens": 160, **config})
    return tiny_engine(policy, drafters, compiled=compiled, config=settings)


def _plain(policy: TinyPolicy, requests: list[Request], compiled: bool) -> dict[tuple[str, int], Any]:
    return texts(run_engine(_engine(policy, (), compiled), requests, ar_plan))


def _all_kept(engine: NativeEngine, plans: list[Any]) -> tuple[dict[tuple[str, int], Completion], int]:
    """Run to the end, the n-th round by the n-th plan and later ones by the last; every draft is kept."""
    done: dict[tuple[str, int], Completion] = {}
    drafted = rounds = 0
    while engine.busy:
        outcome = engine.run_round(plans[min(rounds, len(plans) - 1)](engine.load()))
        rounds += 1
        for one in outcome.facts.outcomes:
            assert one.accepted == one.gamma or one.censored, (rounds, one)
            drafted += one.gamma
        done.update({(c.prompt_uid, c.sample_index): c for c in outcome.completions})
    return done, drafted


@pytest.mark.parametrize("gamma", range(1, 9))
def test_drafts_of_the_policys_own_forward_are_kept_at_every_position(gamma: int) -> None:
    """A15: no key or value of a draft, bonus or correction is ever missing or stale."""
    policy = tiny_policy()
    params = [SamplingParams(max_tokens=64, ignore_eos=True, temperature=t) for t in (0.0, 1.0)]
    requests = requests_for(vocab=48, prompts=2, params=params, seed=3)
    engine = _engine(policy, [OwnWords()], False)
    for request in requests:
        engine.add(request)
    done, drafted = _all_kept(engine, [fixed_plan("own", gamma)])
    assert drafted >= 2 * 63 * gamma // (gamma + 1) - 2 * gamma
    assert texts(done) == _plain(policy, requests, False)


@pytest.mark.parametrize("compiled", KINDS)
def test_speculation_is_as_good_as_ever_after_any_spell_without_it(compiled: bool) -> None:
    """A15, A22: plain rounds, shared prompt pages and preemption leave a drafter nothing to catch up on."""
    policy = tiny_policy(family="smollm2")
    requests = requests_for(
        vocab=48, prompts=3, samples=2, params=[SamplingParams(max_tokens=70, ignore_eos=True)], seed=4
    )
    engine = _engine(policy, [OwnWords()], compiled, kv_tokens=20 * 16, max_batch=6)
    for request in requests:
        engine.add(request)
    speculate = fixed_plan("own", 4)
    plans = [ar_plan] * 20 + [speculate] * 4 + [ar_plan] * 6 + [speculate] * 3 + [ar_plan, speculate]
    done, drafted = _all_kept(engine, plans)
    assert texts(done) == _plain(policy, requests, compiled)
    assert drafted > 100
    assert engine.gauges()["engine/preemptions"] > 0
    assert engine.gauges()["engine/prefix_hit_tokens"] > 0


@pytest.mark.parametrize("compiled", KINDS)
def test_no_draft_outlives_its_round_when_a_sequence_is_preempted_or_left_out(compiled: bool) -> None:
    """A17: drafters see committed tokens only, nothing is preempted between draft and verification."""
    policy = tiny_policy()
    params = [replace(p, max_tokens=40, ignore_eos=True) for p in MIXED_PARAMS]
    requests = requests_for(vocab=48, prompts=6, params=params, seed=11, longest_prompt=12)
    plain = _plain(policy, requests, compiled)
    drafter = OwnWords()
    engine = _engine(policy, [drafter], compiled, kv_tokens=9 * 16, max_batch=6)
    rng = random.Random(0)

    def some_sit_out(load: RoundLoad) -> RoundPlan:
        plan = fixed_plan("own", 5)(load)
        return RoundPlan(
            assignments={k: a for k, a in plan.assignments.items() if rng.random() < 0.85}, reason="some"
        )

    propose, preempted_at = drafter.propose, []

    def watched(asked: Sequence[DraftRequest]) -> Proposal:
        preempted_at.append(engine.gauges()["engine/preemptions"])
        return propose(asked)

    drafter.propose = watched  # type: ignore[method-assign]
    for request in requests:
        engine.add(request)
    done: dict[tuple[str, int], Completion] = {}
    drafting: set[int] = set()
    cut_short = 0
    while engine.busy:
        before, calls = engine.gauges()["engine/preemptions"], len(preempted_at)
        load = engine.load()
        outcome = engine.run_round(some_sit_out(load))
        after = engine.gauges()["engine/preemptions"]
        assert preempted_at[calls:] in ([], [after]), "preempted with its drafts already made"
        decoded = {o.key for o in outcome.facts.outcomes}
        cut_short += after > before and bool(drafting & ({s.key for s in load.sequences} - decoded))
        drafting = {o.key for o in outcome.facts.outcomes if o.gamma}
        done.update({(c.prompt_uid, c.sample_index): c for c in outcome.completions})
    assert cut_short > 0, "no sequence was to lose its pages right after a round in which it drafted"
    assert texts(done) == plain
    by_uid = {r.prompt_uid: r for r in requests}
    for asked in drafter.asked:
        request = by_uid[asked.prompt_uid]
        whole = request.prompt_ids + plain[request.key].ids
        assert tuple(asked.tokens) == whole[: len(asked.tokens)], "a draft was taken for committed text"
    engine.close()
    assert engine.gauges()["engine/kv_pages_used"] == 0


@pytest.mark.parametrize("compiled", KINDS)
def test_an_abort_in_any_state_leaves_nothing_with_the_drafters(compiled: bool) -> None:
    """A20: what a drafter keeps of a running sequence goes with it, waiting, half read, drafting or over."""
    policy = tiny_policy()
    for rounds in range(8):
        history = build("history", DrafterConfig())
        engine = _engine(policy, [history, OwnWords()], compiled, max_batch=2, prefill_chunk_tokens=8)
        requests = requests_for(vocab=48, prompts=4, params=[SamplingParams(max_tokens=30, ignore_eos=True)])
        for request in requests:
            engine.add(request)
        for i in range(rounds):
            engine.run_round(fixed_plan(("history", "own")[i % 2], 3)(engine.load()))
        for request in [*requests, *requests]:
            engine.abort(request.key)
        assert not engine.busy
        assert history._prompt_of == {}  # type: ignore[attr-defined]
        assert not any(texts.running for texts in history._prompts.values())  # type: ignore[attr-defined]
        engine.close()
        assert engine.gauges()["engine/kv_pages_used"] == 0


def _push(engine: NativeEngine, state: Mapping[str, Tensor], version: int) -> None:
    engine.begin_update(manifest(state, version), in_flight="drain")
    engine.stage(state.items())
    engine.commit_update()


def _w4(compiled: bool) -> Drafter:
    return build("w4", DrafterConfig(w4_kernel="auto" if compiled else "torch"))


def _drafts_kept(done: Mapping[tuple[str, int], Completion]) -> dict[tuple[str, int], tuple[int, int]]:
    return {key: (c.provenance.drafted, c.provenance.accepted) for key, c in done.items() if c.provenance}


@pytest.mark.parametrize("compiled", KINDS)
def test_an_update_of_a_tied_embedding_alone_reaches_every_head(compiled: bool) -> None:
    """A27: policy and 4-bit drafter then say what engines built from those weights say."""
    old, new = tiny_policy(seed=0, family="smollm2"), tiny_policy(seed=1, family="smollm2")
    state = {**old.state, EMBEDDING: new.state[EMBEDDING]}
    assert HEAD not in state
    requests = requests_for(vocab=48, prompts=4, params=[SamplingParams(max_tokens=20, ignore_eos=True)])
    engine = _engine(old, [_w4(compiled)], compiled)
    before = texts(run_engine(engine, requests, fixed_plan("w4", 3)))
    _push(engine, state, 1)
    updated = run_engine(engine, requests, fixed_plan("w4", 3))
    fresh = run_engine(
        _engine(replace(old, state=state), [_w4(compiled)], compiled), requests, fixed_plan("w4", 3)
    )
    assert texts(updated) == texts(fresh) != before
    assert _drafts_kept(updated) == _drafts_kept(fresh)


def _addresses(root: object) -> dict[str, int]:
    """Return where every tensor lies that ``root`` holds, however deep, by its path; not scratch memory."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def walk(value: object, path: str) -> None:
        if isinstance(value, Tensor):
            found[path] = value.data_ptr() if value.layout is torch.strided and not value.is_mkldnn else 0
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}[{key}]")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                walk(item, f"{path}[{index}]")
        elif id(value) not in seen and type(value).__module__.split(".")[0] in ("rollout", "drafters"):
            seen.add(id(value))
            names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
            for name in names:
                part = getattr(value, name, None)
                if not isinstance(part, RowBuffer):
                    walk(part, f"{path}.{name}")

    walk(root, "")
    return found


@pytest.mark.parametrize("compiled", KINDS)
def test_updates_move_no_weight_no_code_and_no_table_in_memory(compiled: bool) -> None:
    """A30: after three updates everything lies where it lay, and says what a fresh engine says."""
    engine = _engine(tiny_policy(), [_w4(compiled)], compiled)
    drafter = engine._drafting.slots["w4"].drafter
    decoder = [engine._decoder, drafter]
    before = _addresses(decoder)
    assert any("norm" in path for path in before)
    assert any(".linears[head]" in path for path in before), "the drafter's codes are looked at"
    assert any("cos" in path for path in before)
    requests = requests_for(vocab=48, prompts=3, params=[SamplingParams(max_tokens=12)])
    for version in (1, 2, 3):
        policy = tiny_policy(seed=version)
        _push(engine, policy.state, version)
        assert _addresses(decoder) == before
        fresh = run_engine(_engine(policy, [_w4(compiled)], compiled), requests, fixed_plan("w4", 2))
        updated = run_engine(engine, requests, fixed_plan("w4", 2))
        assert texts(updated) == texts(fresh)
        assert _drafts_kept(updated) == _drafts_kept(fresh)


def test_weights_a_drafter_cannot_round_switch_it_off_with_an_alarm_and_plain_decoding_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A38: the policy takes 2e38, its 4-bit copy does not; the next sound version drafts again."""
    engine = _engine(tiny_policy(), [_w4(False)], False)
    requests = requests_for(vocab=48, prompts=3, params=[SamplingParams(max_tokens=12, ignore_eos=True)])
    state = dict(tiny_policy(seed=1).state)
    name = "model.layers.0.self_attn.o_proj.weight"
    state[name] = state[name].clone()
    state[name][3, 5] = 2e38
    with caplog.at_level(logging.WARNING):
        _push(engine, state, 1)
    assert "ALARM drafter w4 cannot be built and is off" in caplog.text
    assert "layers.0.o" in caplog.text
    assert engine.gauges()["drafter/w4_enabled"] == 0
    done = run_engine(engine, requests, fixed_plan("w4", 3))
    assert texts(done) == _plain(replace(tiny_policy(), state=state), requests, False)
    assert all(drafted == 0 for drafted, _ in _drafts_kept(done).values())
    _push(engine, tiny_policy(seed=2).state, 2)
    done = run_engine(engine, requests, fixed_plan("w4", 3))
    assert all(drafted > 0 for drafted, _ in _drafts_kept(done).values())
