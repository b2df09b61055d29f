"""Prompts in, pages out, hosts gone: whatever happens beside a looped draft, every text stays what it is.

Sequences lose their place between rounds only, where what they hold is committed tokens. So each case here
comes down to equality with the text that each request has alone, ids and all four logprobs bit for bit, and
to engines that hold nothing afterwards: no page, no lane, no state of a draft.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from torch import Tensor

from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.types import RoundFacts
from drafters.config import DrafterConfig
from drafters.registry import build, shallow_loops
from drafters.types import DraftChain, DraftModel, DraftRequest, DraftStep
from drafters.wavefront import WAVEFRONT
from rollout.config import EngineConfig
from rollout.engine.native.decoder import Decoder, ForwardResult, KVStorage
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.rows import RowBatch
from rollout.engine.native.sequence import LiveSequence
from rollout.service.loop import EngineLoop
from rollout.service.records import HostEvents
from rollout.testing import TinyPolicy, tiny_looped_policy
from rollout.testing_looped import CountingDecoder
from rollout.testing_native import (
    MIXED_PARAMS,
    Planner,
    Text,
    ar_plan,
    assert_holds_nothing,
    fixed_plan,
    random_plan,
    requests_for,
    run_engine,
    text_of,
    texts,
    tiny_decoder,
    tiny_engine,
)
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless

KINDS = [pytest.param(False, id="float64"), pytest.param(True, id="compiled")]
SHALLOW = shallow_loops(4)
LOOPED = (*SHALLOW, WAVEFRONT)
WAYS: Mapping[str, Callable[[], Planner]] = {
    "shallow loops": lambda: random_plan(SHALLOW, max_gamma=5, seed=5),
    "wavefront": lambda: fixed_plan(WAVEFRONT, 8),
    "both": lambda: random_plan(LOOPED, max_gamma=5, seed=6),
}
ENDLESS = (SamplingParams(max_tokens=24, ignore_eos=True), SamplingParams(max_tokens=24, temperature=0.0))

Texts = dict[tuple[str, int], Text]


def engine_of(
    policy: TinyPolicy, *, compiled: bool, decoder: Decoder | None = None, **config: int
) -> NativeEngine:
    settings = EngineConfig(**{"max_batch": 8, "max_context_tokens": 192, **config})  # type: ignore[arg-type]
    # Short rounds of lanes: what happens between rounds then meets more of them under way.
    drafters = [build(name, DrafterConfig(wavefront_passes=4)) for name in LOOPED]
    return tiny_engine(policy, drafters, compiled=compiled, config=settings, decoder=decoder)


def alone(policy: TinyPolicy, requests: Sequence[Request], *, compiled: bool) -> Texts:
    """Each request by itself, its prompt whole, without speculation: the definition of its text."""
    engine = engine_of(policy, compiled=compiled)
    out: Texts = {}
    for request in requests:
        out.update(texts(run_engine(engine, [request], ar_plan)))
    return out


# ---- prompts beside drafts ----------------------------------------------------------------------


@pytest.mark.parametrize("compiled", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_long_prompt_computed_beside_drafts_changes_no_text(way: str, compiled: bool) -> None:
    policy, plan = tiny_looped_policy(), WAYS[way]()
    early = requests_for(vocab=48, prompts=3, params=ENDLESS, seed=3, longest_prompt=9)
    rng = random.Random(1)
    long = replace(early[0], prompt_uid="long", prompt_ids=tuple(rng.randrange(3, 48) for _ in range(72)))
    expected = alone(policy, [*early, long], compiled=compiled)
    engine = engine_of(policy, compiled=compiled, prefill_chunk_tokens=8)
    done: dict[tuple[str, int], Completion] = {}
    mixed: list[RoundFacts] = []
    for request in early:
        engine.add(request)
    for index in range(500):
        if index == 3:
            engine.add(long)
        outcome = engine.run_round(plan(engine.load()))
        done |= {(c.prompt_uid, c.sample_index): c for c in outcome.completions}
        if outcome.facts.prefill_rows and any(o.gamma for o in outcome.facts.outcomes):
            mixed.append(outcome.facts)
        if not engine.busy:
            break
    assert texts(done) == expected
    assert sum(facts.prefill_rows for facts in mixed) >= 40, "most of the long prompt beside drafts"
    assert sum(o.accepted for facts in mixed for o in facts.outcomes) > 0
    assert_holds_nothing(engine)


# ---- preemption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_preemption_between_any_two_rounds_changes_no_text(way: str, compiled: bool) -> None:
    """Victims are picked at random, mostly with lanes under way; what they keep is their committed tokens."""
    policy, plan = tiny_looped_policy(seed=1), WAYS[way]()
    requests = requests_for(
        vocab=48, prompts=5, params=(*MIXED_PARAMS[2:4], *ENDLESS), seed=7, longest_prompt=24
    )
    expected = alone(policy, requests, compiled=compiled)
    engine = engine_of(policy, compiled=compiled, prefill_chunk_tokens=16)
    rng, with_lanes = random.Random(2), 0
    done: dict[tuple[str, int], Completion] = {}
    for request in requests:
        engine.add(request)
    while engine.busy:
        for sequence in victims(engine, rng):
            with_lanes += sequence.key in engine._wavefront._lanes
            before = list(sequence.tokens)
            engine._scheduler.preempt(sequence)
            assert (sequence.tokens, sequence.frontier, sequence.pages) == (before, 0, [])
        outcome = engine.run_round(plan(engine.load()))
        done |= {(c.prompt_uid, c.sample_index): c for c in outcome.completions}
        for sequence in engine._scheduler.decoding():
            assert sequence.frontier == len(sequence.tokens) - 1, "a round ends at a committed boundary"
    assert texts(done) == expected
    assert sum(c.provenance.preemptions for c in done.values() if c.provenance) > 5
    assert with_lanes > 3 or way != "wavefront"
    assert_holds_nothing(engine)


def victims(engine: NativeEngine, rng: random.Random) -> list[LiveSequence]:
    """Return who is preempted before the next round: now and then one, seldom everybody, prefill included."""
    running = list(engine._scheduler.running.values())
    if rng.random() < 0.05:
        return running
    return [rng.choice(running)] if running and rng.random() < 0.3 else []


# ---- going on elsewhere -------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", KINDS)
@pytest.mark.parametrize(("first", "then"), [("wavefront", "shallow loops"), ("both", "wavefront")])
def test_a_text_cut_between_any_two_rounds_goes_on_the_same_in_another_engine(
    first: str, then: str, compiled: bool
) -> None:
    """A snapshot is what is committed: an abort hands it out, and ``prefix_ids`` takes it in."""
    policy = tiny_looped_policy(seed=2)
    requests = requests_for(vocab=48, prompts=4, params=MIXED_PARAMS[2:6], seed=8, longest_prompt=16)
    expected = alone(policy, requests, compiled=compiled)
    cut_inside = 0
    for rounds in (3, 6):
        engine, plan = engine_of(policy, compiled=compiled), WAYS[first]()
        done: dict[tuple[str, int], Completion] = {}
        for request in requests:
            engine.add(request)
        for _ in range(rounds):
            outcome = engine.run_round(plan(engine.load()))
            done |= {(c.prompt_uid, c.sample_index): c for c in outcome.completions}
        cut = {r.key: c for r in requests if (c := engine.abort(r.key)) is not None}
        assert_holds_nothing(engine)
        cut_inside += sum(len(c.tokens) > 0 for c in cut.values())
        resumed = [replace(r, prefix_ids=cut[r.key].token_ids) for r in requests if r.key in cut]
        rest = run_engine(engine_of(policy, compiled=compiled), resumed, WAYS[then]())
        for key, start in cut.items():
            whole = text_of(replace(rest[key], tokens=start.tokens + rest[key].tokens))
            assert whole == expected[key], f"{key} cut after {rounds} rounds"
        assert {key: text_of(c) for key, c in done.items()} == {key: expected[key] for key in done}
    assert cut_inside >= 4


# ---- aborts -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Interrupted:
    """A shallow model in whose second pass of a round something happens: a call, then perhaps a failure."""

    inner: DraftModel
    happens: Callable[[], object]
    fails: bool = False

    def chain(self, requests: Sequence[DraftRequest], gammas: Sequence[int]) -> DraftChain | None:
        """Take no chain: between two passes of one compiled call nobody could come in."""
        return None

    def step(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> DraftStep:
        step = self.inner.step(requests, drafts)
        if len(drafts[0]) == 1:
            self.happens()
            if self.fails:
                raise RuntimeError("planted: this draft fails in its second pass")
        return step


@pytest.mark.parametrize("fails", [False, True], ids=["sound drafts", "failing drafts"])
@pytest.mark.parametrize("compiled", KINDS)
def test_an_abort_that_comes_in_mid_draft_waits_for_the_boundary_and_leaks_nothing(
    compiled: bool, fails: bool
) -> None:
    """As a service has it: the call comes from another thread while the engine's own one drafts."""
    policy = tiny_looped_policy(seed=3)
    requests = requests_for(vocab=48, prompts=5, params=ENDLESS, seed=9, longest_prompt=16)
    expected = alone(policy, requests, compiled=compiled)
    engine = engine_of(policy, compiled=compiled)
    told: list[HostEvents] = []
    settings = ControllerConfig(kind="fixed", drafter="shallow_loop_1", gamma=3)
    controller = build_controller(settings, engine.traits, engine.part_shapes(), None)
    loop = EngineLoop(engine, controller, host="here", deliver=told.append)
    drafter = engine._drafting.slots["shallow_loop_1"].drafter
    assert drafter.model is not None
    doomed = [r.key for r in requests[:3]]
    waiting = list(doomed)

    def abort_next() -> None:
        if waiting:
            loop.abort({waiting.pop(): 0}, "in mid draft")

    drafter.model = Interrupted(inner=drafter.model, happens=abort_next, fails=fails)
    loop.add(requests)
    while loop.turn():
        pass
    ended = {(c.prompt_uid, c.sample_index): c for events in told for c in events.completions}
    assert len(ended) == len(requests)
    for key, completion in ended.items():
        whole, length = expected[key], len(completion.tokens)
        assert (completion.finish_reason == "aborted") == (key in doomed)
        assert completion.token_ids == whole.ids[:length]
        assert text_of(completion).logprobs == whole.logprobs[:length]
    assert (engine.gauges()["drafter/shallow_loop_1_failures"] > 0) == fails
    assert_holds_nothing(engine)


