"""A machine that does not exist: true costs and acceptance known, noise and stalls included.

Tests run controllers on it and count regret in expectation, so that only decisions are judged, not luck.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from controller.auto import AutoController
from controller.calibration import Calibration, Sample, fit, sweep_plan
from controller.config import ControllerConfig
from controller.decide import Controller, build_controller
from controller.types import (
    AR,
    POLICY,
    Assignment,
    DraftCost,
    DrafterTraits,
    EngineTraits,
    PartShape,
    RoundFacts,
    RoundLoad,
    RoundPlan,
    SequenceLoad,
    SequenceOutcome,
)

SMALL_POLICY = PartShape(
    name=POLICY,
    weight_bytes=270_000_000,
    flops_per_row=2.7e8,
    kv_bytes_per_token=23_040,
    flops_per_context_token=69_120.0,
)
"""Roughly a 135M-parameter dense decoder in 16 bits."""

SMALL_W4 = PartShape(
    name="w4",
    weight_bytes=90_000_000,
    flops_per_row=2.7e8,
    kv_bytes_per_token=23_040,
    flops_per_context_token=69_120.0,
)

HISTORY = PartShape(
    name="history",
    weight_bytes=0,
    flops_per_row=0.0,
    kv_bytes_per_token=0,
    flops_per_context_token=0.0,
    rows_per_draft_token=0,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrueCost:
    """What a part really costs, in the cost model's own terms."""

    bandwidth_bytes_per_s: float
    flops_per_s: float
    context_factor: float
    overhead_s: float
    overhead_s_per_row: float


SMALL_COSTS: Mapping[str, TrueCost] = {
    POLICY: TrueCost(
        bandwidth_bytes_per_s=52e9,
        flops_per_s=0.85e12,
        context_factor=3.0,
        overhead_s=2e-4,
        overhead_s_per_row=1.5e-5,
    ),
    "w4": TrueCost(
        bandwidth_bytes_per_s=48e9,
        flops_per_s=0.9e12,
        context_factor=3.0,
        overhead_s=1.5e-4,
        overhead_s_per_row=2e-5,
    ),
}
"""Two desktop cores: plain decoding 5.5 ms at one sequence and 15 ms at 32, a draft pass 2.1 ms."""


@functools.lru_cache(maxsize=128)
def _fitted(samples: tuple[Sample, ...], shapes: tuple[tuple[str, PartShape], ...]) -> Calibration:
    """Return the fit of a sweep. Most tests sweep the same few machines, and a fit is dear."""
    return fit(samples, dict(shapes), key="simulated")


Hazard = Callable[[str, int, int, int], float]
"""(drafter, sequence key, position from 1, round) -> chance that the draft token is kept."""


def traits_of(
    shapes: Mapping[str, PartShape],
    *,
    max_gamma: int = 8,
    max_batch: int = 32,
    gamma_per_sequence: bool = True,
) -> EngineTraits:
    """Return traits of an engine with every drafter of ``shapes``."""
    drafters = tuple(DrafterTraits(name=n, max_gamma=max_gamma) for n in shapes if n != POLICY)
    return EngineTraits(
        engine="simulated",
        verify_modes=("coupled",),
        gamma_per_sequence=gamma_per_sequence,
        drafters=drafters,
        numerics="exact",
        in_flight=("drain",),
        max_batch=max_batch,
        max_context_tokens=4096,
    )


