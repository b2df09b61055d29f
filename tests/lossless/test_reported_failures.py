"""Failures users reported of other rollout systems, each as what it claims never happens here.

Ids in comments name the retold report. Nearly all run on a float64 tiny policy, so no
near-tie is an excuse; the long one runs the compiled kernels.
"""

import math
import random
from dataclasses import replace

import pytest
import torch

from controller.types import RoundLoad, RoundPlan
from drafters.testing import ScriptedDrafter
from drafters.types import DraftRequest
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.errors import (
    DuplicateRequestError,
    EmptyPromptError,
    PromptTooLongError,
    SamplingParamsError,
    TokenRangeError,
)
from rollout.testing import PAD_ID, TinyPolicy, tiny_policy
from rollout.testing_native import (
    ar_plan,
    fixed_plan,
    random_plan,
    requests_for,
    run_engine,
    text_of,
    texts,
    tiny_engine,
)
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def _request(
    policy: TinyPolicy, params: SamplingParams = GREEDY, *, length: int = 12, seed: int = 1
) -> Request:
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(3, policy.spec.vocab_size) for _ in range(length))
    return Request(prompt_uid=f"u{seed}", sample_index=0, prompt_ids=prompt, params=params, seed=seed)


def _alone(policy: TinyPolicy, request: Request) -> Completion:
    return run_engine(tiny_engine(policy), [request], ar_plan)[request.key]


def _foreseeing(continuation: tuple[int, ...]) -> ScriptedDrafter:
    """A drafter that is always right about one known continuation."""

    def script(request: DraftRequest) -> list[int]:
        at = len(request.tokens) - request.prompt_tokens
        return list(continuation[at : at + request.gamma])

    return ScriptedDrafter(script=script)


def _speculative(policy: TinyPolicy, request: Request, oracle: tuple[int, ...], gamma: int) -> Completion:
    drafter = _foreseeing(oracle)
    engine = tiny_engine(policy, [drafter])
    return run_engine(engine, [request], fixed_plan(drafter.name, gamma))[request.key]


@pytest.mark.parametrize("gamma", range(1, 9))
def test_an_end_token_inside_a_verified_block_ends_the_text_there(gamma: int) -> None:  # A1
    policy = tiny_policy()
    free = _alone(policy, _request(policy))
    stopping = _request(policy, replace(GREEDY, stop_ids=(free.token_ids[3],)))
    plain = _alone(policy, stopping)
    assert len(plain.token_ids) == free.token_ids.index(free.token_ids[3]) + 1
    fast = _speculative(policy, stopping, free.token_ids, gamma)
    assert text_of(fast) == text_of(plain)
    assert fast.finish_reason == "stop"
    assert fast.provenance is not None
    assert fast.provenance.accepted <= len(fast.token_ids)


@pytest.mark.parametrize("gamma", [1, 5, 8])
def test_a_stop_string_inside_a_verified_block_cuts_ids_text_and_logprobs_alike(gamma: int) -> None:  # A2
    policy = tiny_policy()
    free = _alone(policy, _request(policy))
    assert free.text is not None
    stop = free.text[2:4]
    assert len(stop) == 2
    stopping = _request(policy, replace(GREEDY, stop=(stop,)))
    plain = _alone(policy, stopping)
    fast = _speculative(policy, stopping, free.token_ids, gamma)
    assert text_of(fast) == text_of(plain)
    assert fast.text == free.text[: free.text.index(stop)]
    assert len(fast.token_ids) < len(free.token_ids)
    engine = tiny_engine(policy, [_foreseeing(free.token_ids)])
    engine.add(stopping)
    streamed = []
    while engine.busy:
        outcome = engine.run_round(fixed_plan("scripted", gamma)(engine.load()))
        streamed += [t for emission in outcome.emissions for t in emission.tokens]
    assert tuple(streamed) == fast.tokens, "a stream ends where the batch does"


