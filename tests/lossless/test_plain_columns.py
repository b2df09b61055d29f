"""Plain rounds by column against the same rounds sequence by sequence, whatever happens between them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.types import InFlight, PlainOutcomes, RoundFacts, RoundLoad, RoundPlan
from drafters.testing import ScriptedDrafter
from rollout.config import EngineConfig
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.plain_batch import MOST_ROUNDS
from rollout.engine.protocol import RoundOutcome
from rollout.policy.weights import manifest
from rollout.service.loop import EngineLoop
from rollout.service.records import HostEvents
from rollout.testing import TinyPolicy, tiny_policy
from rollout.testing_native import (
    MIXED_PARAMS,
    Planner,
    ar_plan,
    assert_holds_nothing,
    fixed_plan,
    random_plan,
    requests_for,
    tiny_engine,
)
from rollout.tokens import TokenRecord
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless

STOPPING = (
    SamplingParams(max_tokens=40, stop=("a", "be")),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=33, temperature=0.9, stop_ids=tuple(range(3, 9))),
    SamplingParams(max_tokens=MOST_ROUNDS + 20, ignore_eos=True),
)
"""Ends by text, at once, by one of many ids, and after more rounds than are kept."""


def _engine(policy: TinyPolicy, *, by_column: bool, **config: Any) -> NativeEngine:
    settings = {"max_batch": 6, "max_context_tokens": 128, "prefill_chunk_tokens": 24, **config}
    drafter = ScriptedDrafter(script=lambda r: [r.tokens[-1]] * r.gamma)
    engine = tiny_engine(policy, [drafter], compiled=True, config=EngineConfig(**settings))
    if not by_column:
        engine._choosing = None  # what a decoder leaves it at that only Python can ask
    return engine


def _facts(load: RoundLoad, facts: RoundFacts) -> tuple[Any, ...]:
    """Return all of a round but its times, in an order of its own."""
    return (
        sorted(load.sequences),
        load.prefill_tokens,
        load.waiting,
        facts.batch,
        facts.prefill_rows,
        facts.verify_rows,
        facts.context_tokens,
        facts.prefill_committed,
        facts.committed,
        sorted(facts.outcomes),
        sorted(facts.telling),
    )


def _ending(completion: Completion) -> dict[str, Any]:
    """Return all of a completion but its times."""
    provenance = completion.provenance
    assert provenance is not None
    timeless = replace(provenance, queued_s=0.0, prefill_s=0.0, decode_s=0.0, fingerprint="")
    return {**asdict(replace(completion, provenance=timeless)), "tokens": list(completion.tokens)}


class _Life:
    """One engine's rounds, what they told and how everything ended."""

    def __init__(self, engine: NativeEngine, planner: Planner) -> None:
        self.engine, self._planner = engine, planner
        self.facts: list[tuple[Any, ...]] = []
        self.endings: dict[tuple[str, int], dict[str, Any]] = {}
        self.streams: dict[tuple[str, int], list[TokenRecord]] = {}
        self.by_column = 0

    def round(self, *, look_up: bool = False) -> RoundOutcome:
        """Run a round. A ``look_up`` gives everybody their tokens before it, so it must not be the rule."""
        load = self.engine.load(look_up=lambda _: look_up)
        outcome = self.engine.run_round(self._planner(load))
        self.facts.append(_facts(load, outcome.facts))
        self.by_column += isinstance(outcome.facts.outcomes, PlainOutcomes)
        for emission in outcome.emissions:
            stream = self.streams.setdefault(emission.key, [])
            assert emission.first_index == len(stream), "nothing twice, nothing left out"
            stream += emission.tokens
        for completion in outcome.completions:
            self.end(completion)
            assert self.streams.get((completion.prompt_uid, completion.sample_index), []) == list(
                completion.tokens
            ), "a round that ends a sequence tells all of it"
        return outcome

    def end(self, completion: Completion | None) -> None:
        if completion is not None:
            key = (completion.prompt_uid, completion.sample_index)
            assert key not in self.endings
            self.endings[key] = _ending(completion)
            told = self.streams.get(key, [])
            assert told == list(completion.tokens[: len(told)])


