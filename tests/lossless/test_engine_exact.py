"""Same seed, same text: whatever speculation, batch, chunking or preemption did.

Float64 torch first, where no near-tie can be an excuse, then the compiled kernels. Every comparison is
equality of ids and of all four logprobs.
"""

from collections.abc import Sequence

import pytest
import torch

from drafters.config import DrafterConfig
from drafters.registry import build, names_for
from drafters.testing import FailingDrafter, ScriptedDrafter
from drafters.types import Drafter, DraftRequest
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.testing import TinyPolicy, tiny_policy
from rollout.testing_native import (
    MIXED_PARAMS,
    Text,
    ar_plan,
    fixed_plan,
    random_plan,
    requests_for,
    run_engine,
    text_of,
    texts,
    tiny_engine,
)
from rollout.tracking.reduce import RolloutPool
from rollout.types import Request, SamplingParams

pytestmark = pytest.mark.lossless

DENSE, LOOPED = names_for(1), names_for(4)
"""Drafters of a policy whose block runs once, and of one that runs it four times."""

KINDS = [pytest.param(False, id="float64"), pytest.param(True, id="compiled")]


def _drafters(compiled: bool) -> list[Drafter]:
    config = DrafterConfig(w4_kernel="auto" if compiled else "torch")
    return [build(name, config) for name in LOOPED]


def _engine(
    policy: TinyPolicy, compiled: bool, *, drafters: bool = True, **config: int | bool
) -> NativeEngine:
    settings = EngineConfig(**{"max_batch": 8, "max_context_tokens": 128, **config})  # type: ignore[arg-type]
    return tiny_engine(policy, _drafters(compiled) if drafters else (), compiled=compiled, config=settings)


def _requests(policy: TinyPolicy, count: int = 8) -> list[Request]:
    return requests_for(vocab=policy.spec.vocab_size, prompts=count, params=MIXED_PARAMS, seed=3)


def _plain(policy: TinyPolicy, compiled: bool, requests: list[Request]) -> dict[tuple[str, int], Text]:
    """Each request alone, without speculation: the definition of its text."""
    out: dict[tuple[str, int], Text] = {}
    engine = _engine(policy, compiled, drafters=False)
    for request in requests:
        out.update(texts(run_engine(engine, [request], ar_plan)))
    return out


@pytest.mark.parametrize("compiled", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "ouro"])
def test_batch_mates_do_not_change_a_text(family: str, compiled: bool) -> None:
    policy = tiny_policy(family=family)
    requests = _requests(policy)
    alone = _plain(policy, compiled, requests)
    assert len({t.ids for t in alone.values()}) > 4
    together = texts(run_engine(_engine(policy, compiled), requests, ar_plan))
    backwards = texts(run_engine(_engine(policy, compiled), reversed(requests), ar_plan))
    assert together == alone
    assert backwards == alone


@pytest.mark.parametrize("compiled", KINDS)
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_every_drafter_and_gamma_gives_the_text_of_plain_decoding(
    name: str, gamma: int, compiled: bool
) -> None:
    """A7: for every drafter a dense policy can have, also in the compiled kernels."""
    policy = tiny_policy(family="smollm2")
    requests = _requests(policy)
    engine = _engine(policy, compiled)
    done = run_engine(engine, requests, fixed_plan(name, gamma))
    assert texts(done) == _plain(policy, compiled, requests)
    assert sum(c.provenance.drafted for c in done.values() if c.provenance) > 0 or name == "history"


@pytest.mark.parametrize("kernel", ["auto", "compiled", "int8"])
def test_texts_are_those_of_plain_decoding_whatever_kernel_drafts(kernel: str) -> None:
    """In the torch decoder, where ``auto`` takes what this machine's timings say."""
    policy = tiny_policy(family="smollm2")
    requests = _requests(policy)
    drafter = build("w4", DrafterConfig(w4_kernel=kernel))  # type: ignore[arg-type]
    done = run_engine(tiny_engine(policy, [drafter]), requests, fixed_plan("w4", 3))
    assert texts(done) == _plain(policy, False, requests)
    assert sum(c.provenance.drafted for c in done.values() if c.provenance) > 0


@pytest.mark.parametrize("compiled", KINDS)
@pytest.mark.parametrize("name", LOOPED)
def test_a_looped_policy_gives_the_text_of_plain_decoding_with_every_drafter(
    name: str, compiled: bool
) -> None:
    policy = tiny_policy(family="ouro")
    requests = _requests(policy)
    done = run_engine(_engine(policy, compiled), requests, fixed_plan(name, 3))
    assert texts(done) == _plain(policy, compiled, requests)
    assert sum(c.provenance.drafted for c in done.values() if c.provenance) > 0 or name == "history"


@pytest.mark.parametrize("name", sorted(set(LOOPED) - set(DENSE)))
def test_a_policy_whose_block_runs_once_has_drafters_made_of_loops_off_and_decodes_plainly(name: str) -> None:
    policy = tiny_policy()
    requests = _requests(policy)[:3]
    engine = _engine(policy, False)
    assert name not in engine.drafter_versions()
    assert name not in [d.name for d in engine.traits.drafters]
    reason = engine._drafting.slots[name].last_error
    assert reason.startswith(name)
    assert "loops" in reason
    done = run_engine(engine, requests, fixed_plan(name, 3))
    assert texts(done) == _plain(policy, False, requests)
    assert sum(c.provenance.drafted for c in done.values() if c.provenance) == 0


