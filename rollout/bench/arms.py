"""Arms of our own: one engine, driven by a fresh controller per run, and the check that no token differs.

All arms of a policy share one engine, weights and KV memory included. For a run only the arm's drafters are
switched on, so plain decoding pays for none. Nothing is carried from run to run: a controller starts with
what calibration knows, no prompt page is kept, and every run names its prompts anew, which is what the
``history`` drafter files texts under, so it cannot look up the answers of an earlier run.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.types import AR, POLICY, RoundFacts
from rollout.bench.pairing import Timed
from rollout.bench.summary import RoundSummary
from rollout.engine.native.engine import NativeEngine
from rollout.errors import RolloutError
from rollout.seeds import sample_seed
from rollout.types import Completion, Request, SamplingParams

PACE_FORWARDS = 5
"""Reference forwards before and after a run: the median of ten survives a stall, and costs under 0.2 s."""

PACE_CONTEXT_TOKENS = 64


class TextDiffersError(RolloutError):
    """Two runs of the same requests gave different tokens: there is nothing to compare, and a bug to find."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What every arm is asked to do: one sequence per row, all submitted at once."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    """By row."""

    ignore_eos: bool
    temperature: float
    run_seed: int

    def shortened(self, most: int) -> "Work":
        """Return the same rows with at most ``most`` new tokens each."""
        return replace(self, max_tokens=tuple(min(n, most) for n in self.max_tokens))

    def requests(self, *, run: str) -> list[Request]:
        """Return one request per row; ``run`` makes their names unique, seeds depend on the row alone."""
        return [
            Request(
                prompt_uid=f"{run}/{row}",
                sample_index=0,
                prompt_ids=ids,
                params=SamplingParams(
                    temperature=self.temperature, max_tokens=most, ignore_eos=self.ignore_eos
                ),
                seed=sample_seed(
                    run_seed=self.run_seed, trainer_step=0, prompt_uid=f"bench/{row}", sample_index=0
                ),
            )
            for row, (ids, most) in enumerate(zip(self.prompts, self.max_tokens, strict=True))
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


class EngineArms:
    """Runs arms on one engine."""

    def __init__(self, engine: NativeEngine, calibration: Calibration | None) -> None:
        self.engine = engine
        self.all_drafters = engine.traits.drafters
        """All that can be switched on; the engine must still have them all."""
        self._calibration = calibration
        self._runs = 0

    def run(self, spec: ArmSpec, work: Work) -> Run:
        """Submit all rows at once and run until the batch is empty. The engine must be idle."""
        engine = self.engine
        engine.use_drafters(spec.drafters)
        calibration = self._calibration if spec.controller.kind == "auto" else None
        controller = build_controller(spec.controller, engine.traits, engine.part_shapes(), calibration)
        for name in spec.drafters:
            controller.drafter_built(name, engine.policy_version)
        self._runs += 1
        requests = work.requests(run=f"run{self._runs}")
        facts: list[RoundFacts] = []
        done: list[Completion] = []
        alarms = 0

        def drain() -> float:
            nonlocal alarms
            started = time.perf_counter()
            for request in requests:
                engine.add(request)
            while engine.busy:
                plan = controller.decide(engine.load(), now_s=time.monotonic())
                outcome = engine.run_round(plan)
                controller.observe(outcome.facts)
                alarms += len(controller.take_actions())
                facts.append(outcome.facts)
                done.extend(outcome.completions)
            return time.perf_counter() - started

        makespan_s, pace_s = timed(engine, drain)
        summary = RoundSummary.of(facts)
        return Run(
            timed=Timed(makespan_s=makespan_s, pace_s=pace_s, plain=summary.plain_work()),
            texts=_texts(requests, done),
            summary=summary,
            alarms=alarms,
        )


def timed(engine: NativeEngine, work: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds ``work`` says it took, and those of a reference forward just before and after it."""
    gc.collect()  # what earlier runs left must not be collected on this one's time
    paces = reference_forwards(engine)
    makespan_s = work()
    return makespan_s, statistics.median([*paces, *reference_forwards(engine)])


def reference_forwards(engine: NativeEngine) -> list[float]:
    """Return the seconds of a few plain one-row forwards: what reading the weights once takes right now."""
    engine.time_forward(POLICY, rows=1, context_tokens=PACE_CONTEXT_TOKENS)
    return [
        engine.time_forward(POLICY, rows=1, context_tokens=PACE_CONTEXT_TOKENS) for _ in range(PACE_FORWARDS)
    ]


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
