"""A looped policy drafts with its own first loops, and verification goes on from what they computed.

Equality of ids, of all four logprobs and, after every round, of every key and value on every plane.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
from torch import Tensor

from controller.types import AR, RoundFacts, RoundPlan
from drafters.config import DrafterConfig
from drafters.registry import build, shallow_loops
from drafters.types import Drafter, DraftError, DraftModel, DraftRequest, DraftStep, PolicyView, Proposal
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.policy.weights import manifest
from rollout.testing import TinyPolicy, tiny_looped_policy
from rollout.testing_looped import CountingDecoder
from rollout.testing_native import (
    MIXED_PARAMS,
    Text,
    ar_plan,
    fixed_plan,
    random_plan,
    requests_for,
    run_engine,
    texts,
    tiny_decoder,
    tiny_engine,
)
from rollout.testing_planes import planes_of, same_bits
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless

LOOPS = 4
DEPTHS = (1, 2, 3)
NAMES = shallow_loops(LOOPS)
KINDS = [pytest.param(False, id="float64"), pytest.param(True, id="compiled")]
GREEDY = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=14, ignore_eos=True)

Texts = dict[tuple[str, int], Text]


def drafters_of(names: Sequence[str], compiled: bool) -> list[Drafter]:
    config = DrafterConfig(w4_kernel="auto" if compiled else "torch")
    return [build(name, config) for name in names]


def engine_of(
    policy: TinyPolicy,
    drafters: Sequence[Drafter] = (),
    *,
    compiled: bool = False,
    counting: CountingDecoder | None = None,
    **config: int | str | bool,
) -> NativeEngine:
    settings = EngineConfig(**{"max_batch": 8, "max_context_tokens": 128, **config})  # type: ignore[arg-type]
    return tiny_engine(policy, drafters, compiled=compiled, config=settings, decoder=counting)


def plain(policy: TinyPolicy, requests: Sequence[Request], *, compiled: bool = False) -> Texts:
    """Each request alone and without speculation: the definition of its text."""
    out: Texts = {}
    engine = engine_of(policy, compiled=compiled)
    for request in requests:
        out.update(texts(run_engine(engine, [request], ar_plan)))
    return out


# ---- native and speculative are one text --------------------------------------------------------


@pytest.fixture(scope="module")
def small_batch() -> tuple[TinyPolicy, list[Request], Mapping[bool, Texts]]:
    """A policy, ragged prompts under every kind of params, and their texts in both decoders."""
    policy = tiny_looped_policy(loops=LOOPS)
    requests = requests_for(vocab=48, prompts=len(MIXED_PARAMS), params=MIXED_PARAMS, seed=3)
    both = {compiled: plain(policy, requests, compiled=compiled) for compiled in (False, True)}
    assert len({t.ids for t in both[True].values()}) > 4
    return policy, requests, both


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_native_and_speculative_are_one_text(
    depth: int, gamma: int, small_batch: tuple[TinyPolicy, list[Request], Mapping[bool, Texts]]
) -> None:
    policy, requests, both = small_batch
    name = f"shallow_loop_{depth}"
    for compiled in (True, False) if gamma == 4 else (True,):
        engine = engine_of(policy, drafters_of([name], compiled), compiled=compiled)
        done = run_engine(engine, requests, fixed_plan(name, gamma))
        assert texts(done) == both[compiled]
        drafted = sum(c.provenance.drafted for c in done.values() if c.provenance)
        accepted = sum(c.provenance.accepted for c in done.values() if c.provenance)
        assert 0 < accepted < drafted
        # One row per draft is fed to draft the next, and all of those are gone on from.
        assert engine.gauges()["engine/reused_row_loops"] == depth * drafted


@pytest.mark.parametrize("depth", [4, 6])
def test_a_deep_policy_has_a_draft_for_every_depth_below_its_own(depth: int) -> None:
    policy, name = tiny_looped_policy(loops=7, layers=1), f"shallow_loop_{depth}"
    requests = requests_for(vocab=48, prompts=4, params=MIXED_PARAMS, seed=3)
    engine = engine_of(policy, drafters_of([name], True), compiled=True)
    done = run_engine(engine, requests, fixed_plan(name, 3))
    assert texts(done) == plain(policy, requests, compiled=True)
    drafted = sum(c.provenance.drafted for c in done.values() if c.provenance)
    assert engine.gauges()["engine/reused_row_loops"] == depth * drafted > 0


def test_deeper_loops_draft_better(
    small_batch: tuple[TinyPolicy, list[Request], Mapping[bool, Texts]],
) -> None:
    policy, requests, _ = small_batch
    accepted = []
    for name in NAMES:
        done = run_engine(
            engine_of(policy, drafters_of([name], True), compiled=True), requests, fixed_plan(name, 4)
        )
        origins = Counter(t.origin for c in done.values() for t in c.tokens)
        accepted.append(origins["accepted"] / origins.total())
    assert accepted == sorted(accepted)
    assert accepted[0] < accepted[-1]


@pytest.mark.parametrize(("loops", "depth"), [(2, 1), (3, 1), (3, 2), (6, 1), (6, 3)])
def test_a_policy_of_other_loops_gives_the_text_of_plain_decoding(loops: int, depth: int) -> None:
    policy, name = tiny_looped_policy(seed=loops, loops=loops), f"shallow_loop_{depth}"
    requests = requests_for(vocab=48, prompts=len(MIXED_PARAMS), params=MIXED_PARAMS, seed=depth)
    done = run_engine(
        engine_of(policy, drafters_of([name], True), compiled=True), requests, fixed_plan(name, 4)
    )
    assert texts(done) == plain(policy, requests, compiled=True)
    assert any(t.origin == "accepted" for c in done.values() for t in c.tokens)


@pytest.mark.parametrize("verify", ["block", "token"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_greedy_text_is_one_in_every_verification_mode(depth: int, verify: str) -> None:
    """A law with one text in it; laws with several are enumerated in ``rollout/proof/round_law.py``."""
    policy, name = tiny_looped_policy(seed=5, loops=LOOPS), f"shallow_loop_{depth}"
    penalised = SamplingParams(max_tokens=14, temperature=0.0, repetition_penalty=1.3, ignore_eos=True)
    requests = requests_for(vocab=48, prompts=5, params=[GREEDY, penalised], seed=depth)
    engine = engine_of(policy, drafters_of([name], True), compiled=True, verify=verify)
    done = run_engine(engine, requests, fixed_plan(name, 4))
    assert texts(done) == plain(policy, requests, compiled=True)
    assert {t.origin for c in done.values() for t in c.tokens} >= {"accepted", "corrected"}


# ---- each (position, loop) once -----------------------------------------------------------------


def rounds_of(
    engine: NativeEngine, requests: Sequence[Request], plan: Callable[..., RoundPlan]
) -> Iterator[RoundFacts]:
    for request in requests:
        engine.add(request)
    while engine.busy:
        yield engine.run_round(plan(engine.load())).facts


@pytest.mark.parametrize("compiled", KINDS)
@pytest.mark.parametrize("names", [*([n] for n in NAMES), NAMES], ids=lambda names: "+".join(names))
def test_every_position_is_computed_once_at_every_loop(names: Sequence[str], compiled: bool) -> None:
    """Drafts, the last draft's own row, prompts and plain rows together, by counting what was computed."""
    policy = tiny_looped_policy(loops=LOOPS)
    counting = CountingDecoder(tiny_decoder(policy, compiled=compiled))
    engine = engine_of(
        policy, drafters_of(names, compiled), compiled=compiled, counting=counting, prefill_chunk_tokens=7
    )
    requests = requests_for(vocab=48, prompts=6, params=[SAMPLED, GREEDY], seed=5)
    seen = Counter[str]()
    for facts in rounds_of(engine, requests, random_plan(names, max_gamma=5, seed=2)):
        work = counting.take()
        assert set(work.values()) <= {1}
        assert len(work) == LOOPS * (facts.prefill_rows + facts.verify_rows)
        seen.update(o.drafter for o in facts.outcomes)
        seen["beside prompts"] += bool(facts.prefill_rows and facts.drafts)
        seen["several depths"] += len(facts.drafts) > 1
    assert all(seen[name] for name in (*names, AR, "beside prompts"))
    assert seen["several depths"] or len(names) == 1