def _mostly_plain(seed: int) -> Planner:
    """Return a planner whose rounds come in runs: plain ones, and a few in which some draft."""
    rng, drafting = random.Random(seed), random_plan(["scripted"], max_gamma=3, seed=seed)

    def plan(load: RoundLoad) -> RoundPlan:
        return drafting(load) if rng.random() < 0.15 else ar_plan(load)

    return plan


def _events(life: _Life, requests: Sequence[Request], policy: TinyPolicy, seed: int) -> Iterator[None]:
    """Run a life: requests come a few at a time, some are aborted, weights change, memory is given back."""
    rng, engine = random.Random(seed), life.engine
    waiting, version = list(requests), 0
    while waiting or engine.busy:
        if waiting and rng.random() < 0.4:
            engine.add(waiting.pop(0))
        if rng.random() < 0.03:
            life.end(engine.abort(rng.choice(requests).key))
        if rng.random() < 0.03:
            version += 1
            mode = rng.choice(["keep", "recompute"])
            engine.begin_update(manifest(policy.state, version), in_flight=mode)
            engine.stage(policy.state.items())
            engine.check_update()
            engine.settle_running()
            engine.commit_update()
        if rng.random() < 0.02:
            engine.sleep()
            engine.wake()
        if engine.busy:
            life.round(look_up=rng.random() < 0.1)
        yield


@pytest.mark.parametrize("emit_s", [0.0, 1e9])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_columns_leave_what_sequences_leave(seed: int, emit_s: float) -> None:
    policy = tiny_policy(seed=seed)
    requests = requests_for(
        vocab=policy.spec.vocab_size, prompts=12, samples=2, seed=seed, params=MIXED_PARAMS + STOPPING
    )
    lives = [
        _Life(
            _engine(policy, by_column=by_column, emit_s=emit_s, kv_tokens=320),
            _mostly_plain(seed),
        )
        for by_column in (True, False)
    ]
    for _ in zip(*(_events(life, requests, policy, seed) for life in lives), strict=True):
        columns, sequences = lives
        assert columns.facts[-1:] == sequences.facts[-1:]
    assert columns.by_column > len(columns.facts) / 3
    assert not sequences.by_column
    assert columns.endings == sequences.endings
    assert {e["finish_reason"] for e in columns.endings.values()} >= {"stop", "length"}
    assert any(e["provenance"]["preemptions"] for e in columns.endings.values())
    for life in lives:
        assert_holds_nothing(life.engine)


LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def _two_lives(policy: TinyPolicy, requests: Sequence[Request], **config: Any) -> tuple[_Life, _Life]:
    """Return the same requests by column and sequence by sequence, nothing emitted before it must be."""
    lives = tuple(
        _Life(_engine(policy, by_column=by_column, emit_s=1e9, **config), ar_plan)
        for by_column in (True, False)
    )
    for life in lives:
        for request in requests:
            life.engine.add(request)
    return lives[0], lives[1]


def _run_out(life: _Life) -> None:
    while life.engine.busy:
        life.round()
    assert_holds_nothing(life.engine)