def test_the_context_limit_is_the_callers_whatever_gamma_reserves() -> None:  # A3
    policy = tiny_policy()
    context, gamma = 64, 5
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    config = EngineConfig(max_batch=8, max_context_tokens=context)
    lengths = range(context - gamma - 1, context)
    requests = [_request(policy, params, length=n, seed=n) for n in lengths]
    neighbour = _request(policy, seed=500)
    outcomes = []
    for plan in (ar_plan, fixed_plan("scripted", gamma)):
        engine = tiny_engine(policy, [ScriptedDrafter(script=lambda r: [3] * r.gamma)], config=config)
        with pytest.raises(PromptTooLongError):
            engine.add(_request(policy, params, length=context, seed=999))
        outcomes.append(texts(run_engine(engine, [*requests, neighbour], plan)))
    assert outcomes[0] == outcomes[1]
    for request in requests:
        text = outcomes[0][request.key]
        assert len(text.ids) == context - len(request.prompt_ids)
        assert text.finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt_ids": ()}, EmptyPromptError),
        ({"prompt_ids": (3,) * 200}, PromptTooLongError),
        ({"prompt_ids": (3, 48)}, TokenRangeError),
        ({"prompt_ids": (3, -1)}, TokenRangeError),
    ],
)
def test_a_bad_item_is_refused_alone(
    change: dict[str, tuple[int, ...]], error: type[Exception]
) -> None:  # A4
    policy = tiny_policy()
    only_pads = replace(_request(policy), prompt_uid="pads", prompt_ids=(PAD_ID,) * 4)
    good = [*requests_for(vocab=48, prompts=6), only_pads]
    engine = tiny_engine(policy)
    for request in good[:3]:
        engine.add(request)
    with pytest.raises(error):
        engine.add(replace(_request(policy), **change))  # type: ignore[arg-type]
    done = _drain(engine, good[3:])
    assert texts(done) == {r.key: text_of(_alone(policy, r)) for r in good}


def _drain(engine: NativeEngine, more: list[Request]) -> dict[tuple[str, int], Completion]:
    for request in more:
        engine.add(request)
    done: dict[tuple[str, int], Completion] = {}
    while engine.busy:
        for completion in engine.run_round(ar_plan(engine.load())).completions:
            done[(completion.prompt_uid, completion.sample_index)] = completion
    return done


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"temprature": 1.0}, "temprature"),
    ],
)
def test_a_parameter_that_means_nothing_is_named(values: dict[str, float], name: str) -> None:
    with pytest.raises(SamplingParamsError, match=name):
        SamplingParams.from_mapping(values)


def test_a_live_id_is_refused_and_the_first_request_goes_on() -> None:  # A19
    policy = tiny_policy()
    request = _request(policy)
    engine = tiny_engine(policy)
    engine.add(request)
    with pytest.raises(DuplicateRequestError):
        engine.add(request)
    assert text_of(_drain(engine, [])[request.key]) == text_of(_alone(policy, request))


class _PoisonedDecoder:
    """A real decoder whose logits turn to NaN for one page table row at one position."""

    def __init__(self, inner: object, *, position: int, token: int) -> None:
        self._inner = inner
        self._position = position
        self._token = token

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def forward(self, batch, kv, **more):  # type: ignore[no-untyped-def]
        result = self._inner.forward(batch, kv, **more)  # type: ignore[attr-defined]
        heads = batch.head_rows_R.long()
        first = batch.page_table_SP[batch.table_M[heads].long(), 0]
        hit = (batch.positions_M[heads] == self._position) & (first == self._token)
        result.logits_RV[hit] = math.nan
        return result


