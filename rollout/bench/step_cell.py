"""One batch at one context: its rounds, one kind after the other on the same live sequences.

A visit submits sequences whose contexts are made up, not computed, and kept from the first time on, and then
runs real rounds in turn: a plain one, then one with every number of drafts. So all kinds meet the same
machine within a second, and memory speed is read just before and after. Contexts grow by the tokens
committed; what a round really had to read is in its facts, and bounds are computed from these.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from controller.types import AR, AR_ASSIGNMENT, POLICY, Assignment, RoundFacts, RoundLoad, RoundPlan
from rollout.bench.arms import Work
from rollout.bench.bound import Bounds, Peaks, bounds
from rollout.bench.choosing import WAYS, ChoosingClock
from rollout.bench.cost_ratio import CostRatio
from rollout.bench.machine import MemorySpeed
from rollout.bench.schedule import Note
from rollout.engine.native.engine import NativeEngine
from rollout.errors import RolloutError

VISIT_S = 0.8
"""No further turn starts after this, so that large batches do not take a visit's whole time."""

LEAST_TURNS, MOST_TURNS = 3, 5
"""Turns of a visit. The first warms up and does not count."""

ROUND_OVER_BOUND, DRAFT_OVER_PLAIN, MEASURES_S = 1.6, 0.5, 0.4
"""For telling ahead how long it will take: a round over its bound, a draft over a plain round, and the
seconds of a visit's readings of memory speed and of choosing."""

SPARE_TOKENS = 48
"""What a sequence may commit before the last of its batch has computed the rest of its prompt."""


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Kind:
    """What is timed: plain rounds, passes of a drafter, or verification of ``gamma`` drafts per sequence."""

    name: str
    """``ar``, ``draft`` or ``verify``."""

    gamma: int = 0


PLAIN, DRAFT = Kind(name=AR), Kind(name="draft")


@dataclass(kw_only=True, slots=True)
class Timings:
    """Rounds, or draft passes, of one kind: their seconds, and what they did in all."""

    seconds: list[float] = field(default_factory=list)
    """A round's without drafting; a draft pass's mean within its round."""

    rows: float = 0.0
    """Rows, and the tokens below, are sums over ``seconds``."""

    read_tokens: float = 0.0
    context_tokens: float = 0.0
    verify_s: list[float] = field(default_factory=list)
    """Of rounds: the forward and choosing; the rest of ``seconds`` is committing and preparing."""

    @property
    def median_s(self) -> float:
        """The median of one."""
        return statistics.median(self.seconds)

    @property
    def mean_rows(self) -> float:
        """Rows of one."""
        return self.rows / len(self.seconds)

    def add_round(self, facts: RoundFacts) -> None:
        """Count a round, drafting left out."""
        self.seconds.append(facts.total_s - facts.draft_s)
        self.verify_s.append(facts.verify_s)
        self.rows += facts.verify_rows
        self.read_tokens += sum(o.context_tokens for o in facts.outcomes)
        self.context_tokens += facts.context_tokens

    def add_draft(self, facts: RoundFacts, drafter: str) -> None:
        """Count a round's passes of a drafter as one: their mean."""
        for cost in facts.drafts:
            if cost.drafter == drafter and cost.passes:
                self.seconds.append(cost.seconds / cost.passes)
                self.rows += cost.rows / cost.passes
                self.read_tokens += cost.context_tokens / cost.passes
                self.context_tokens += cost.context_tokens / cost.passes


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """What one visit measured."""

    timings: Mapping[Kind, Timings]
    bounds: Mapping[Kind, Bounds]
    """Of one round or pass, at the memory speed of this visit."""

    peaks: Peaks
    """What a plain round's bounds were computed from."""

    choosing_s: Mapping[Kind, float]
    """Seconds of choosing as many tokens as a round of that kind does."""

    choosing_in_s: Mapping[str, float]
    """By way of sampling: seconds of choosing as many tokens as a plain round does in that way."""

    def cost_s(self, kind: Kind) -> float:
        """Return the median seconds of one round or pass."""
        return self.timings[kind].median_s

    def choosing_share(self, way: str) -> float:
        """Return what choosing takes of a plain round that samples in one of ``WAYS``."""
        choosing_s = self.choosing_in_s[way]
        return choosing_s / (self.cost_s(PLAIN) - self.choosing_s[PLAIN] + choosing_s)


