"""One cell of a benchmark: some work, one policy, its arms, and the ratios between them.

A repetition runs every arm some open ratio still needs: our own in lockstep, in an order shuffled by seed,
and the foreign one before or after them, so that what is compared ran within the same minute.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from controller.types import AR
from rollout.bench.arms import ArmSpec, EngineArms, Run, TextGuard, Work, timed
from rollout.bench.hf_arm import HfArm, Pilot
from rollout.bench.pairing import PairedRatio, Timed
from rollout.bench.summary import RoundSummary

HF = "hf"
Note = Callable[[str], None]
"""Hears what runs now."""


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
    hf: HfArm | None = None
    tune: Callable[["Cell", Note], None] | None = None
    """Settles what is chosen by a pilot, after the reference run and before anything is timed."""

    hf_pilot: Pilot | None = None
    pilot: dict[str, dict[str, float]] = field(default_factory=dict)
    """What ``tune`` measured: by arm, by choice, seconds."""

    makespans: dict[str, list[float]] = field(default_factory=dict)
    """Seconds by arm, one per repetition, dropped pairs included."""

    summaries: dict[str, list[RoundSummary]] = field(default_factory=dict)
    alarms: dict[str, int] = field(default_factory=dict)
    repetitions: int = 0
    guard: TextGuard = field(init=False)

    def __post_init__(self) -> None:
        self.guard = TextGuard(where=self.prefix)

    @property
    def open(self) -> bool:
        """Whether another repetition would help some ratio."""
        return any(ratio.wants_pairs for ratio in self.ratios)

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
        if self.hf is not None:
            note(f"{self.prefix}{HF}: pilot")
            work = self.work
            self.hf_pilot = self.hf.choose(work.prompts, self.guard.lengths, temperature=work.temperature)

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
        order = self._order(needed)
        ours = [name for name in order if name != HF]
        if order[0] == HF:
            times[HF] = self._replay(note)
        times |= self._in_lockstep(ours, note)
        if order[-1] == HF:
            times[HF] = self._replay(note)
        self.repetitions += 1
        for ratio in open_ratios:
            ratio.add(times[ratio.claim.a], times[ratio.claim.b])

    def _order(self, needed: set[str]) -> list[str]:
        rng = random.Random(f"{self.seed}/{self.prefix}/{self.repetitions}")
        order = sorted(needed - {HF})
        rng.shuffle(order)
        if HF in needed:
            order.insert(rng.choice((0, len(order))), HF)
        return order

    def _in_lockstep(self, names: list[str], note: Note) -> dict[str, Timed]:
        note(f"{self.prefix}{', '.join(names)}: repetition {self.repetitions + 1}")
        runs = self.arms.together([self.specs[name] for name in names], self.work)
        for name, run in runs.items():
            self.guard.check(name, run.texts)
            self.summaries.setdefault(name, []).append(run.summary)
            self.alarms[name] = self.alarms.get(name, 0) + run.alarms
            self.makespans.setdefault(name, []).append(run.timed.makespan_s)
        return {name: run.timed for name, run in runs.items()}

    def _replay(self, note: Note) -> Timed:
        hf, pilot, work = self.hf, self.hf_pilot, self.work
        assert hf is not None, "a ratio asks for the foreign arm, and there is none"
        assert pilot is not None, "prepare comes first"
        note(f"{self.prefix}{HF}: repetition {self.repetitions + 1}")
        lengths = self.guard.lengths

        def replay() -> float:
            return hf.replay(work.prompts, lengths, temperature=work.temperature, way=pilot.chosen)

        makespan_s, pace_s = timed(self.arms.engine, replay)
        self.makespans.setdefault(HF, []).append(makespan_s)
        return Timed(makespan_s=makespan_s, pace_s=pace_s)
