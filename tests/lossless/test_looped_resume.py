"""A text that loses its place goes on as if nothing had been: under every looped drafter, at every boundary.

What is kept of a sequence is its committed tokens, and noise belongs to positions. So whoever computes the
rest, from wherever it was cut, comes to the text that plain decoding has: ids and logprobs bit for bit.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from controller.config import ControllerConfig
from controller.decide import build_controller
from drafters.config import DrafterConfig
from drafters.registry import build, shallow_loops
from drafters.wavefront import WAVEFRONT
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.lanes import lane_passes
from rollout.engine.protocol import Emission
from rollout.service.ledger import Ledger
from rollout.service.loop import EngineLoop
from rollout.service.records import HostEvents, Identity
from rollout.testing import TinyPolicy, tiny_looped_policy
from rollout.testing_forced import DraftScript, ForcedChooser
from rollout.testing_native import (
    Text,
    assert_holds_nothing,
    fixed_plan,
    requests_for,
    text_of,
    tiny_chooser,
    tiny_engine,
)
from rollout.testing_planes import NativeRun, assert_stands_as_native, native_runs
from rollout.tokens import TokenRecord
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless

LOOPED = (*shallow_loops(4), WAVEFRONT)
CASES = [
    *(pytest.param(name, True, id=f"{name}, compiled") for name in LOOPED),
    *(pytest.param(name, False, id=f"{name}, float64") for name in ("shallow_loop_2", WAVEFRONT)),
]
VOCAB, LOOPS = 48, 4
PARAMS = (
    SamplingParams(max_tokens=22, ignore_eos=True),
    SamplingParams(max_tokens=22, temperature=0.0, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=22, temperature=0.8, top_k=9, ignore_eos=True),
)


@pytest.fixture(autouse=True)
def proposals_in_calls_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lanes that Python advances ask for proposals apart, so that they can be told from choices."""
    monkeypatch.setattr(lane_passes, "ONE_CALL_VOCAB", 0)


def policy_of(*, compiled: bool) -> TinyPolicy:
    return tiny_looped_policy(seed=5, loops=LOOPS, layers=2 if compiled else 1)


def engine_of(drafter: str | None, *, compiled: bool, script: DraftScript | None = None) -> NativeEngine:
    chooser = tiny_chooser(compiled=compiled)
    return tiny_engine(
        policy_of(compiled=compiled),
        [build(drafter, DrafterConfig(wavefront_passes=1))] if drafter else [],
        compiled=compiled,
        config=EngineConfig(max_batch=4, max_context_tokens=96, prefill_chunk_tokens=64),
        chooser=chooser if script is None else ForcedChooser(chooser, script),
    )


def requests_of(count: int) -> list[Request]:
    return requests_for(vocab=VOCAB, prompts=count, params=PARAMS, seed=12, longest_prompt=12)


def natives_of(requests: Sequence[Request], *, compiled: bool) -> dict[int, NativeRun]:
    return native_runs(engine_of(None, compiled=compiled), requests)


# ---- preempted and taken in again -----------------------------------------------------------------


@pytest.mark.parametrize(("drafter", "compiled"), CASES)
def test_preemption_after_any_round_gives_back_all_pages_and_changes_nothing(
    drafter: str, compiled: bool
) -> None:
    """Everybody is preempted after every third round, whatever was accepted or fell in it, and comes back."""
    requests = requests_of(4)
    natives = natives_of(requests, compiled=compiled)
    rng = random.Random(3)
    wrong = {seed: {p for p in range(len(run.tokens)) if rng.random() < 0.2} for seed, run in natives.items()}
    texts = {seed: run.tokens for seed, run in natives.items()}
    engine = engine_of(
        drafter, compiled=compiled, script=DraftScript(texts=texts, vocab_size=VOCAB, wrong=wrong)
    )
    plan, scheduler = fixed_plan(drafter, 4), engine._scheduler
    done: dict[int, Completion] = {}
    for request in requests:
        engine.add(request)
    for rounds in range(1, 200):
        for completion in engine.run_round(plan(engine.load())).completions:
            done[next(r.seed for r in requests if r.prompt_uid == completion.prompt_uid)] = completion
        assert_stands_as_native(engine, natives)
        if rounds % 3 == 0:
            for sequence in reversed(list(scheduler.running.values())):
                scheduler.preempt(sequence)
                assert (sequence.frontier, sequence.pages) == (0, [])
            assert scheduler.pool.free + len(scheduler.prefix) == scheduler.pool.total
        if not engine.busy:
            break
    assert {seed: text_of(c) for seed, c in done.items()} == {seed: n.text for seed, n in natives.items()}
    assert sum(c.provenance.preemptions for c in done.values() if c.provenance) >= 4
    origins = {t.origin for c in done.values() for t in c.tokens}
    assert origins >= {"accepted", "corrected"}
    assert_holds_nothing(engine)


# ---- hosts that die -------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Stream:
    """Implements ``Sink``: what a caller was told, which nobody can take back."""

    streamed: bool = True
    records: list[TokenRecord] = field(default_factory=list)
    completion: Completion | None = None

    def tokens(self, emission: Emission) -> None:
        assert emission.first_index == len(self.records), "nothing twice, nothing left out"
        self.records.extend(emission.tokens)

    def ended(self, completion: Completion) -> None:
        assert self.completion is None
        self.completion = completion