@pytest.mark.parametrize("compiled", KINDS)
def test_changing_drafter_and_gamma_every_round_changes_nothing(compiled: bool) -> None:
    policy = tiny_policy()
    requests = _requests(policy, 16)
    plan = random_plan(DENSE, max_gamma=6, seed=5)
    assert texts(run_engine(_engine(policy, compiled), requests, plan)) == _plain(policy, compiled, requests)


@pytest.mark.parametrize("compiled", KINDS)
def test_a_chunked_prompt_gives_the_text_of_a_whole_one(compiled: bool) -> None:
    policy = tiny_policy()
    requests = _requests(policy)
    plain = _plain(policy, compiled, requests)
    for chunk in (1, 3, 17):
        engine = _engine(policy, compiled, prefill_chunk_tokens=chunk)
        assert texts(run_engine(engine, requests, random_plan(["w4"], max_gamma=4, seed=1))) == plain


@pytest.mark.parametrize("compiled", KINDS)
def test_samples_share_prompt_pages_and_texts_do_not_notice(compiled: bool) -> None:
    policy = tiny_policy()
    requests = requests_for(
        vocab=48, prompts=2, samples=6, params=[SamplingParams(max_tokens=12)], seed=8, longest_prompt=60
    )
    requests = [r for r in requests if len(r.prompt_ids) > 17]
    assert requests
    engine = _engine(policy, compiled)
    assert texts(run_engine(engine, requests, ar_plan)) == _plain(policy, compiled, requests)
    assert engine.gauges()["engine/prefix_hit_tokens"] > 0
    cold = _engine(policy, compiled, prefix_cache=False)
    assert texts(run_engine(cold, requests, ar_plan)) == _plain(policy, compiled, requests)


@pytest.mark.parametrize("compiled", KINDS)
def test_preemption_between_rounds_changes_nothing_and_leaks_no_page(compiled: bool) -> None:
    policy = tiny_policy()
    requests = _requests(policy)
    engine = _engine(policy, compiled, kv_tokens=9 * 16, max_batch=6)
    done = run_engine(engine, requests, fixed_plan("w4", 4))
    assert texts(done) == _plain(policy, compiled, requests)
    gauges = engine.gauges()
    assert gauges["engine/preemptions"] > 0
    engine.close()
    assert engine.gauges()["engine/kv_pages_used"] == 0


@pytest.mark.parametrize("settings", [{}, {"kv_tokens": 9 * 16, "max_batch": 6}], ids=["roomy", "preempted"])
def test_rounds_tell_every_token_once_and_acceptance_counts_decoded_ones_alone(
    settings: dict[str, int],
) -> None:
    policy = tiny_policy()
    engine = _engine(policy, False, **settings)
    for request in _requests(policy):
        engine.add(request)
    pool, delivered, plan = RolloutPool(), 0, fixed_plan("w4", 4)
    while engine.busy:
        outcome = engine.run_round(plan(engine.load()))
        pool.add_round(outcome.facts)
        pool.add_completions(outcome.completions)
        delivered += sum(len(c.tokens) for c in outcome.completions)
        assert outcome.facts.committed == sum(len(e.tokens) for e in outcome.emissions)
        assert outcome.facts.decoded == sum(o.committed for o in outcome.facts.outcomes)
    metrics = pool.metrics(wall_s=2.0)
    assert (engine.gauges()["engine/preemptions"] > 0) == bool(settings)
    assert metrics["rollout/tokens"] == metrics["rollout/committed_tokens"] == delivered
    assert metrics["rollout/tokens_per_s"] == delivered / 2.0
    blocks = pool.acceptance.drafts
    assert metrics["rollout/spec_accept_length"] == 1 + pool.acceptance.accepted / blocks


def test_a_resumed_prefix_continues_the_same_noise() -> None:
    policy = tiny_policy()
    for request in _requests(policy):
        whole = run_engine(_engine(policy, False), [request], ar_plan)[request.key]
        cut = len(whole.token_ids) // 2
        if cut == 0:
            continue
        resumed = Request(
            prompt_uid=request.prompt_uid,
            sample_index=request.sample_index,
            prompt_ids=request.prompt_ids,
            params=request.params,
            seed=request.seed,
            attempt=1,
            prefix_ids=whole.token_ids[:cut],
        )
        rest = run_engine(_engine(policy, False), [resumed], fixed_plan("w4", 3))[request.key]
        assert rest.tokens
        assert text_of(rest).logprobs == text_of(whole).logprobs[cut:]
        assert rest.token_ids == whole.token_ids[cut:]
        assert rest.text == whole.text