@pytest.mark.parametrize("position", [11, 12, 15, 18])
@pytest.mark.parametrize("gamma", [0, 4])
def test_nan_logits_fail_their_request_at_once_and_no_other(gamma: int, position: int) -> None:  # A8
    policy = tiny_policy()
    requests = [_request(policy, seed=s) for s in (1, 2, 3)]
    clean = {r.key: text_of(_alone(policy, r)) for r in requests}
    drafter = ScriptedDrafter(script=lambda r: [3] * r.gamma)
    engine = tiny_engine(policy, [drafter], config=EngineConfig(max_batch=8, prefix_cache=False))
    victim_page = engine._scheduler.pool._free[0]  # the first page handed out goes to the first request
    engine._decoder = _PoisonedDecoder(engine._decoder, position=position, token=victim_page)  # type: ignore[assignment]
    plan = fixed_plan(drafter.name, gamma) if gamma else ar_plan
    done = run_engine(engine, requests, plan)
    victim = done[requests[0].key]
    assert victim.finish_reason == "failed"
    assert victim.error is not None
    assert victim.error.startswith("NumericError")
    assert victim.token_ids == clean[requests[0].key].ids[: position - 11]
    assert victim.provenance is not None
    assert 0 <= victim.provenance.accepted <= victim.provenance.drafted
    for request in requests[1:]:
        assert text_of(done[request.key]) == clean[request.key]


@pytest.mark.parametrize("gamma", [1, 5])
def test_rules_that_count_tokens_count_committed_ones(gamma: int) -> None:  # A9
    policy = tiny_policy()
    free = _alone(policy, _request(policy))
    early = free.token_ids[1]
    for params in (
        replace(GREEDY, min_tokens=6, stop_ids=(early,)),
        replace(GREEDY, frequency_penalty=1.5, presence_penalty=0.5),
        replace(GREEDY, repetition_penalty=1.7),
        SamplingParams(max_tokens=24, frequency_penalty=1.0, min_tokens=6, stop_ids=(early,)),
    ):
        request = _request(policy, params)
        plain = _alone(policy, request)
        assert text_of(_speculative(policy, request, plain.token_ids, gamma)) == text_of(plain)
        if params.min_tokens:
            assert early not in plain.token_ids[:6]


def test_a_banned_token_is_never_emitted_however_often_it_is_drafted() -> None:  # A10
    policy = tiny_policy()
    banned = _alone(policy, _request(policy)).token_ids[0]
    params = SamplingParams(max_tokens=24, min_p=0.05, logit_bias={banned: -math.inf}, ignore_eos=True)
    request = _request(policy, params)
    fast = _speculative(policy, request, (banned,) * 64, 4)
    assert banned not in fast.token_ids
    assert text_of(fast) == text_of(_alone(policy, request))


def test_a_seeded_request_does_not_see_its_neighbours() -> None:  # A11
    policy = tiny_policy()
    ours = _request(policy, SamplingParams(max_tokens=16), seed=7)
    alone = text_of(_alone(policy, ours))
    neighbours = requests_for(
        vocab=48,
        prompts=6,
        params=[SamplingParams(max_tokens=16), SamplingParams(max_tokens=9, temperature=0.0)],
    )
    for order in range(3):
        mixed = [*neighbours, ours]
        random.Random(order).shuffle(mixed)
        plan = random_plan(["scripted"], max_gamma=3, seed=order)
        engine = tiny_engine(policy, [ScriptedDrafter(script=lambda r: [4] * r.gamma)])
        assert text_of(run_engine(engine, mixed, plan)[ours.key]) == alone


def test_every_logprob_is_the_target_distributions_own() -> None:  # A12
    policy = tiny_policy()
    request = _request(policy, SamplingParams(max_tokens=24, ignore_eos=True))
    plain = _alone(policy, request)
    mostly_right = tuple(t if i % 7 else 3 for i, t in enumerate(plain.token_ids))
    fast = _speculative(policy, request, mostly_right, 4)
    assert text_of(fast) == text_of(plain)
    assert {t.origin for t in fast.tokens} == {"plain", "accepted", "corrected", "bonus"}
    assert all(t.target_logprob < 0 for t in fast.tokens)
    assert all(t.raw_logprob == t.scaled_logprob == t.target_logprob for t in fast.tokens)