class Breaking(CountingDecoder):
    """A decoder that raises in one of the passes that lanes take."""

    passes_left = 10**9

    def advance(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop_M: Tensor) -> ForwardResult:
        """Compute, then perhaps raise: keys beyond the frontier have been written by then."""
        result = super().advance(hidden_MD, batch, kv, loop_M=loop_M)
        self.passes_left -= 1
        if self.passes_left == 0:
            raise RuntimeError("planted: this pass fails")
        return result


@pytest.mark.parametrize("passes", [1, 2, 3, 4])
def test_a_round_that_breaks_down_in_its_lanes_moves_no_frontier_and_leaves_no_lane(passes: int) -> None:
    policy = tiny_looped_policy(seed=4)
    requests = requests_for(vocab=48, prompts=3, params=ENDLESS, seed=10, longest_prompt=16)
    expected = alone(policy, requests, compiled=False)
    decoder = Breaking(tiny_decoder(policy))
    engine, plan = engine_of(policy, compiled=False, decoder=decoder), fixed_plan(WAVEFRONT, 8)
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.run_round(plan(engine.load()))
    assert engine.gauges()["engine/lanes"] > 3
    held = {s.key: (list(s.tokens), s.frontier) for s in engine._scheduler.running.values()}
    decoder.passes_left = passes
    with pytest.raises(RuntimeError, match="planted"):
        engine.run_round(plan(engine.load()))
    assert {s.key: (s.tokens, s.frontier) for s in engine._scheduler.running.values()} == held
    assert engine.gauges()["engine/lanes"] == 0
    aborted = engine.abort(requests[0].key)
    assert aborted is not None
    assert aborted.token_ids == expected[requests[0].key].ids[: len(aborted.tokens)]
    rest = texts(run_engine(engine, [], plan, pending=2))
    assert rest == {key: text for key, text in expected.items() if key in rest}
    assert_holds_nothing(engine)


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_closed_in_mid_text_holds_nothing(way: str) -> None:
    policy, plan = tiny_looped_policy(), WAYS[way]()
    engine = engine_of(policy, compiled=True, prefill_chunk_tokens=8)
    for request in requests_for(vocab=48, prompts=5, params=ENDLESS, seed=11):
        engine.add(request)
    for _ in range(6):
        engine.run_round(plan(engine.load()))
    assert engine.busy
    engine.close()
    assert_holds_nothing(engine)