class Host:
    """A host's engine and loop, turned by hand, until it is no more."""

    def __init__(self, name: str, drafter: str, *, compiled: bool) -> None:
        self.name = name
        self.told: list[HostEvents] = []
        self.engine = engine_of(drafter, compiled=compiled)
        settings = ControllerConfig(kind="fixed", drafter=drafter, gamma=3)
        controller = build_controller(settings, self.engine.traits, self.engine.part_shapes(), None)
        self.loop = EngineLoop(self.engine, controller, host=name, deliver=self.told.append)
        self.identity = Identity(
            policy_version=self.engine.policy_version, fingerprint=self.engine.fingerprint
        )

    def live(self, ledger: Ledger, turns: int, *, tells_last: bool) -> None:
        """Take what nobody holds and turn so often; the ledger hears of it, perhaps not of the last turn."""
        self.loop.add(
            [
                ledger.send(sample, self.name, self.identity, now_s=0.0, allow_other=False)
                for sample in ledger.queued()
            ]
        )
        heard = 0
        for _ in range(turns):
            heard = len(self.told)
            self.loop.turn()
        for events in self.told if tells_last else self.told[:heard]:
            for emission in events.emissions:
                ledger.emission(self.name, emission)
            for completion in events.completions:
                ledger.completion(self.name, completion)


@pytest.mark.parametrize(
    ("first", "compiled", "turns"),
    [(name, True, turns) for name in LOOPED for turns in (3, 4)] + [(WAVEFRONT, False, 3)],
)
def test_a_text_passed_on_by_hosts_that_die_is_plain_decodings(
    first: str, compiled: bool, turns: int
) -> None:
    """Each host has another drafter than the one before and dies after a few rounds, drafts under way; every
    other one with tokens of its last round that nobody has heard of."""
    requests = requests_of(3)
    natives = natives_of(requests, compiled=compiled)
    ledger, streams = Ledger(), {r.seed: Stream() for r in requests}
    for request in requests:
        ledger.open(request, streams[request.seed], now_s=0.0)
    hosts, makers = 0, set[str]()
    while ledger.keys:
        drafter = LOOPED[(LOOPED.index(first) + hosts) % len(LOOPED)]
        host = Host(f"host-{hosts}", drafter, compiled=compiled)
        host.live(ledger, turns, tells_last=hosts % 2 == 0)
        ledger.lost(host.name, host.identity)
        hosts += 1
        assert hosts < 60, "texts get nowhere"
    for seed, stream in streams.items():
        assert stream.completion is not None
        assert text_of(stream.completion).ids == natives[seed].text.ids
        assert text_of(stream.completion).logprobs == natives[seed].text.logprobs
        assert list(stream.completion.tokens) == stream.records
        makers |= {t.drafter for t in stream.records}
    assert hosts >= 3
    assert len(makers & set(LOOPED)) >= 3


# ---- aborts that come in while drafts are under way -----------------------------------------------


@dataclass(kw_only=True, slots=True)
class Interrupting(DraftScript):
    """Proposes what is chosen; something happens meanwhile."""

    happens: Callable[[], object] = lambda: None

    def token(self, seed: int, position: int, chosen: int) -> int:
        self.proposals += 1
        self.happens()
        return chosen


@pytest.mark.parametrize(("drafter", "compiled"), CASES)
def test_an_abort_in_mid_draft_takes_effect_at_the_boundary_and_leaks_no_page(
    drafter: str, compiled: bool
) -> None:
    """Compiled chains and lanes are interrupted between two passes of one call."""
    requests = requests_of(5)
    natives = natives_of(requests, compiled=compiled)
    script = Interrupting(texts={}, vocab_size=VOCAB)
    engine = engine_of(drafter, compiled=compiled, script=script)
    free = engine._scheduler.pool.free
    told: list[HostEvents] = []
    settings = ControllerConfig(kind="fixed", drafter=drafter, gamma=3)
    controller = build_controller(settings, engine.traits, engine.part_shapes(), None)
    loop = EngineLoop(engine, controller, host="here", deliver=told.append)
    doomed = [r.key for r in requests[:3]]
    waiting = list(doomed)

    def abort_next() -> None:
        # The first call after some tokens are there, then one now and then.
        if waiting and script.proposals % 9 == 0:
            loop.abort({waiting.pop(): 0}, "in mid draft")

    script.happens = abort_next
    loop.add(requests)
    while loop.turn():
        pass
    assert not waiting
    ended = {(c.prompt_uid, c.sample_index): c for events in told for c in events.completions}
    assert_ended_as_native(ended, {r.key: natives[r.seed].text for r in requests}, aborted=doomed)
    assert_holds_nothing(engine)
    assert engine._scheduler.pool.free == free


def assert_ended_as_native(
    ended: Mapping[tuple[str, int], Completion],
    wanted: Mapping[tuple[str, int], Text],
    *,
    aborted: Sequence[tuple[str, int]],
) -> None:
    """Each ended once, with a beginning of plain decoding's text: the whole of it, or up to its abort."""
    assert ended.keys() == wanted.keys()
    for key, completion in ended.items():
        found, whole = text_of(completion), wanted[key]
        length = len(found.ids)
        assert (completion.finish_reason == "aborted") == (key in aborted)
        assert length == len(whole.ids) or key in aborted
        assert (found.ids, found.logprobs) == (whole.ids[:length], whole.logprobs[:length])