def test_a_failed_round_leaves_what_there_was_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it failed after the columns were moved on, and prompts were about to end in it."""
    policy = tiny_policy()
    requests = requests_for(vocab=policy.spec.vocab_size, prompts=6, params=(LONG,), longest_prompt=9)
    columns, sequences = _two_lives(policy, requests[:5], prefill_chunk_tokens=8)
    late = requests[5]
    run_choosing = CompiledDecoder.run_choosing

    def failing(*args: Any) -> Any:
        run_choosing(*args)
        raise MemoryError

    for number in range(12):
        for life in (columns, sequences):
            if number == 8:
                life.engine.add(late)
            life.round()
        if number % 3 == 0:
            with monkeypatch.context() as patch:
                patch.setattr(CompiledDecoder, "run_choosing", failing)
                with pytest.raises(MemoryError):
                    columns.round()
    for life in (columns, sequences):
        _run_out(life)
    assert columns.facts == sequences.facts
    assert columns.endings == sequences.endings


@pytest.mark.parametrize("mode", ["drain", "keep"])
def test_weights_that_change_while_tokens_are_kept_leave_them_their_version(mode: InFlight) -> None:
    """Nothing has to be settled where nothing runs, so nobody need have asked for the sequences."""
    policy = tiny_policy()
    requests = requests_for(vocab=policy.spec.vocab_size, prompts=2, params=(LONG,))
    columns, sequences = _two_lives(policy, requests, max_batch=1)
    for life in (columns, sequences):
        for _ in range(6):
            life.round()
        life.engine.begin_update(manifest(policy.state, 1), in_flight=mode)
        life.engine.stage(policy.state.items())
        while mode == "drain" and life.engine.running:
            life.round()
        life.engine.commit_update()
        _run_out(life)
    assert columns.endings == sequences.endings
    versions = {t.policy_version for e in columns.endings.values() for t in e["tokens"]}
    assert versions == {0, 1}


def test_what_ends_without_a_token_in_a_drafting_round_is_told_whole() -> None:
    """Its tokens of plain rounds were kept, and the round that ends it has none for it."""
    policy = tiny_policy()
    bad = range(3, policy.spec.vocab_size, 5)
    policy.state["model.embed_tokens.weight"][bad] = float("nan")
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [
        Request(prompt_uid=f"p{i}", sample_index=0, prompt_ids=(4, 5, 6), params=params, seed=i)
        for i in range(6)
    ]
    columns, _ = _two_lives(policy, requests)
    failed_drafting = 0
    for number in range(40):
        if not columns.engine.busy:
            break
        columns._planner = fixed_plan("scripted", 2) if number % 3 == 2 else ar_plan
        drafting = number % 3 == 2
        failed_drafting += drafting * sum(c.finish_reason == "failed" for c in columns.round().completions)
    assert failed_drafting


def test_tokens_of_a_sequence_that_lost_its_pages_are_told_as_soon_as_all_others() -> None:
    policy = tiny_policy()
    requests = requests_for(vocab=policy.spec.vocab_size, prompts=6, params=(LONG,), longest_prompt=20)
    columns, _ = _two_lives(policy, requests, kv_tokens=160)
    scheduler, committer = columns.engine._scheduler, columns.engine._committer
    untold = 0
    while columns.engine.busy:
        committer._emit_s = 1e9
        columns.round()
        lost = [s for s in scheduler.waiting if s.told < len(s.records)]
        untold += len(lost)
        if lost:
            committer._emit_s = 0.0
            columns.round()
            assert all(s.told == len(s.records) for s in lost)
    assert untold


@pytest.mark.parametrize("halt", ["pause", "crash"])
def test_a_loop_that_runs_no_round_for_now_or_no_more_tells_what_was_kept(halt: str) -> None:
    policy = tiny_policy()
    requests = requests_for(vocab=policy.spec.vocab_size, prompts=3, params=(LONG,))
    told: list[HostEvents] = []
    engine = _engine(policy, by_column=True, emit_s=1e9)
    traits, shapes = engine.traits, engine.part_shapes()
    controller = build_controller(ControllerConfig(kind="ar"), traits, shapes, None)
    loop = EngineLoop(engine, controller, host="here", deliver=told.append)
    loop.add(requests)
    for _ in range(12):
        loop.turn()
    before = _tokens_of(told)
    if halt == "pause":
        loop.pause()
    else:
        controller.decide = _fails  # type: ignore[method-assign]
    loop.turn()
    assert _tokens_of(told) - before >= 3 * 8, "all but what was told as texts began"
    if halt == "crash":
        completions = [c for events in told for c in events.completions]
        assert {c.finish_reason for c in completions} == {"failed"}
        assert sum(len(c.tokens) for c in completions) == _tokens_of(told)


def _tokens_of(told: Sequence[HostEvents]) -> int:
    return sum(len(emission.tokens) for events in told for emission in events.emissions)


def _fails(*_: Any, **__: Any) -> RoundPlan:
    raise RuntimeError("no plan")
