"""Arms of our own: an engine each, driven by a fresh controller per run, and the check that no token differs.

Arms that are compared run in lockstep: the arm whose share of tokens is smallest runs its next round, and
only its own rounds count as its time. So the arms meet the same machine within a fraction of a second, which
matters where its speed changes by 40% within minutes. A round of a policy larger than the caches streams all
weights through them; one of a small policy finds there what the other arms left, every arm alike.

The engines share the policy's weights and nothing else. For a run only the arm's drafters are switched on, so
plain decoding pays for none. Nothing is carried from run to run: a controller starts with what calibration
knows, no prompt page is kept, and every run names its prompts anew, which is what the ``history`` drafter
files texts under, so it cannot look up the answers of an earlier run.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.types import AR, POLICY, RoundFacts
from rollout.bench.pairing import Timed
from rollout.bench.streams import StreamTimes
from rollout.bench.summary import RoundSummary
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.memory import EngineMemory
from rollout.errors import RolloutError
from rollout.seeds import sample_seed
from rollout.types import Completion, Request, SamplingParams

T = TypeVar("T")

PACE_FORWARDS = 5
"""Reference forwards before and after a run: the median of ten survives a stall, and costs under 0.2 s."""

PACE_CONTEXT_TOKENS = 64


class TextDiffersError(RolloutError):
    """Two runs of the same requests gave different tokens: there is nothing to compare, and a bug to find."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What every arm is asked to do: one sequence per row."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    """By row."""

    ignore_eos: bool
    temperature: float
    run_seed: int
    rows_at_once: int = 0
    """Rows in the engine at once, the next one submitted as one ends; 0: all."""

    names: tuple[str, ...] = ()
    """By row, what its seed is made from, so that a row keeps its text in other work; empty: its number."""

    def requests(self, *, run: str) -> list[Request]:
        """Return one request per row; ``run`` makes their names unique, seeds depend on the row alone."""
        names = self.names or [f"bench/{row}" for row in range(len(self.prompts))]
        return [
            Request(
                prompt_uid=f"{run}/{row}",
                sample_index=0,
                prompt_ids=ids,
                params=SamplingParams(
                    temperature=self.temperature, max_tokens=most, ignore_eos=self.ignore_eos
                ),
                seed=sample_seed(run_seed=self.run_seed, trainer_step=0, prompt_uid=name, sample_index=0),
            )
            for row, (ids, most, name) in enumerate(zip(self.prompts, self.max_tokens, names, strict=True))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmSpec:
    """One arm of our own: which drafters are on and who decides."""

    name: str
    drafters: tuple[str, ...]
    controller: ControllerConfig


def arm_specs(controller: ControllerConfig, drafters: Sequence[str], *, gamma: int) -> dict[str, ArmSpec]:
    """Return every arm the engine's drafters allow, by name; fixed arms draft ``gamma`` tokens."""
    specs = [ArmSpec(name=AR, drafters=(), controller=replace(controller, kind="ar"))]
    specs += [fixed_arm(controller, name, gamma=gamma) for name in drafters]
    specs.append(ArmSpec(name="auto", drafters=tuple(drafters), controller=replace(controller, kind="auto")))
    return {spec.name: spec for spec in specs}


def fixed_arm(controller: ControllerConfig, drafter: str, *, gamma: int) -> ArmSpec:
    """Return the arm that always drafts ``gamma`` tokens with ``drafter``, at every batch."""
    return ArmSpec(
        name=drafter,
        drafters=(drafter,),
        controller=replace(controller, kind="fixed", drafter=drafter, gamma=gamma),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of one arm of our own."""

    timed: Timed
    texts: tuple[tuple[int, ...], ...]
    """Committed ids by row."""

    summary: RoundSummary
    alarms: int
    """Times the controller's watchdog asked for something: none is expected."""

    streams: StreamTimes
    memory: EngineMemory
    """What its engine held after the round that left most KV in use."""


class Lane:
    """One run under way: an engine, the arm's drafters, a fresh controller, and the time of its rounds."""

    def __init__(
        self, engine: NativeEngine, spec: ArmSpec, work: Work, *, run: str, calibration: Calibration | None
    ) -> None:
        engine.use_drafters(spec.drafters)
        known = calibration if spec.controller.kind == "auto" else None
        self.seconds = 0.0
        """Time spent on this run, and this run's clock: what other lanes do in between is not seen."""
        self.committed = 0
        self._engine = engine
        self._controller = build_controller(spec.controller, engine.traits, engine.part_shapes(), known)
        for name in spec.drafters:
            self._controller.drafter_built(name, engine.policy_version)
        self._requests = work.requests(run=run)
        self._waiting = deque(self._requests)
        self._at_once = work.rows_at_once or len(self._requests)
        self._facts: list[RoundFacts] = []
        self._done: list[Completion] = []
        self._alarms = 0
        self._streams = StreamTimes()
        self._memory = engine.memory()

    @property
    def busy(self) -> bool:
        """Whether rows are left."""
        return self._engine.busy

    def submit(self) -> None:
        """Add as many rows as may be in the engine at once."""
        started = time.perf_counter()
        first = [self._waiting.popleft() for _ in range(min(self._at_once, len(self._waiting)))]
        for request in first:
            self._engine.add(request)
        self.seconds += time.perf_counter() - started
        self._streams.submitted([r.key for r in first], at_s=self.seconds)

    def step(self) -> None:
        """Run one round."""
        started = time.perf_counter()
        load = self._engine.load(look_up=self._controller.wants_look_up)
        plan = self._controller.decide(load, now_s=self.seconds)
        outcome = self._engine.run_round(plan)
        self._controller.observe(outcome.facts)
        self._alarms += len(self._controller.take_actions())
        self._facts.append(outcome.facts)
        self._done.extend(outcome.completions)
        self.committed += outcome.facts.committed
        following = [self._waiting.popleft() for _ in outcome.completions if self._waiting]
        for request in following:
            self._engine.add(request)
        self.seconds += time.perf_counter() - started
        # What follows is the benchmark's own work, and no part of the run's time.
        self._streams.round(outcome, at_s=self.seconds)
        self._streams.submitted([r.key for r in following], at_s=self.seconds)
        self._memory = max(self._memory, self._engine.memory(), key=_kv_used)

    def result(self, *, pace_s: float, lockstep: int) -> Run:
        """Return the finished run."""
        summary = RoundSummary.of(self._facts)
        return Run(
            timed=Timed(
                makespan_s=self.seconds, pace_s=pace_s, plain=summary.plain_work(), lockstep=lockstep
            ),
            texts=_texts(self._requests, self._done),
            summary=summary,
            alarms=self._alarms,
            streams=self._streams,
            memory=self._memory,
        )


class EngineArms:
    """Runs arms, one alone or several in lockstep."""

    def __init__(
        self,
        engine: NativeEngine,
        calibration: Calibration | None,
        *,
        another: Callable[[], NativeEngine] | None = None,
    ) -> None:
        """``another`` makes one more engine on the same weights, for the second and later lanes."""
        self.engine = engine
        self.all_drafters = engine.traits.drafters
        """All that can be switched on; the engine must still have them all."""
        self._engines = [engine]
        self._another = another
        self.calibration = calibration
        """What ``auto`` starts with in every run."""
        self._runs = 0

    def run(self, spec: ArmSpec, work: Work) -> Run:
        """Run until the last row has ended. The engine must be idle."""
        return self.together([spec], work)[spec.name]

    def together(self, specs: Sequence[ArmSpec], work: Work) -> dict[str, Run]:
        """Run the same work on every arm, round by round in turn. Returns the runs by arm's name."""
        self._runs += 1
        lanes = {
            spec.name: Lane(
                engine, spec, work, run=f"run{self._runs}-{spec.name}", calibration=self.calibration
            )
            for spec, engine in zip(specs, self._engines_for(specs), strict=True)
        }

        def drain() -> None:
            for lane in lanes.values():
                lane.submit()
            busy = list(lanes.values())
            while busy:
                # The texts are the same, so equal shares of tokens are equal shares of the work.
                behind = min(busy, key=lambda lane: lane.committed)
                behind.step()
                if not behind.busy:
                    busy.remove(behind)

        pace_s = timed(self.engine, drain)[1]
        return {name: lane.result(pace_s=pace_s, lockstep=self._runs) for name, lane in lanes.items()}

    def _engines_for(self, specs: Sequence[ArmSpec]) -> list[NativeEngine]:
        while len(self._engines) < len(specs):
            assert self._another is not None, "several arms at once need several engines"
            self._engines.append(self._another())
        return self._engines[: len(specs)]

    def close(self) -> None:
        """Release every engine."""
        for engine in self._engines:
            engine.close()


def timed(engine: NativeEngine, work: Callable[[], T]) -> tuple[T, float]:
    """Return what ``work`` returns, and the seconds of a reference forward just before and after it."""
    gc.collect()  # what earlier runs left must not be collected on this one's time
    gc.freeze()  # as every host does, so that the libraries' objects are not walked again and again
    paces = reference_forwards(engine)
    returned = work()
    return returned, statistics.median([*paces, *reference_forwards(engine)])


def reference_forwards(engine: NativeEngine) -> list[float]:
    """Return the seconds of a few plain one-row forwards: what reading the weights once takes right now."""
    engine.time_forward(POLICY, rows=1, context_tokens=PACE_CONTEXT_TOKENS)
    return [
        engine.time_forward(POLICY, rows=1, context_tokens=PACE_CONTEXT_TOKENS) for _ in range(PACE_FORWARDS)
    ]


def _kv_used(memory: EngineMemory) -> int:
    return memory.kv_used


def _texts(requests: Sequence[Request], done: Sequence[Completion]) -> tuple[tuple[int, ...], ...]:
    by_uid = {c.prompt_uid: c for c in done}
    for completion in done:
        if completion.error is not None:
            raise RolloutError(f"row {completion.prompt_uid} ended as {completion.error}")
    if len(by_uid) != len(requests):
        raise RolloutError(f"{len(requests)} rows were submitted and {len(by_uid)} ended")
    return tuple(by_uid[r.prompt_uid].token_ids for r in requests)


@dataclass(kw_only=True, slots=True)
class TextGuard:
    """Holds the texts of the first run of some work and refuses any other."""

    where: str
    """Named when a run differs."""

    texts: tuple[tuple[int, ...], ...] | None = None
    runs_by_arm: dict[str, int] = field(default_factory=dict)
    """Runs that were checked and equal."""

    def check(self, arm: str, texts: tuple[tuple[int, ...], ...]) -> None:
        """Raise ``TextDiffersError``, naming row and position, unless these are the first run's texts."""
        if self.texts is None:
            self.texts = texts
        elif texts != self.texts:
            raise TextDiffersError(f"{self.where}{arm}: {_first_difference(self.texts, texts)}")
        self.runs_by_arm[arm] = self.runs_by_arm.get(arm, 0) + 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """New tokens by row."""
        assert self.texts is not None, "no run was checked yet"
        return tuple(len(text) for text in self.texts)


def _first_difference(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> str:
    if len(expected) != len(found):
        return f"{len(found)} rows instead of {len(expected)}"
    for row, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            shown = [str(text[at]) if at < len(text) else "the end" for text in (a, b)]
            return f"row {row} differs at its new token {at}: {shown[1]} instead of {shown[0]}"
    raise AssertionError("the texts are equal")
