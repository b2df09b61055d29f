"""Who comes in, and when: the scheduler against the rule said the plain way, and the rule's parts by name."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest

from rollout.engine.native.pages import PagePool, PrefixIndex, pages_for
from rollout.engine.native.rows import PAGE_TOKENS
from rollout.engine.native.scheduler import Scheduler
from rollout.engine.native.sequence import LiveSequence
from rollout.engine.native.waiting import WaitingLine
from rollout.types import Request, SamplingParams

VERSION = 1
PROMPTS = [
    tuple(range(100 * i, 100 * i + length))
    for i, length in enumerate((5, PAGE_TOKENS, PAGE_TOKENS + 3, 2 * PAGE_TOKENS, 3 * PAGE_TOKENS + 1), 1)
]


def _sequence(key: int, prompt: tuple[int, ...], *, resumed: bool = False) -> LiveSequence:
    return LiveSequence(
        key=key,
        request=Request(
            prompt_uid=f"sample {key}",
            sample_index=0,
            prompt_ids=(*prompt[:1], *prompt[1:]),  # siblings' prompts are equal, not one object
            params=SamplingParams(),
            seed=key,
        ),
        tokens=list(prompt),
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        max_new_tokens=64,
        added_s=0.0,
        resumed=resumed,
    )


def _scheduler(*, max_batch: int = 4, pages: int = 64, prefix_cache: bool = True) -> Scheduler:
    return Scheduler(
        max_batch=max_batch, max_pages_per_sequence=8, pool=PagePool(pages), prefix_cache=prefix_cache
    )


def _finish_prefill(scheduler: Scheduler, sequence: LiveSequence) -> None:
    sequence.frontier = len(sequence.tokens)
    scheduler.publish(sequence, VERSION)
    scheduler.begin_decoding(sequence, 0.0)


def _keys(sequences: Iterable["LiveSequence | _Sample"]) -> list[int]:
    return [s.key for s in sequences]


@dataclass(kw_only=True, eq=False)
class _Sample:
    key: int
    prompt: tuple[int, ...]
    begun: bool
    in_prefill: bool = False
    writes: bool = False
    """Pages that others of its prompt will share, while in prefill."""

    pages: list[int] = field(default_factory=list)


class _PlainRule:
    """Admission by looking, for each that waits, at each that runs: what every order is measured against."""

    def __init__(self, *, max_batch: int, pages: int, prefix_cache: bool) -> None:
        self.pool = PagePool(pages)
        self.prefix = PrefixIndex(self.pool)
        self.max_batch, self.prefix_cache = max_batch, prefix_cache
        self.waiting: list[_Sample] = []
        self.running: list[_Sample] = []
        self.admitting = True

    def admit(self) -> None:
        for sample in list(self.waiting):
            if len(self.running) == self.max_batch:
                return
            written = self.prefix_cache and any(
                r.in_prefill and r.writes and r.prompt == sample.prompt for r in self.running
            )
            if written or not (self.admitting or sample.begun):
                continue
            if not self._start(sample):
                return

    def _start(self, sample: _Sample) -> bool:
        shared = self.prefix.match(VERSION, sample.prompt) if self.prefix_cache else []
        need = pages_for(len(sample.prompt) + 1) - len(shared)
        while (taken := self.pool.take(need)) is None:
            if self.prefix.evict(need - self.pool.free) == 0:
                self.pool.release(shared)
                return False
        sample.pages, sample.begun, sample.in_prefill = shared + taken, True, True
        sample.writes = len(shared) < (len(sample.prompt) - 1) // PAGE_TOKENS
        self.waiting.remove(sample)
        self.running.append(sample)
        return True

    def finish_prefill(self, sample: _Sample) -> None:
        sample.in_prefill = False
        if self.prefix_cache:
            self.prefix.publish(VERSION, sample.prompt, sample.pages)

    def preempt(self, sample: _Sample) -> None:
        self.remove(sample)
        self.waiting.insert(0, sample)

    def remove(self, sample: _Sample) -> None:
        self.pool.release(sample.pages)
        sample.pages, sample.in_prefill = [], False
        (self.running if sample in self.running else self.waiting).remove(sample)

    @property
    def under_way(self) -> list[_Sample]:
        return [*self.running, *(s for s in self.waiting if s.begun)]


class _Both:
    """Does the same to the scheduler and to the plain rule."""

    def __init__(self, rng: random.Random, *, prefix_cache: bool) -> None:
        max_batch, pages = rng.choice((1, 3, 8)), rng.choice((6, 14, 64))
        self.rng, self.next_key, self.admissions = rng, 0, 0
        self.scheduler = _scheduler(max_batch=max_batch, pages=pages, prefix_cache=prefix_cache)
        self.rule = _PlainRule(max_batch=max_batch, pages=pages, prefix_cache=prefix_cache)
        self.sequences: dict[int, LiveSequence] = {}

    def act(self) -> None:
        acts = (self.add, self.admit, self.finish_prefill, self.preempt, self.remove, self.turn_gate)
        self.rng.choices(acts, (4 if len(self.sequences) < 40 else 0, 4, 4, 1, 2, 0.3))[0]()

    def add(self) -> None:
        key, prompt, resumed = self.next_key, self.rng.choice(PROMPTS), self.rng.random() < 0.15
        self.next_key += 1
        self.sequences[key] = _sequence(key, prompt, resumed=resumed)
        self.scheduler.add(self.sequences[key])
        self.rule.waiting.append(_Sample(key=key, prompt=prompt, begun=resumed))

    def admit(self) -> None:
        before = len(self.rule.running)
        self.scheduler.admit(VERSION, 0.0)
        self.rule.admit()
        self.admissions += len(self.rule.running) - before

    def finish_prefill(self) -> None:
        if writing := [s for s in self.rule.running if s.in_prefill]:
            sample = self.rng.choice(writing)
            _finish_prefill(self.scheduler, self.sequences[sample.key])
            self.rule.finish_prefill(sample)

    def preempt(self) -> None:
        if self.rule.running:
            sample = self.rng.choice(self.rule.running)
            self.scheduler.preempt(self.sequences[sample.key])
            self.rule.preempt(sample)

    def remove(self) -> None:
        if line := self.rng.choice((self.rule.running, self.rule.waiting)):
            sample = self.rng.choice(line)
            sequence = self.sequences.pop(sample.key)
            self.scheduler.remove(sequence)
            self.rule.remove(sample)
            assert self.scheduler.find(sequence.request.key) is None

    def turn_gate(self) -> None:
        self.scheduler.admitting = self.rule.admitting = not self.rule.admitting

    def assert_agree(self) -> None:
        scheduler, rule = self.scheduler, self.rule
        assert list(scheduler.running) == _keys(rule.running)
        assert _keys(scheduler.waiting) == _keys(rule.waiting)
        assert len(scheduler.waiting) == len(rule.waiting)
        assert _keys(scheduler.under_way) == _keys(rule.under_way)
        assert _keys(scheduler.decoding()) == _keys(s for s in rule.running if not s.in_prefill)
        assert [s.pages for s in scheduler.running.values()] == [s.pages for s in rule.running]
        assert all(scheduler.find(s.request.key) is s for s in self.sequences.values())


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_over_random_lives_everybody_comes_in_when_the_plain_rule_says(seed: int, prefix_cache: bool) -> None:
    both = _Both(random.Random(seed), prefix_cache=prefix_cache)
    for _ in range(1500):
        both.act()
        both.assert_agree()
    assert both.admissions > 100
    for sequence in both.sequences.values():
        both.scheduler.remove(sequence)
    both.scheduler.prefix.clear()
    assert both.scheduler.pool.free == both.scheduler.pool.total


def test_samples_of_a_prompt_wait_for_the_one_that_writes_it_and_others_pass_them() -> None:
    scheduler = _scheduler()
    for key, prompt in enumerate([PROMPTS[2], PROMPTS[2], PROMPTS[3], PROMPTS[2]]):
        scheduler.add(_sequence(key, prompt))
    scheduler.admit(VERSION, 0.0)
    assert list(scheduler.running) == [0, 2]
    assert _keys(scheduler.waiting) == [1, 3]
    _finish_prefill(scheduler, scheduler.running[0])
    scheduler.admit(VERSION, 0.0)
    assert list(scheduler.running) == [0, 2, 1, 3]


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[4]])
def test_once_a_prompt_is_written_all_its_samples_come_in_together(prompt: tuple[int, ...]) -> None:
    scheduler = _scheduler(max_batch=8)
    for key in range(6):
        scheduler.add(_sequence(key, prompt))
    scheduler.admit(VERSION, 0.0)
    shareable = (len(prompt) - 1) // PAGE_TOKENS
    assert list(scheduler.running) == ([0] if shareable else [*range(6)]), "nothing to wait for: no waiting"
    if shareable:
        _finish_prefill(scheduler, scheduler.running[0])
    scheduler.admit(VERSION, 0.0)
    assert list(scheduler.running) == [*range(6)]
    assert len({tuple(s.pages[:shareable]) for s in scheduler.running.values()}) == 1


@pytest.mark.parametrize("how", ["preempted", "removed"])
def test_a_writer_that_leaves_holds_nobody_up(how: str) -> None:
    scheduler = _scheduler(max_batch=2)
    leader, follower = _sequence(0, PROMPTS[2]), _sequence(1, PROMPTS[2])
    scheduler.add(leader)
    scheduler.add(follower)
    scheduler.admit(VERSION, 0.0)
    assert list(scheduler.running) == [0]
    if how == "preempted":
        scheduler.preempt(leader)
    else:
        scheduler.remove(leader)
    scheduler.admit(VERSION, 0.0)
    assert list(scheduler.running) == [0 if how == "preempted" else 1]


def test_without_a_prefix_cache_samples_of_a_prompt_come_in_together() -> None:
    scheduler = _scheduler(prefix_cache=False)
    for key in range(3):
        scheduler.add(_sequence(key, PROMPTS[2]))
    scheduler.admit(VERSION, 0.0)
    assert list(scheduler.running) == [0, 1, 2]


def test_while_nobody_new_is_admitted_those_under_way_come_in_past_the_others() -> None:
    scheduler = _scheduler()
    scheduler.add(_sequence(0, PROMPTS[0]))
    scheduler.admit(VERSION, 0.0)
    scheduler.add(_sequence(1, PROMPTS[1]))
    scheduler.add(_sequence(2, PROMPTS[2], resumed=True))
    scheduler.preempt(scheduler.running[0])
    scheduler.admitting = False
    assert _keys(scheduler.under_way) == [0, 2]
    scheduler.admit(VERSION, 0.0)
    assert list(scheduler.running) == [0, 2]
    scheduler.admitting = True
    scheduler.admit(VERSION, 0.0)
    assert list(scheduler.running) == [0, 2, 1]


def test_a_line_is_walked_only_as_far_as_somebody_may_come_in() -> None:
    class Walked(WaitingLine):
        steps = 0

        def __iter__(self) -> Iterator[LiveSequence]:
            for sequence in super().__iter__():
                self.steps += 1
                yield sequence

    line = Walked()
    for key in range(100):
        line.append(_sequence(key, PROMPTS[key == 1]))
    held: set[bytes] = set()
    came = []
    for sequence in line.in_turn(held):
        came.append(sequence.key)
        held.add(sequence.prompt_bytes)
    assert (came, line.steps) == ([0, 1], 2)
    assert list(line.in_turn(held)) == []
    assert line.steps == 2