# ---- every rejection position -------------------------------------------------------------------


class SwappingDrafter:
    """Runs a shallow model's passes over a known text and drafts that text, one token swapped in either.

    So what passes left behind from there on is of another text than what is verified. Where the passes had
    the other token, the drafts are right and all of them are committed: states of the passes must not be.
    Passes that are fed their own wrong drafts: ``test_looped_matrix.py``.
    """

    switch_tokens_per_sequence = 0
    weight_bytes = 2
    held_bytes = 0
    max_gamma = 8

    def __init__(
        self, depth: int, known: Mapping[str, Sequence[int]], *, swapped: str, swapped_at: int
    ) -> None:
        self.name = "swapping"
        self.drafter_version = -1
        self.model: DraftModel | None = None
        self._depth, self._known = depth, known
        self._in_drafts, self._swapped_at = swapped == "drafts", swapped_at

    def rebuild(self, view: PolicyView) -> None:
        self.model, self.drafter_version = view.shallow(self._depth), view.policy_version

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        assert self.model is not None
        right = [self._right(r) for r in requests]
        other = [[t + (i == self._swapped_at) for i, t in enumerate(tokens)] for tokens in right]
        drafts, fed = (other, right) if self._in_drafts else (right, other)
        gamma = max(len(tokens) for tokens in fed)
        for i in range(gamma):
            live = [n for n, tokens in enumerate(fed) if len(tokens) > i]
            self.model.step([requests[n] for n in live], [fed[n][:i] for n in live])
        return Proposal(tokens=drafts, probs=None, passes=gamma, rows=gamma, context_tokens=0)

    def _right(self, request: DraftRequest) -> list[int]:
        done = len(request.tokens) - request.prompt_tokens
        return list(self._known[request.prompt_uid][done : done + request.gamma])

    def ready(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        return None

    def finished(self, request: DraftRequest) -> None:
        pass

    def forget(self, key: int) -> None:
        pass


def as_if_new(policy: TinyPolicy, request: Request, tokens: Sequence[int]) -> Tensor:
    """Return what a fresh engine holds that was given all but the last token as its prompt."""
    engine = engine_of(policy)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add(
        Request(prompt_uid="new", sample_index=0, prompt_ids=tuple(tokens[:-1]), params=params, seed=0)
    )
    engine.run_round(ar_plan(engine.load()))
    (sequence,) = engine._scheduler.running.values()
    return planes_of(engine, sequence.key, len(tokens) - 1)


GAMMA = 4


SWAPS = [*(("drafts", at) for at in range(GAMMA + 1)), *(("passes", at) for at in range(GAMMA - 1))]
"""In what, and at which draft: passes are fed all but the last one, and at ``GAMMA`` nothing is swapped."""


@pytest.mark.parametrize(("swapped", "at"), SWAPS)
@pytest.mark.parametrize(("depth", "params"), [(1, SAMPLED), (2, GREEDY), (3, SAMPLED)])
def test_after_a_token_swapped_at_any_position_all_planes_hold_what_a_fresh_engine_holds(
    depth: int, params: SamplingParams, swapped: str, at: int
) -> None:
    policy = tiny_looped_policy(seed=depth, loops=LOOPS, layers=1)
    (request,) = requests_for(vocab=48, prompts=1, params=[params], seed=at, longest_prompt=20)
    whole = run_engine(engine_of(policy), [request], ar_plan)[request.key]
    known = {request.prompt_uid: whole.token_ids}
    drafter = SwappingDrafter(depth, known, swapped=swapped, swapped_at=at)
    most_accepted = at if swapped == "drafts" else GAMMA
    engine = engine_of(policy, [drafter])
    engine.add(request)
    engine.run_round(ar_plan(engine.load()))
    plan = fixed_plan(drafter.name, GAMMA)
    (sequence,) = engine._scheduler.running.values()
    completions: list[Completion] = []
    while engine.busy:
        before, gamma = len(sequence.tokens), min(GAMMA, sequence.remaining_tokens - 1)
        outcome = engine.run_round(plan(engine.load()))
        completions += outcome.completions
        (told,) = outcome.facts.outcomes
        assert not any(d.failures for d in outcome.facts.drafts)
        assert (told.gamma, told.accepted) == (gamma, min(most_accepted, gamma))
        assert not engine._state.draft_states.any
        if engine.busy:
            assert sequence.frontier == before + told.accepted == len(sequence.tokens) - 1
            held = planes_of(engine, sequence.key, sequence.frontier)
            assert same_bits(held, as_if_new(policy, request, sequence.tokens))
    assert texts({request.key: completions[0]}) == texts({request.key: whole})


# ---- mixtures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", KINDS)
def test_drafters_of_all_depths_lanes_plain_rows_and_prompts_share_a_round(compiled: bool) -> None:
    policy = tiny_looped_policy(seed=1, loops=LOOPS)
    requests = requests_for(vocab=48, prompts=10, samples=1, params=MIXED_PARAMS, seed=4)
    names = [*NAMES, "wavefront", "w4", "history"]
    engine = engine_of(
        policy, drafters_of(names, compiled), compiled=compiled, prefill_chunk_tokens=5, max_batch=6
    )
    done = run_engine(engine, requests, random_plan(names, max_gamma=6, seed=9))
    assert texts(done) == plain(policy, requests, compiled=compiled)
    assert {t.drafter for c in done.values() for t in c.tokens} >= {*NAMES, "wavefront", "w4", AR}


@pytest.mark.parametrize("compiled", KINDS)
def test_preempted_and_aborted_sequences_leave_no_state_and_no_page_behind(compiled: bool) -> None:
    policy = tiny_looped_policy(loops=LOOPS)
    requests = requests_for(vocab=48, prompts=8, params=[SAMPLED], seed=6)
    engine = engine_of(policy, drafters_of(NAMES, compiled), compiled=compiled, kv_tokens=9 * 16, max_batch=6)
    plan = random_plan(NAMES, max_gamma=4, seed=1)
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.run_round(plan(engine.load()))
    aborted = next(s.request.key for s in engine._scheduler.running.values())
    assert engine.abort(aborted) is not None
    done = run_engine(engine, [], plan, pending=engine.running + len(engine._scheduler.waiting))
    rest = [r for r in requests if r.key in done]
    assert len(rest) >= len(requests) - 2
    assert texts(done) == {
        key: text for key, text in plain(policy, requests, compiled=compiled).items() if key in done
    }
    assert engine.gauges()["engine/preemptions"] > 0
    engine.close()
    assert engine.gauges()["engine/kv_pages_used"] == 0


# ---- failures -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Failing:
    """A shallow model that raises in every third pass, before or after it has computed it."""

    inner: DraftModel
    after: bool
    passes: int = 0

    def chain(self, requests: Sequence[DraftRequest], gammas: Sequence[int]) -> None:
        return None

    def step(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> DraftStep:
        self.passes += 1
        fails = self.passes % 3 == 0
        if fails and not self.after:
            raise RuntimeError("planted")
        step = self.inner.step(requests, drafts)
        if fails:
            raise DraftError("planted")
        return step


@pytest.mark.parametrize("after", [False, True], ids=["before its pass", "after its pass"])
@pytest.mark.parametrize("compiled", KINDS)
def test_a_drafter_that_fails_midway_costs_time_only(compiled: bool, after: bool) -> None:
    policy = tiny_looped_policy(loops=LOOPS)
    requests = requests_for(vocab=48, prompts=4, params=[SAMPLED, GREEDY], seed=7)
    engine = engine_of(policy, drafters_of(["shallow_loop_2"], compiled), compiled=compiled)
    drafter = engine._drafting.slots["shallow_loop_2"].drafter
    assert drafter.model is not None
    drafter.model = Failing(inner=drafter.model, after=after)
    done = run_engine(engine, requests, fixed_plan("shallow_loop_2", 2))
    assert texts(done) == plain(policy, requests, compiled=compiled)
    assert engine.gauges()["drafter/shallow_loop_2_failures"] > 0
    assert engine.gauges()["engine/reused_row_loops"] > 0


def test_a_round_that_breaks_down_leaves_no_state_for_the_next() -> None:
    policy = tiny_looped_policy(loops=LOOPS)
    requests = requests_for(vocab=48, prompts=2, params=[GREEDY], seed=8)
    counting = CountingDecoder(tiny_decoder(policy))
    engine = engine_of(policy, drafters_of(["shallow_loop_1"], False), counting=counting)
    plan = fixed_plan("shallow_loop_1", 3)
    for request in requests:
        engine.add(request)
    for _ in range(2):
        engine.run_round(plan(engine.load()))
    counting.fail_from_loop = 1
    with pytest.raises(RuntimeError, match="planted"):
        engine.run_round(plan(engine.load()))
    assert not engine._state.draft_states.any
    counting.fail_from_loop = None
    assert texts(run_engine(engine, [], plan, pending=2)) == plain(policy, requests)


# ---- weight updates -----------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", KINDS)
def test_after_a_weight_update_in_mid_text_the_rest_is_the_new_policys(compiled: bool) -> None:
    old, new = tiny_looped_policy(seed=1), tiny_looped_policy(seed=2)
    requests = requests_for(vocab=48, prompts=3, params=[SAMPLED], seed=9)
    engine = engine_of(old, drafters_of(["shallow_loop_2"], compiled), compiled=compiled)
    plan = fixed_plan("shallow_loop_2", 3)
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.run_round(plan(engine.load()))
    engine.begin_update(manifest(new.state, 1), in_flight="recompute")
    engine.stage(new.state.items())
    engine.settle_running()
    engine.commit_update()
    assert engine.drafter_versions() == {"shallow_loop_2": 1}
    done = run_engine(engine, [], plan, pending=len(requests))
    for request in requests:
        tokens = done[request.key].tokens
        cut = sum(t.policy_version == 0 for t in tokens)
        assert 0 < cut < len(tokens)
        resumed = Request(
            prompt_uid=request.prompt_uid,
            sample_index=0,
            prompt_ids=request.prompt_ids,
            params=request.params,
            seed=request.seed,
            prefix_ids=tuple(t.token_id for t in tokens[:cut]),
        )
        rest = run_engine(engine_of(new, compiled=compiled), [resumed], ar_plan)[request.key]
        assert [t.token_id for t in tokens[cut:]] == list(rest.token_ids)
        assert [t.target_logprob for t in tokens[cut:]] == [t.target_logprob for t in rest.tokens]
