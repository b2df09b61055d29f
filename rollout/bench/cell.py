"""One cell of a benchmark: some work, one policy, its arms, and the ratios between them.

A repetition runs every arm some open ratio still needs: our own in lockstep, in an order shuffled by seed,
and each foreign one before or after them, so that what is compared ran within the same minute.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.types import AR
from rollout.bench.arms import ArmSpec, EngineArms, Run, TextGuard, Work, timed
from rollout.bench.foreign import Foreign
from rollout.bench.pairing import PairedRatio, Timed
from rollout.bench.questions import Asked
from rollout.bench.schedule import Note
from rollout.bench.streams import StreamTimes
from rollout.bench.summary import RoundSummary
from rollout.engine.native.memory import EngineMemory

HF = "hf"

MOST_NAMED = 5
"""More arms than this are shown as a number while they run."""


@dataclass(kw_only=True, slots=True)
class Cell:
    """Everything measured under one prefix, such as ``trace_offgrid_``."""

    prefix: str
    arms: EngineArms
    specs: dict[str, ArmSpec]
    """Arms of our own by name; ``ar`` is among them."""

    work: Work
    ratios: list[PairedRatio]
    seed: int
    cap_tokens: int
    foreign: dict[str, Foreign] = field(default_factory=dict)
    """By arm."""

    tune: Callable[["Cell", Note], None] | None = None
    """Settles what is chosen by a pilot, after the reference run and before anything is timed."""

    asked: Asked | None = None
    """Whose questions the prompts are; None: a result does not say."""

    pilot: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By arm, what pilots found: of ``tune`` seconds by choice, of a foreign arm what it says itself."""

    makespans: dict[str, list[float]] = field(default_factory=dict)
    """Seconds by arm, one per repetition, dropped pairs included."""

    summaries: dict[str, list[RoundSummary]] = field(default_factory=dict)
    streams: dict[str, list[StreamTimes]] = field(default_factory=dict)
    """By arm of our own; like ``summaries``, one per repetition."""

    memory: dict[str, EngineMemory] = field(default_factory=dict)
    """By arm of our own, in its last repetition."""

    alarms: dict[str, int] = field(default_factory=dict)
    repetitions: int = 0
    guard: TextGuard = field(init=False)

    def __post_init__(self) -> None:
        self.guard = TextGuard(where=self.prefix)

    @property
    def open(self) -> bool:
        """Whether another repetition would help some ratio."""
        return any(ratio.wants_pairs for ratio in self.ratios)

    @property
    def settled(self) -> bool:
        """Whether every ratio is known well enough."""
        return all(ratio.settled for ratio in self.ratios)

    def prepare(self, note: Note) -> None:
        """Take the reference text in a full lockstep that is not counted, and run the pilots.

        It also warms every engine up: code, buffers, weights and all KV that the work needs are touched.
        """
        note(f"{self.prefix}: reference text")
        runs = self.arms.together(list(self.specs.values()), self.work)
        self.guard.check(AR, runs[AR].texts)
        for name, run in runs.items():
            if name != AR:
                self.guard.check(name, run.texts)
        if self.tune is not None:
            self.tune(self, note)
        for name, engine in self.foreign.items():
            note(f"{self.prefix}{name}: pilot")
            work = self.work
            found = engine.prepare(work.prompts, self.guard.lengths, temperature=work.temperature)
            if found:
                self.pilot[name] = found

    def checked(self, spec: ArmSpec) -> Run:
        """Run an arm of our own; its text must be the reference. Raises ``TextDiffersError``."""
        run = self.arms.run(spec, self.work)
        self.guard.check(spec.name, run.texts)
        return run

    def repeat(self, note: Note) -> None:
        """Run each needed arm once and give every open ratio its pair."""
        open_ratios = [ratio for ratio in self.ratios if ratio.wants_pairs]
        needed = {name for ratio in open_ratios for name in (ratio.claim.a, ratio.claim.b)}
        times: dict[str, Timed] = {}
        before, ours, after = self._order(needed)
        for name in before:
            times[name] = self._replay(name, note)
        times |= self._in_lockstep(ours, note)
        for name in after:
            times[name] = self._replay(name, note)
        self.repetitions += 1
        for ratio in open_ratios:
            ratio.add(times[ratio.claim.a], times[ratio.claim.b])

    def _order(self, needed: set[str]) -> tuple[list[str], list[str], list[str]]:
        """Return foreign arms that go first, our own, and foreign arms that follow."""
        rng = random.Random(f"{self.seed}/{self.prefix}/{self.repetitions}")
        ours = sorted(needed - set(self.foreign))
        others = sorted(needed & set(self.foreign))
        rng.shuffle(ours)
        rng.shuffle(others)
        before = [name for name in others if rng.random() < 0.5]
        return before, ours, [name for name in others if name not in before]

    def _in_lockstep(self, names: list[str], note: Note) -> dict[str, Timed]:
        shown = ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} arms"
        note(f"{self.prefix}{shown}: repetition {self.repetitions + 1}")
        runs = self.arms.together([self.specs[name] for name in names], self.work)
        for name, run in runs.items():
            self.guard.check(name, run.texts)
            self.summaries.setdefault(name, []).append(run.summary)
            self.streams.setdefault(name, []).append(run.streams)
            self.memory[name] = run.memory
            self.alarms[name] = self.alarms.get(name, 0) + run.alarms
            self.makespans.setdefault(name, []).append(run.timed.makespan_s)
        return {name: run.timed for name, run in runs.items()}

    def _replay(self, name: str, note: Note) -> Timed:
        engine, work = self.foreign[name], self.work
        note(f"{self.prefix}{name}: repetition {self.repetitions + 1}")
        lengths = self.guard.lengths

        def replay() -> float:
            return engine.replay(work.prompts, lengths, temperature=work.temperature)

        makespan_s, pace_s = timed(self.arms.engine, replay)
        self.makespans.setdefault(name, []).append(makespan_s)
        return Timed(makespan_s=makespan_s, pace_s=pace_s)