def test_two_prompts_admitted_together_never_read_unwritten_pages() -> None:  # A16
    policy = tiny_policy()
    long = _request(policy, SamplingParams(max_tokens=10), length=50, seed=4)
    twin = replace(long, prompt_uid="twin", seed=44)
    head = replace(long, prompt_uid="head", seed=45, prompt_ids=long.prompt_ids[:33])
    requests = [long, twin, head]
    cold = {r.key: text_of(_alone(policy, r)) for r in requests}
    for chunk in (5, 512):
        config = EngineConfig(max_batch=8, max_context_tokens=128, prefill_chunk_tokens=chunk)
        assert texts(run_engine(tiny_engine(policy, config=config), requests, ar_plan)) == cold


def test_nothing_is_drafted_for_a_prompt_that_is_partly_computed() -> None:  # A18
    policy = tiny_policy()
    seen: list[int] = []

    def script(request: DraftRequest) -> list[int]:
        seen.append(len(request.tokens) - request.prompt_tokens)
        return [3] * request.gamma

    config = EngineConfig(max_batch=8, max_context_tokens=128, prefill_chunk_tokens=3)
    requests = [_request(policy, seed=s, length=4) for s in (1, 2, 3)]
    requests.append(_request(policy, seed=9, length=60))
    engine = tiny_engine(policy, [ScriptedDrafter(script=script)], config=config)
    done = run_engine(engine, requests, fixed_plan("scripted", 3))
    assert texts(done) == {r.key: text_of(_alone(policy, r)) for r in requests}
    assert min(seen) >= 1


@pytest.mark.parametrize("rounds", range(6))
def test_an_abort_in_any_state_gives_everything_back(rounds: int) -> None:  # A20
    policy = tiny_policy()
    config = EngineConfig(max_batch=2, max_context_tokens=128, prefill_chunk_tokens=8, prefix_cache=False)
    engine = tiny_engine(policy, [ScriptedDrafter(script=lambda r: [3] * r.gamma)], config=config)
    requests = [_request(policy, seed=s, length=30) for s in (1, 2, 3)]
    for request in requests:
        engine.add(request)
    for _ in range(rounds):
        engine.run_round(fixed_plan("scripted", 2)(engine.load()))
    ended = [engine.abort(r.key) for r in requests]
    assert all(c is not None and c.finish_reason == "aborted" for c in ended)
    assert [engine.abort(r.key) for r in requests] == [None, None, None]
    assert not engine.busy
    assert engine.gauges()["engine/kv_pages_used"] == 0


def test_old_pages_never_answer_for_new_weights() -> None:  # A24
    first, second = tiny_policy(seed=0), tiny_policy(seed=1)
    request = _request(first, SamplingParams(max_tokens=8), length=50)
    engine = tiny_engine(first)
    run_engine(engine, [request], ar_plan)
    _push(engine, second, version=1)
    before = engine.gauges()["engine/prefix_hit_tokens"]
    updated = run_engine(engine, [request], ar_plan)[request.key]
    assert engine.gauges()["engine/prefix_hit_tokens"] == before
    assert text_of(updated) == text_of(_alone(second, request))
    assert {t.policy_version for t in updated.tokens} == {1}


def _push(engine: NativeEngine, policy: TinyPolicy, *, version: int, in_flight: str = "drain") -> None:
    from rollout.policy.weights import manifest

    engine.begin_update(manifest(policy.state, version), in_flight=in_flight)  # type: ignore[arg-type]
    engine.stage(policy.state.items())
    engine.settle_running()
    engine.commit_update()