@dataclass(kw_only=True)
class SimulatedMachine:
    """One machine with one model. ``round_index`` of loads is its only clock."""

    shapes: Mapping[str, PartShape]
    costs: Mapping[str, TrueCost] = field(default_factory=lambda: dict(SMALL_COSTS))
    hazard: Hazard = lambda drafter, key, position, round_index: 0.85
    slowdown: Callable[[int], float] = lambda round_index: 1.0
    """Of the memory, by round."""
    misfit: Callable[[str, int, int], float] = lambda part, rows, sequences: 1.0
    """What the roofline form misses, by part, rows and sequences."""
    noise_frac: float = 0.03
    stall_chance: float = 0.02
    stall_s: float = 0.008
    other_s: float = 4e-4
    other_s_per_row: float = 2e-5
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def forward_s(
        self, part: str, *, rows: int, sequences: int, read: float, context: float, round_index: int
    ) -> float:
        """Return the true seconds of a forward, without noise."""
        shape, cost = self.shapes[part], self.costs[part]
        bandwidth, rate = cost.bandwidth_bytes_per_s / self.slowdown(round_index), cost.flops_per_s
        linears = max(shape.weight_bytes / bandwidth, shape.flops_per_row * rows / rate)
        attention = max(
            shape.kv_bytes_per_token * read / bandwidth, shape.flops_per_context_token * context / rate
        )
        main = linears + cost.context_factor * attention
        whole = main + cost.overhead_s + cost.overhead_s_per_row * rows
        return whole * self.misfit(part, rows, sequences)

    def calibration(self, *, max_batch: int = 32) -> Calibration:
        """Return the fit of a noisy sweep at round 0."""
        samples = []
        for p in sweep_plan(self.shapes, max_batch):
            seconds = self.forward_s(
                p.part,
                rows=p.rows,
                sequences=p.sequences,
                read=p.context_tokens * p.sequences,
                context=p.context_tokens * p.rows,
                round_index=0,
            )
            samples.append(
                Sample(
                    part=p.part,
                    rows=p.rows,
                    sequences=p.sequences,
                    context_tokens=p.context_tokens,
                    seconds=seconds * self._noise(),
                )
            )
        return _fitted(tuple(samples), tuple(self.shapes.items()))

    def _noise(self) -> float:
        return float(np.exp(self.noise_frac * self._rng.standard_normal()))

    def _draft_passes(self, asked: list[tuple[int, int]]) -> list[list[int]]:
        """Return per pass the contexts of its rows."""
        return [[c for g, c in asked if g >= level] for level in range(1, max(g for g, _ in asked) + 1)]

    def true_s(self, load: RoundLoad, plan: RoundPlan) -> float:
        """Return the seconds of a round, without noise."""
        r, total = load.round_index, 0.0
        for drafter, asked in self._asked(load, plan).items():
            if self.shapes[drafter].rows_per_draft_token:
                for alive in self._draft_passes(asked):
                    total += self.forward_s(
                        drafter,
                        rows=len(alive),
                        sequences=len(alive),
                        read=sum(alive),
                        context=sum(alive),
                        round_index=r,
                    )
        rows = sum(1 + plan.of(s.key).gamma for s in load.sequences)
        return total + self._verify_s(load, plan) + self.other_s + self.other_s_per_row * rows

    def _verify_s(self, load: RoundLoad, plan: RoundPlan) -> float:
        """Return the true seconds of the policy's forward, each share of it over the rows that need it."""
        starts: list[tuple[float, int]] = []
        for s in load.sequences:
            a = plan.of(s.key)
            reuse = self.shapes[a.drafter].reuse_frac if a.gamma else 0.0
            starts += [(0.0, s.context_tokens)] + [(reuse, s.context_tokens)] * a.gamma
        marks = sorted({start for start, _ in starts})
        total = 0.0
        for begin, end in pairwise([*marks, 1.0]):
            contexts = [context for start, context in starts if start <= begin]
            total += (end - begin) * self.forward_s(
                POLICY,
                rows=len(contexts),
                sequences=len(load.sequences),
                read=sum(s.context_tokens for s in load.sequences),
                context=sum(contexts),
                round_index=load.round_index,
            )
        return total

    def _asked(self, load: RoundLoad, plan: RoundPlan) -> dict[str, list[tuple[int, int]]]:
        asked: dict[str, list[tuple[int, int]]] = {}
        for s in load.sequences:
            a = plan.of(s.key)
            if a.gamma:
                asked.setdefault(a.drafter, []).append((a.gamma, s.context_tokens))
        return asked

    def true_tokens(self, load: RoundLoad, plan: RoundPlan) -> float:
        """Return the tokens a round commits in expectation."""
        total = float(len(load.sequences))
        for s in load.sequences:
            a, alive = plan.of(s.key), 1.0
            for position in range(1, a.gamma + 1):
                alive *= self.hazard(a.drafter, s.key, position, load.round_index)
                total += alive
        return total

    def best_plan(self, load: RoundLoad) -> RoundPlan:
        """Return the best plan among plain decoding and one drafter at one gamma for all."""
        best, best_rate = RoundPlan(assignments={}, reason="oracle"), 0.0
        plans = [best]
        for name in self.shapes:
            if name == POLICY:
                continue
            for gamma in range(1, 9):
                assignments: dict[int, Assignment] = {}
                for s in load.sequences:
                    most = gamma if self.shapes[name].rows_per_draft_token else 0
                    ready = s.history_match_tokens.get(name, most)
                    g = min(gamma, ready, s.remaining_tokens - 1)
                    if g > 0:
                        assignments[s.key] = Assignment(drafter=name, gamma=g)
                plans.append(RoundPlan(assignments=assignments, reason="oracle"))
        for plan in plans:
            rate = self.true_tokens(load, plan) / self.true_s(load, plan)
            if rate > best_rate:
                best, best_rate = plan, rate
        return best

    def run(self, load: RoundLoad, plan: RoundPlan) -> RoundFacts:
        """Run a round with noise and stalls and return its facts."""
        drafts = []
        for drafter, asked in self._asked(load, plan).items():
            drafts.append(self._draft(load, drafter, asked))
        outcomes = tuple(self._outcome(load, s, plan.of(s.key)) for s in load.sequences)
        gammas = [o.gamma for o in outcomes]
        verify_s = self._verify_s(load, plan) * self._noise()
        if self._rng.random() < self.stall_chance:
            verify_s += self.stall_s
        rows = len(gammas) + sum(gammas)
        other_s = (self.other_s + self.other_s_per_row * rows) * self._noise()
        draft_s = sum(d.seconds for d in drafts)
        return RoundFacts(
            round_index=load.round_index,
            policy_version=load.policy_version,
            batch=len(gammas),
            prefill_rows=0,
            verify_rows=rows,
            context_tokens=sum(o.context_tokens * (o.gamma + 1) for o in outcomes),
            draft_s=draft_s,
            verify_s=verify_s,
            commit_s=other_s / 2,
            total_s=draft_s + verify_s + other_s,
            drafts=tuple(drafts),
            outcomes=outcomes,
        )

    def _draft(self, load: RoundLoad, drafter: str, asked: list[tuple[int, int]]) -> DraftCost:
        passes, seconds = [], 2e-5 * len(asked)
        if self.shapes[drafter].rows_per_draft_token:
            passes = self._draft_passes(asked)
            seconds = 0.0
            for alive in passes:
                seconds += self._noise() * self.forward_s(
                    drafter,
                    rows=len(alive),
                    sequences=len(alive),
                    read=sum(alive),
                    context=sum(alive),
                    round_index=load.round_index,
                )
        return DraftCost(
            drafter=drafter,
            passes=len(passes),
            rows=sum(len(p) for p in passes),
            context_tokens=sum(sum(p) for p in passes),
            seconds=seconds,
        )

    def _outcome(self, load: RoundLoad, s: SequenceLoad, a: Assignment) -> SequenceOutcome:
        accepted = 0
        while accepted < a.gamma and self._rng.random() < self.hazard(
            a.drafter, s.key, accepted + 1, load.round_index
        ):
            accepted += 1
        committed = min(accepted + 1, s.remaining_tokens)
        return SequenceOutcome(
            key=s.key,
            drafter=a.drafter if a.gamma else AR,
            gamma=a.gamma,
            accepted=min(accepted, committed),
            committed=committed,
            context_tokens=s.context_tokens,
            censored=committed == s.remaining_tokens,
            finished=committed == s.remaining_tokens,
        )


