"""The evaluation's JSON: the benchmark's shape, and beside it what an evaluation finds. Decides nothing."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rollout.bench.bound import Peaks
from rollout.bench.result import Json, result
from rollout.evaluation.chains import ChainReport
from rollout.evaluation.cost_law import LaneLaw, Prediction
from rollout.evaluation.generation import FreeReport
from rollout.evaluation.goals import Goal, Measured, goals_of
from rollout.evaluation.serial import ExitReport
from rollout.evaluation.swept import Sweep, decoding_totals
from rollout.proof.finding import Finding

WORKLOAD = "evaluate"


@dataclass(kw_only=True, slots=True)
class Found:
    """Everything an evaluation found so far."""

    findings: list[Finding] = field(default_factory=list)
    chains: list[ChainReport] = field(default_factory=list)
    exits: ExitReport | None = None
    texts: list[FreeReport] = field(default_factory=list)
    sweep: Sweep = field(default_factory=Sweep)

    @property
    def failed(self) -> list[Finding]:
        """Checks that did not pass."""
        return [f for f in self.findings if not f.passed]


def evaluation_result(
    found: Found, *, conditions: Json, peaks: Peaks, ending: str | None, seconds: float
) -> Json:
    """Return everything as plain data. ``ending`` is why it ended; None: it still runs."""
    sweep = found.sweep
    measured = sweep.measured()
    data = result(
        [s.cell for s in sweep.spots], workload=WORKLOAD, conditions=conditions, peaks=peaks, ending=ending
    )
    return {
        **data,
        "verdict": "different" if found.failed else "equal" if found.findings else "not run",
        "seconds": seconds,
        "findings": [asdict(f) for f in found.findings],
        "goals": [asdict(goal) for goal in all_goals(measured, loops=sweep.loops)],
        "chains": [asdict(report) for report in found.chains],
        "exit_gate": None if found.exits is None else _exits(found.exits),
        "depths": {arm.drafter: arm.depth for arm in sweep.arms.values()},
        "generation": [asdict(report) for report in found.texts],
        "costs": {m.spot.prefix: _costs(m) for m in measured},
        "rounds": {
            f"{s.cell.prefix}{name}": asdict(decoding_totals(s.cell, name))
            for s in sweep.spots
            for name in s.cell.summaries
        },
        "questions": _questions(sweep),
        "left_out": [asdict(spot) for spot in sweep.left_out],
        "too_few_trials": {
            s.cell.prefix: s.cell.repetitions for s in sweep.spots if s.cell.repetitions < sweep.trials
        },
    }


def all_goals(measured: Sequence[Measured], *, loops: int) -> list[Goal]:
    """Return the goals of every concurrency at its longest texts; they are a looped policy's."""
    longest: dict[int, Measured] = {}
    for m in sorted(measured, key=lambda m: m.spot.length):
        longest[m.spot.concurrency] = m
    return [goal for m in longest.values() for goal in goals_of(m)] if loops > 1 else []


def _exits(report: ExitReport) -> Json:
    return {**asdict(report), "mean_loops": report.mean_loops}


def _costs(measured: Measured) -> Json:
    return {
        "predictions": [_told(p) for p in measured.predictions],
        "lanes": [_told(law) for law in measured.lane_laws],
    }


def _told(law: Prediction | LaneLaw) -> Json:
    return {**asdict(law), "error_frac": law.error_frac}


def _questions(sweep: Sweep) -> Json | None:
    """Return what was asked and what was not, without the texts."""
    selection = sweep.selection
    if selection is None:
        return None
    return {
        "considered": selection.considered,
        "echoes": [asdict(e) for e in selection.echoes],
        "too_short": {str(length): n for length, n in selection.too_short.items()},
        "asked": {str(length): [q.name for q in qs] for length, qs in selection.by_length.items()},
    }