@dataclass(kw_only=True, slots=True)
class StepCell:
    """Everything measured at one batch and context."""

    batch: int
    context_tokens: int
    engine: NativeEngine
    work: Work
    """Prompts of the context's length; its limits leave room for every turn."""

    gammas: tuple[int, ...]
    """Empty: plain rounds only."""

    drafter: str | None
    choosing: ChoosingClock
    memory: MemorySpeed
    rate_of: Callable[[str], float]
    """Operations per second of a part's kernels at many rows, as measured last."""

    ratios: list[CostRatio]
    value_of: Mapping[str, Callable[[Visit], float]]
    """By ratio: what a visit says of it."""

    min_visits: int
    visits: list[Visit] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        """Names the cell."""
        return f"b{self.batch}_c{self.context_tokens}_"

    @property
    def open(self) -> bool:
        """Whether another visit would help."""
        return len(self.visits) < self.min_visits or any(ratio.wants_values for ratio in self.ratios)

    @property
    def settled(self) -> bool:
        """Whether every claim is known well enough, and every cost was seen often enough."""
        return len(self.visits) >= self.min_visits and all(ratio.settled for ratio in self.ratios)

    @property
    def least_visit_s(self) -> float:
        """About what a visit will take: its rounds at what they are bound to cost, and some more."""
        peaks = Peaks(read_bytes_per_s=self.memory.measure(), flops_per_s=self.rate_of(POLICY))
        shape, seconds = self.engine.part_shapes()[POLICY], MEASURES_S
        for gamma in (0, *self.gammas):
            rows = self.batch * (gamma + 1)
            bound = bounds(
                shape,
                peaks,
                rows=rows,
                read_tokens=self.batch * self.context_tokens,
                context_tokens=rows * self.context_tokens,
            )
            seconds += LEAST_TURNS * ROUND_OVER_BOUND * (1 + gamma * DRAFT_OVER_PLAIN) * bound.seconds
        return seconds

    def prepare(self, note: Note) -> None:
        """Make up the contexts once; their pages stay."""
        note(f"{self.prefix}: contexts")
        self.engine.make_up_prompts(self.work.prompts)

    def repeat(self, note: Note) -> None:
        """Make one visit."""
        number = len(self.visits) + 1
        note(f"{self.prefix}: visit {number}")
        run = f"{self.prefix}{number}"
        before = self.memory.measure()
        self.engine.make_up_prompts(self.work.prompts)  # those that other cells have driven out
        self._submit(run)
        try:
            self._until_decoding()
            timings = self._turns()
        finally:
            self._abort(run)
        choosing_s = {kind: self.choosing.seconds(round(t.mean_rows)) for kind, t in _rounds(timings)}
        choosing_in_s = {way: self.choosing.seconds_in(way, self.work.prompts) for way in WAYS}
        memory = max(before, self.memory.measure())
        visit = Visit(
            timings=timings,
            bounds={kind: self._bounds(kind, t, memory) for kind, t in timings.items()},
            peaks=Peaks(read_bytes_per_s=memory, flops_per_s=self.rate_of(POLICY)),
            choosing_s=choosing_s,
            choosing_in_s=choosing_in_s,
        )
        self.visits.append(visit)
        for ratio in self.ratios:
            ratio.values.append(self.value_of[ratio.claim.name](visit))

    def _submit(self, run: str) -> None:
        for request in self.work.requests(run=run):
            self.engine.add(request)

    def _abort(self, run: str) -> None:
        for request in self.work.requests(run=run):
            self.engine.abort(request.key, reason="the visit is over")

    def _until_decoding(self) -> None:
        """Run prompt rows until the whole batch decodes."""
        while (load := self._load()).prefill_tokens or load.waiting:
            self.engine.run_round(_plan(load, AR_ASSIGNMENT))
        if len(load.sequences) != self.batch:
            raise RolloutError(f"{self.prefix}: {len(load.sequences)} of {self.batch} sequences decode")

    def _turns(self) -> dict[Kind, Timings]:
        timings: dict[Kind, Timings] = {}
        started = time.perf_counter()
        for turn in range(MOST_TURNS):
            for gamma in (0, *self.gammas):
                facts = self._round(gamma)
                if turn > 0:
                    self._count(timings, gamma, facts)
            if turn + 1 >= LEAST_TURNS and time.perf_counter() - started > VISIT_S:
                break
        return timings

    def _round(self, gamma: int) -> RoundFacts:
        assignment = AR_ASSIGNMENT
        if gamma:
            assert self.drafter is not None, "draft lengths without a drafter"
            assignment = Assignment(drafter=self.drafter, gamma=gamma)
        facts = self.engine.run_round(_plan(self._load(), assignment)).facts
        if facts.verify_rows != self.batch * (gamma + 1) or facts.prefill_rows:
            raise RolloutError(
                f"{self.prefix}: a round of {facts.verify_rows} rows where {self.batch * (gamma + 1)} were "
                f"planned: {sum(d.failures for d in facts.drafts)} sequences could not be drafted for"
            )
        return facts

    def _count(self, timings: dict[Kind, Timings], gamma: int, facts: RoundFacts) -> None:
        kind = Kind(name="verify", gamma=gamma) if gamma else PLAIN
        timings.setdefault(kind, Timings()).add_round(facts)
        if gamma and self.drafter is not None:
            timings.setdefault(DRAFT, Timings()).add_draft(facts, self.drafter)

    def _bounds(self, kind: Kind, t: Timings, memory: float) -> Bounds:
        part = self.drafter if kind == DRAFT and self.drafter is not None else POLICY
        count = len(t.seconds)
        return bounds(
            self.engine.part_shapes()[part],
            Peaks(read_bytes_per_s=memory, flops_per_s=self.rate_of(part)),
            rows=t.rows / count,
            read_tokens=t.read_tokens / count,
            context_tokens=t.context_tokens / count,
        )

    def _load(self) -> RoundLoad:
        return self.engine.load(look_up=_never)


def _rounds(timings: Mapping[Kind, Timings]) -> list[tuple[Kind, Timings]]:
    return [(kind, t) for kind, t in timings.items() if kind != DRAFT]


def _plan(load: RoundLoad, assignment: Assignment) -> RoundPlan:
    return RoundPlan(assignments={s.key: assignment for s in load.sequences}, reason="steps")


def _never(load: RoundLoad) -> bool:
    """Say that what drafters have ready is not wanted: the plan is fixed."""
    return False


def visit_tokens(gammas: Sequence[int]) -> int:
    """Return the most tokens a sequence commits in one visit."""
    return MOST_TURNS * (1 + sum(gamma + 1 for gamma in gammas)) + SPARE_TOKENS