@pytest.mark.parametrize("in_flight", ["abort", "recompute", "keep"])
def test_an_update_lands_between_rounds_and_every_token_names_its_version(in_flight: str) -> None:  # A28
    first, second = tiny_policy(seed=0), tiny_policy(seed=1)
    requests = [_request(first, SamplingParams(max_tokens=20, ignore_eos=True), seed=s) for s in (1, 2)]
    engine = tiny_engine(first, [ScriptedDrafter(script=lambda r: [3] * r.gamma)])
    done: dict[tuple[str, int], Completion] = {}
    for request in requests:
        engine.add(request)
    plan = fixed_plan("scripted", 2)
    for _ in range(6):
        engine.run_round(plan(engine.load()))
    from rollout.policy.weights import manifest

    engine.begin_update(manifest(second.state, 5), in_flight=in_flight)  # type: ignore[arg-type]
    engine.run_round(plan(engine.load()))
    engine.stage(second.state.items())
    for completion in engine.settle_running():
        done[(completion.prompt_uid, completion.sample_index)] = completion
    assert engine.commit_update() == 5
    while engine.busy:
        for completion in engine.run_round(plan(engine.load())).completions:
            done[(completion.prompt_uid, completion.sample_index)] = completion
    for request in requests:
        versions = [t.policy_version for t in done[request.key].tokens]
        assert versions == sorted(versions)
        assert set(versions) == ({0} if in_flight == "abort" else {0, 5})
        assert all(math.isfinite(t.target_logprob) for t in done[request.key].tokens)
        if in_flight == "recompute":
            cut = versions.count(0)
            resumed = replace(request, prefix_ids=done[request.key].token_ids[:cut], attempt=1)
            fresh = run_engine(tiny_engine(second), [resumed], ar_plan)[request.key]
            assert text_of(fresh).logprobs == text_of(done[request.key]).logprobs[cut:]


def test_logprobs_do_not_drift_over_a_long_uptime() -> None:  # A14
    policy = tiny_policy()
    config = EngineConfig(max_batch=4, max_context_tokens=96, kv_tokens=8 * 16)
    drafter = ScriptedDrafter(script=lambda r: [3] * r.gamma)
    engine = tiny_engine(policy, [drafter], config=config, compiled=True)
    request = _request(policy, SamplingParams(max_tokens=12, ignore_eos=True), length=36)
    first = text_of(run_engine(engine, [request], ar_plan)[request.key])
    fingerprint = engine.fingerprint
    for lap in range(23):
        others = requests_for(
            vocab=48, prompts=5, seed=lap, params=[SamplingParams(max_tokens=10, ignore_eos=True)]
        )
        twin = replace(request, sample_index=1, seed=lap)
        order = [*others, request, twin] if lap % 2 else [request, twin, *others]
        done = run_engine(engine, order, random_plan(["scripted"], max_gamma=3, seed=lap))
        assert text_of(done[request.key]) == first
    gauges = engine.gauges()
    assert engine.load().round_index >= 500
    assert gauges["engine/preemptions"] > 0
    assert gauges["engine/prefix_hit_tokens"] > 0
    assert engine.fingerprint == fingerprint


def test_a_round_without_progress_is_an_error_not_a_wait() -> None:
    policy = tiny_policy()
    engine = tiny_engine(policy)
    engine.add(_request(policy))
    engine.load()
    engine.run_round(RoundPlan(assignments={}, reason="prefill"))

    class _Silent:
        def judge(self, work, logits_RV):  # type: ignore[no-untyped-def]
            from rollout.engine.native.judging import Verdict

            return [Verdict(accepted=0, tokens=()) for _ in work.choosing]

    from rollout.errors import NoProgressError

    engine._judge = _Silent()  # type: ignore[assignment]
    load: RoundLoad = engine.load()
    assert load.sequences
    with pytest.raises(NoProgressError):
        engine.run_round(ar_plan(load))


def test_padded_vocabulary_ids_from_a_drafter_are_a_failure_not_a_crash() -> None:  # A21
    policy = tiny_policy()
    request = _request(policy)
    for bad in (48, -1, 10**9):
        engine = tiny_engine(policy, [ScriptedDrafter(script=lambda r, t=bad: [t] * r.gamma)])
        done = run_engine(engine, [request], fixed_plan("scripted", 2))
        assert text_of(done[request.key]) == text_of(_alone(policy, request))
        assert engine.gauges()["drafter/scripted_failures"] > 0
    assert torch.isfinite(torch.tensor([t.target_logprob for t in _alone(policy, request).tokens])).all()
