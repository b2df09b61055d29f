"""The result of workload ``steps`` as JSON and as a table. Decides and measures nothing."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollout.bench.bound import Bounds, Peaks
from rollout.bench.choosing import WAYS
from rollout.bench.cliffs import SpeedPoint, find_cliffs
from rollout.bench.result import SCHEMA, Json
from rollout.bench.step_cell import DRAFT, PLAIN, Kind, StepCell, Visit
from rollout.bench.steps import LeftOut


def steps_result(
    cells: Sequence[StepCell], left_out: Sequence[LeftOut], *, conditions: Json, ending: str | None
) -> Json:
    """Return everything as plain data. ``ending`` is why no more visits were made; None: it still runs."""
    seen = [cell for cell in cells if cell.visits]
    ratios = [ratio for cell in cells for ratio in cell.ratios]
    speeds = speed_points(seen)
    return {
        "schema": SCHEMA,
        "workload": "steps",
        "complete": ending is not None,
        "ending": ending,
        "goals": [
            {
                "name": ratio.claim.name,
                "at_most": ratio.claim.at_most,
                "ci90_high": None if ratio.interval is None else ratio.interval[1],
                "verdict": ratio.verdict,
            }
            for ratio in ratios
        ],
        "ratios": {ratio.claim.name: ratio.told() for ratio in ratios},
        "undecided": [
            {
                "name": ratio.claim.name,
                "pairs": len(ratio.values),
                "why": "still running" if ending is None else f"stopped by {ending}",
            }
            for ratio in ratios
            if not ratio.settled or ratio.verdict == "undecided"
        ],
        "arms": _arms(seen),
        "steps": [_step(cell, kind) for cell in seen for kind in sorted(cell.visits[0].timings)],
        "speeds": [asdict(speed) for speed in speeds],
        "cliffs": [asdict(cliff) for cliff in find_cliffs(speeds)],
        "too_few_visits": {
            cell.prefix: len(cell.visits) for cell in cells if len(cell.visits) < cell.min_visits
        },
        "left_out": [asdict(spot) for spot in left_out],
        "conditions": {
            **conditions,
            "ratios_mean": "time of the first over time of the second, of the same visit: below 1 is cheaper",
            "rounds": "real engine rounds; deciding is not in them; drafts are single passes of the drafter",
            "between_runs": "contexts' pages are kept from the first visit on, nothing else",
            "contexts": "made up: memory of their own whose keys and values mean nothing",
            "ways_of_sampling": {way: dict(asked) for way, asked in WAYS.items()},
            "interleaving": "every kind of round in turn on the same live sequences, within each visit",
        },
    }


def speed_points(cells: Sequence[StepCell]) -> list[SpeedPoint]:
    """Return each cell's plain decoding and what its bounds allow: medians over the visits every cell gets.

    Cells with open claims are visited more often, and later, on a machine that may have changed. Bounds are
    all taken at one memory speed and one rate, so that they differ by the work alone.
    """
    seen = [visit for cell in cells for visit in cell.visits[: cell.min_visits]]
    if not seen:
        return []
    peaks = Peaks(
        read_bytes_per_s=statistics.median(visit.peaks.read_bytes_per_s for visit in seen),
        flops_per_s=max(visit.peaks.flops_per_s for visit in seen),
    )
    return [_speed_point(cell, peaks) for cell in cells]


def _speed_point(cell: StepCell, peaks: Peaks) -> SpeedPoint:
    visits = cell.visits[: cell.min_visits]
    bound_s = statistics.median(v.bounds[PLAIN].at(peaks, computed_at=v.peaks).seconds for v in visits)
    return SpeedPoint(
        batch=cell.batch,
        context_tokens=cell.context_tokens,
        tokens_per_s=cell.batch / statistics.median(v.cost_s(PLAIN) for v in visits),
        bound_tokens_per_s=cell.batch / bound_s,
    )


def _over(cell: StepCell, value: Callable[[Visit], float]) -> float:
    return statistics.median(value(visit) for visit in cell.visits)


def _arms(cells: Sequence[StepCell]) -> Json:
    """Return, by what was timed, how often and how long in all."""
    arms: Json = {}
    for cell in cells:
        for visit in cell.visits:
            for kind, timings in visit.timings.items():
                name = f"{cell.drafter}_draft" if kind == DRAFT else kind.name
                arm = arms.setdefault(name, {"rounds": 0, "seconds": 0.0, "rows": 0.0})
                arm["rounds"] += len(timings.seconds)
                arm["seconds"] += sum(timings.seconds)
                arm["rows"] += timings.rows
    return arms


def _step(cell: StepCell, kind: Kind) -> Json:
    """Return one line of the table: a kind of round at a batch and context."""
    visits = cell.visits
    timings = [visit.timings[kind] for visit in visits]
    every = sorted(s for t in timings for s in t.seconds)
    cost_s = _over(cell, lambda visit: visit.cost_s(kind))
    rounds = len(every)
    least: list[Bounds] = [visit.bounds[kind] for visit in visits]
    line: Json = {
        "kind": f"{cell.drafter}_draft" if kind == DRAFT else kind.name,
        "batch": cell.batch,
        "context_tokens": cell.context_tokens,
        "gamma": kind.gamma,
        "rows": round(statistics.fmean(t.mean_rows for t in timings)),
        "mean_context_tokens": sum(t.context_tokens for t in timings) / sum(t.rows for t in timings),
        "rounds": rounds,
        "visits": len(visits),
        "median_ms": 1e3 * cost_s,
        "p10_ms": 1e3 * every[rounds // 10],
        "p90_ms": 1e3 * every[min(rounds - 1, 9 * rounds // 10)],
        "bytes_bound_ms": 1e3 * statistics.median(b.bytes_s for b in least),
        "flops_bound_ms": 1e3 * statistics.median(b.flops_s for b in least),
        "bound_ms": 1e3 * statistics.median(b.seconds for b in least),
        "bound_by": statistics.mode(b.bound_by for b in least),
        "bound_frac": _over(cell, lambda visit: visit.bounds[kind].seconds / visit.cost_s(kind)),
        "over_ar": _over(cell, lambda visit: visit.cost_s(kind) / visit.cost_s(PLAIN)),
    }
    if kind != DRAFT:
        line |= _split(cell, kind)
    if kind == PLAIN:
        line["tokens_per_s"] = cell.batch / cost_s
        line |= _choosing_in(cell)
    return line


def _split(cell: StepCell, kind: Kind) -> Json:
    """Return where a round's time goes, as far as its facts and the chooser's own timing tell."""

    def forward_s(visit: Visit) -> float:
        return statistics.median(visit.timings[kind].verify_s) - visit.choosing_s[kind]

    choosing_s = _over(cell, lambda visit: visit.choosing_s[kind])
    return {
        "forward_ms": 1e3 * _over(cell, forward_s),
        "choosing_ms": 1e3 * choosing_s,
        "choosing_share": _over(cell, lambda visit: visit.choosing_s[kind] / visit.cost_s(kind)),
        "rest_ms": 1e3
        * _over(
            cell,
            lambda visit: visit.cost_s(kind) - statistics.median(visit.timings[kind].verify_s),
        ),
    }


def _choosing_in(cell: StepCell) -> Json:
    """Return what choosing takes of a plain round that samples in another way, by way."""
    said: Json = {}
    for way in WAYS:
        said[f"choosing_{way}_ms"] = 1e3 * statistics.median(v.choosing_in_s[way] for v in cell.visits)
        said[f"choosing_{way}_share"] = statistics.median(v.choosing_share(way) for v in cell.visits)
    return said


def steps_table(data: Mapping[str, Any]) -> str:
    """Return the result for people: every cost beside its bounds, then ratios, goals and cliffs."""
    lines = [
        f"{'round':<10}{'batch':>6}{'context':>9}{'rows':>6}{'ms':>9}{'bytes':>8}{'flops':>8}{'bound':>8}"
        f"{'of bound':>10}{'over ar':>9}{'choice':>8}{'tokens/s':>10}"
    ]
    for step in data["steps"]:
        choice = f"{100 * step['choosing_share']:.1f}%" if "choosing_share" in step else "-"
        speed = f"{step['tokens_per_s']:.1f}" if "tokens_per_s" in step else "-"
        lines.append(
            f"{step['kind']:<10}{step['batch']:>6}{step['context_tokens']:>9}{step['rows']:>6}"
            f"{step['median_ms']:>9.2f}{step['bytes_bound_ms']:>8.2f}{step['flops_bound_ms']:>8.2f}"
            f"{step['bound_ms']:>8.2f}{step['bound_frac']:>10.2f}{step['over_ar']:>9.2f}{choice:>8}{speed:>10}"
        )
    head = f"{'ratio (below 1: the first is cheaper)':<40}{'median':>8}{'90% interval':>17}"
    lines += ["", f"{head}{'visits':>8}  goal"]
    goals = {goal["name"]: goal for goal in data["goals"]}
    for name, ratio in data["ratios"].items():
        interval = "{:.3f} .. {:.3f}".format(*ratio["ci90"]) if ratio["ci90"] else "-"
        median = "-" if ratio["median"] is None else f"{ratio['median']:.3f}"
        said = f"<= {goals[name]['at_most']:g}: {goals[name]['verdict']}"
        lines.append(f"{name:<40}{median:>8}{interval:>17}{ratio['pairs']:>8}  {said}")
    lines += ["", *(cliff_line(cliff) for cliff in data["cliffs"])]
    short = data["too_few_visits"]
    if short:
        lines.append(f"visited too seldom, cliffs among them unknown: {', '.join(short)}")
    elif not data["cliffs"]:
        lines.append("no drop of tokens/s over 10% between neighbours that the bounds do not explain")
    lines += [
        f"left out: batch {s['batch']} at {s['context_tokens']}: {s['reason']}" for s in data["left_out"]
    ]
    return "\n".join(lines) + "\n"


def cliff_line(cliff: Mapping[str, Any]) -> str:
    """Return one cliff of a result for people."""
    batch, context = (" to ".join(map(str, dict.fromkeys(cliff[key]))) for key in ("batch", "context_tokens"))
    drop, explained = (f"{100 * cliff[key]:.0f}%" for key in ("drop", "explained_drop"))
    return (
        f"cliff over {cliff['axis']}: batch {batch}, context {context}: {drop} fewer tokens/s, "
        f"{explained} explained by the bounds"
    )