def load_of(
    batch: int,
    *,
    round_index: int = 0,
    context_tokens: int = 300,
    generated_tokens: int = 100,
    remaining_tokens: int = 500,
    policy_version: int = 0,
    ready: Mapping[str, int] | None = None,
    first_key: int = 0,
    waiting: int = 0,
) -> RoundLoad:
    """Return a round of ``batch`` equal sequences."""
    sequences = tuple(
        SequenceLoad(
            key=first_key + i,
            context_tokens=context_tokens,
            generated_tokens=generated_tokens,
            remaining_tokens=remaining_tokens,
            history_match_tokens=ready or {},
        )
        for i in range(batch)
    )
    return RoundLoad(
        round_index=round_index, policy_version=policy_version, sequences=sequences, waiting=waiting
    )


PLAIN = RoundPlan(assignments={}, reason="plain")
"""Every sequence decodes without drafts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regret:
    """How a controller did on a machine, in expectation."""

    of_best: float
    """Tokens per second over those of the best plan, each round in the same state of the machine."""

    of_ar: float
    """Tokens per second over those of plain decoding."""

    plans: tuple[RoundPlan, ...]


def regret_of(
    machine: SimulatedMachine,
    controller: Controller,
    load_at: Callable[[int], RoundLoad],
    *,
    rounds: int,
    phase: Callable[[int], Hashable] = lambda round_index: 0,
    since: int = 0,
) -> Regret:
    """Run ``rounds`` rounds and compare each from ``since`` on with the best that was possible.

    ``phase`` names the state of machine, acceptance and load; within one, the best plan is the same.
    """
    tokens = seconds = best_tokens = ar_tokens = now_s = 0.0
    rates: dict[Hashable, tuple[float, float]] = {}
    plans = []
    for r in range(rounds):
        load = load_at(r)
        plan = controller.decide(load, now_s=now_s)
        facts = machine.run(load, plan)
        controller.observe(facts)
        now_s += facts.total_s
        plans.append(plan)
        if r < since:
            continue
        if phase(r) not in rates:
            best = machine.best_plan(load)
            best_rate = machine.true_tokens(load, best) / machine.true_s(load, best)
            rates[phase(r)] = best_rate, len(load.sequences) / machine.true_s(load, PLAIN)
        took_s = machine.true_s(load, plan)
        tokens += machine.true_tokens(load, plan)
        seconds += took_s
        best_tokens += took_s * rates[phase(r)][0]
        ar_tokens += took_s * rates[phase(r)][1]
    return Regret(of_best=tokens / best_tokens, of_ar=tokens / ar_tokens, plans=tuple(plans))


def drain_s(machine: SimulatedMachine, controller: Controller, lengths: Sequence[int]) -> float:
    """Return the simulated seconds until sequences of these lengths have all finished."""
    running = {
        key: SequenceLoad(key=key, context_tokens=64, generated_tokens=0, remaining_tokens=length)
        for key, length in enumerate(lengths)
    }
    now_s, round_index = 0.0, 0
    while running:
        load = RoundLoad(round_index=round_index, policy_version=0, sequences=tuple(running.values()))
        facts = machine.run(load, controller.decide(load, now_s=now_s))
        controller.observe(facts)
        now_s, round_index = now_s + facts.total_s, round_index + 1
        for o in facts.outcomes:
            s = running.pop(o.key)
            if not o.finished:
                running[o.key] = s._replace(
                    context_tokens=s.context_tokens + o.committed,
                    generated_tokens=s.generated_tokens + o.committed,
                    remaining_tokens=s.remaining_tokens - o.committed,
                )
    return now_s


W4_ONLY = {POLICY: SMALL_POLICY, "w4": SMALL_W4}
HISTORY_ONLY = {POLICY: SMALL_POLICY, "history": HISTORY}
BOTH = {**W4_ONLY, "history": HISTORY}
"""Part shapes of a machine, by the drafters it has."""


def constant(acceptance: float) -> Hazard:
    """Return a hazard in which every draft token is accepted with the same probability."""
    return lambda drafter, key, position, round_index: acceptance


def auto(machine: SimulatedMachine, **settings: object) -> AutoController:
    """Return a fresh ``auto`` controller calibrated on ``machine``."""
    built = build_controller(
        ControllerConfig(**settings),  # type: ignore[arg-type]
        traits_of(machine.shapes),
        machine.shapes,
        machine.calibration(),
    )
    assert isinstance(built, AutoController)
    return built