@pytest.mark.parametrize("compiled", KINDS)
def test_gamma_zero_never_runs_a_drafter(compiled: bool) -> None:
    policy = tiny_policy()
    failing = FailingDrafter()
    engine = tiny_engine(policy, [failing], compiled=compiled)
    run_engine(engine, _requests(policy), ar_plan)
    assert engine.gauges()[f"drafter/{failing.name}_failures"] == 0


def test_a_failing_drafter_costs_time_only_and_is_switched_off() -> None:
    policy = tiny_policy()
    requests = _requests(policy)
    failing = FailingDrafter()
    engine = tiny_engine(policy, [failing])
    assert texts(run_engine(engine, requests, fixed_plan(failing.name, 3))) == _plain(policy, False, requests)
    gauges = engine.gauges()
    assert gauges[f"drafter/{failing.name}_failures"] > 0
    assert gauges[f"drafter/{failing.name}_enabled"] == 0
    assert failing.name not in [d.name for d in engine.traits.drafters]


def test_the_policy_as_its_own_drafter_is_always_right() -> None:
    """A15, A22: also from the first round after a spell of plain decoding."""
    policy = tiny_policy()
    requests = _requests(policy)
    plain = run_engine(_engine(policy, False, drafters=False), requests, ar_plan)
    oracle = {key: list(c.token_ids) for key, c in plain.items()}
    by_uid = {r.prompt_uid: r for r in requests}

    def foresee(request: object) -> list[int]:
        uid = request.prompt_uid  # type: ignore[attr-defined]
        at = len(request.tokens) - request.prompt_tokens  # type: ignore[attr-defined]
        return oracle[by_uid[uid].key][at : at + request.gamma]  # type: ignore[attr-defined]

    drafter = ScriptedDrafter(script=foresee)
    engine = tiny_engine(policy, [drafter])
    for request in requests:
        engine.add(request)
    rounds = 0
    while engine.busy:
        load = engine.load()
        rounds += 1
        plan = ar_plan(load) if rounds % 7 < 3 else fixed_plan(drafter.name, 4)(load)
        for outcome in engine.run_round(plan).facts.outcomes:
            assert outcome.accepted == outcome.gamma or outcome.censored


def test_drafters_are_asked_what_they_have_ready_only_where_somebody_wants_to_know() -> None:
    policy = tiny_policy()
    drafter = ScriptedDrafter(script=lambda request: [1] * request.gamma)
    asked: list[int] = []

    def ready(requests: Sequence[DraftRequest]) -> list[int]:
        asked.append(len(requests))
        return [100] * len(requests)

    drafter.ready = ready  # type: ignore[method-assign,assignment]
    engine = tiny_engine(policy, [drafter])
    for request in _requests(policy)[:3]:
        engine.add(request)
    while not engine.load(look_up=lambda load: False).sequences:
        engine.run_round(ar_plan(engine.load()))
    assert asked == []
    blind = engine.load(look_up=lambda load: False)
    seen = engine.load(look_up=lambda load: load == blind)
    assert [dict(s.history_match_tokens) for s in blind.sequences] == [{}] * len(blind.sequences)
    assert asked == [len(blind.sequences)]
    room = [min(drafter.max_gamma, s.remaining_tokens - 1) for s in seen.sequences]
    assert [s.history_match_tokens["scripted"] for s in seen.sequences] == room


def test_a_completion_counts_the_accepted_drafts_of_its_last_round_too() -> None:
    policy = tiny_policy()
    done = run_engine(_engine(policy, False), _requests(policy), fixed_plan("w4", 4))
    counted = {key: c.provenance.accepted for key, c in done.items() if c.provenance is not None}
    assert counted == {key: sum(t.origin == "accepted" for t in c.tokens) for key, c in done.items()}
    assert any(c.tokens[-1].origin == "accepted" for c in done.values())


@pytest.mark.parametrize("compiled", KINDS)
def test_logprobs_are_those_of_a_teacher_forced_forward(compiled: bool) -> None:
    policy = tiny_policy()
    engine = _engine(policy, compiled)
    done = run_engine(engine, _requests(policy), fixed_plan("w4", 4))
    reference = tiny_engine(policy, compiled=compiled)
    exact = tiny_engine(policy)
    tolerance = 5e-2 if compiled else 1e-9  # compiled keeps keys and values in bfloat16
    for completion in done.values():
        request = next(r for r in _requests(policy) if r.prompt_uid == completion.prompt_uid)
        forced = Request(
            prompt_uid="forced",
            sample_index=0,
            prompt_ids=request.prompt_ids + completion.token_ids[:-1],
            params=SamplingParams(max_tokens=1, temperature=0.0, logit_bias={completion.token_ids[-1]: 1e4}),
            seed=0,
        )
        last = run_engine(reference, [forced], ar_plan)[("forced", 0)].tokens[-1]
        assert last.token_id == completion.token_ids[-1]
        assert last.raw_logprob == completion.tokens[-1].raw_logprob
        in_float64 = run_engine(exact, [forced], ar_plan)[("forced", 0)].tokens[-1]
        assert abs(in_float64.raw_logprob - last.raw_logprob) < tolerance
        assert torch.isfinite(torch.tensor([t.target_logprob for t in completion.tokens])).all()
