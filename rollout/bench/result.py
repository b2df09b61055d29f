"""The benchmark's JSON and its table. One shape for every workload; a ratio above 1 says that A is faster.

Nothing here decides or measures. What a run of the machine cannot change (paths, run names) is left out.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from controller.types import AR, POLICY
from rollout.bench.bound import Peaks, saturation, tail_shares
from rollout.bench.cell import Cell
from rollout.bench.lengths import summarize
from rollout.bench.pairing import PairedRatio
from rollout.bench.streams import StreamTimes
from rollout.bench.summary import RoundSummary
from rollout.tracking.reduce import AcceptanceCounts

SCHEMA = 2
"""2: workloads ``drain`` and ``fixed`` say whose ``questions`` were asked, a ratio may have a second goal; an
evaluation tells depths, both ways of running its chains, and the exit gate."""

Json = dict[str, Any]


def result(
    cells: Sequence[Cell], *, workload: str, conditions: Json, peaks: Peaks, ending: str | None
) -> Json:
    """Return everything as plain data. ``ending`` is why no more pairs were run; None: it still runs."""
    ratios = [ratio for cell in cells for ratio in cell.ratios]
    summaries = {cell.prefix: _merged(cell) for cell in cells}
    return {
        "schema": SCHEMA,
        "workload": workload,
        "complete": ending is not None,
        "ending": ending,
        "goals": _goals(ratios),
        "ratios": {ratio.claim.name: _ratio(ratio) for ratio in ratios},
        "undecided": _undecided(ratios, ending),
        "dropped_pairs": {r.claim.name: [asdict(gap) for gap in r.dropped] for r in ratios if r.dropped},
        "arms": {
            f"{cell.prefix}{name}": _arm(cell, name, summaries[cell.prefix].get(name))
            for cell in cells
            for name in _arm_names(cell)
        },
        "acceptance": {
            f"{cell.prefix}{name}": {d: _acceptance(c) for d, c in sorted(summary.acceptance.items())}
            for cell in cells
            for name, summary in summaries[cell.prefix].items()
            if summary.acceptance
        },
        "questions": {
            cell.prefix: {"from": cell.asked.source, "different": cell.asked.different}
            for cell in cells
            if cell.asked is not None
        },
        "lengths": {
            cell.prefix: asdict(summarize(cell.guard.lengths, cap_tokens=cell.cap_tokens))
            for cell in cells
            if cell.guard.texts is not None
        },
        "ar": {
            cell.prefix: _plain(cell, summaries[cell.prefix][AR], peaks)
            for cell in cells
            if AR in summaries[cell.prefix]
        },
        "pilots": {cell.prefix: dict(cell.pilot) for cell in cells if cell.pilot},
        "conditions": conditions,
    }


def _merged(cell: Cell) -> dict[str, RoundSummary]:
    return {name: RoundSummary.merged(summaries) for name, summaries in cell.summaries.items()}


def _arm_names(cell: Cell) -> list[str]:
    return [*cell.specs, *cell.foreign]


def _goals(ratios: Sequence[PairedRatio]) -> list[Json]:
    return [
        {
            "name": name,
            "at_least": goal,
            "ci90_low": ratio.interval[0] if ratio.interval is not None else None,
            "verdict": ratio.verdict_on(goal),
        }
        for ratio in ratios
        for name, goal in ratio.claim.goals.items()
    ]


def _ratio(ratio: PairedRatio) -> Json:
    values = ratio.ratios
    return {
        "median": statistics.median(values) if values else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "ci90": list(ratio.interval) if ratio.interval is not None else None,
        "pairs": len(values),
        "dropped": len(ratio.dropped),
        "values": list(values),
        "same_work": [asdict(gap) for gap in ratio.gaps],
    }


def _undecided(ratios: Sequence[PairedRatio], ending: str | None) -> list[Json]:
    """Return the ratios whose interval is wider than their claim allows, and the goals that lie inside it."""
    out = []
    for ratio in ratios:
        inside = [name for name, goal in ratio.claim.goals.items() if ratio.verdict_on(goal) == "undecided"]
        names = inside if ratio.settled else list(dict.fromkeys([ratio.claim.name, *inside]))
        width = None if ratio.interval is None else ratio.interval[1] - ratio.interval[0]
        why = "the goal lies inside the interval" if ratio.settled else f"stopped by {ending}"
        out += [
            {
                "name": name,
                "pairs": len(ratio.ratios),
                "width": width,
                "wanted_width": ratio.wanted_width,
                "why": why if ending is not None else "still running",
            }
            for name in names
        ]
    return out


def _arm(cell: Cell, name: str, summary: RoundSummary | None) -> Json:
    times = cell.makespans.get(name, [])
    tokens = sum(cell.guard.lengths) if cell.guard.texts is not None else None
    out: Json = {
        "makespan_s": list(times),
        "tokens": tokens,
        "tokens_per_s": tokens / statistics.median(times) if times and tokens else None,
    }
    if name in cell.foreign:
        return out
    out["gamma"] = cell.specs[name].controller.gamma if cell.specs[name].controller.kind == "fixed" else None
    out["identical_texts"] = cell.guard.runs_by_arm.get(name, 0)
    if summary is not None:
        out |= {
            "runs": len(times),
            "seconds": {
                "draft": summary.draft_s,
                "verify": summary.verify_s,
                "commit": summary.commit_s,
                "outside_rounds": sum(times) - summary.rounds_s,
            },
            "rounds": {
                choice: {"rounds": t.rounds, "seconds": t.seconds, "tokens": t.committed}
                for choice, t in sorted(summary.by_choice.items())
            },
            "draft_failures": summary.draft_failures,
            "watchdog_alarms": cell.alarms.get(name, 0),
            "streams": StreamTimes.merged(cell.streams.get(name, [])).told(),
        }
    if name in cell.memory:
        out["memory_bytes"] = asdict(cell.memory[name])
    return out


def _acceptance(counts: AcceptanceCounts) -> Json:
    """Return pooled acceptance; position 0 is the first draft token of a round."""
    rates = counts.by_position()
    return {
        "rate": counts.rate,
        "tokens_per_round": counts.length,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "by_position": [
            {
                "position": i,
                "decided": counts.decided_by_position[i],
                "accepted": counts.accepted_by_position[i],
                "rate": rate,
            }
            for i, rate in rates.items()
        ],
    }


def _plain(cell: Cell, summary: RoundSummary, peaks: Peaks) -> Json:
    """Return where plain decoding spends its time, and how near its bound it is at every batch."""
    shape = cell.arms.engine.part_shapes()[POLICY]
    shares = tail_shares(summary.plain_by_batch, rounds_s=summary.rounds_s)
    return {
        "time_share_at_batch_at_most": {str(batch): share for batch, share in shares.items()},
        "by_batch": [asdict(point) for point in saturation(summary.plain_by_batch, shape, peaks)],
    }


def table(data: Mapping[str, Any]) -> str:
    """Return the result for people: makespans, then ratios with intervals and goals."""
    lines = [f"{'arm':<26}{'runs':>5}{'median s':>11}{'tokens/s':>11}"]
    for name, arm in data["arms"].items():
        times = arm["makespan_s"]
        if times:
            median = statistics.median(times)
            lines.append(f"{name:<26}{len(times):>5}{median:>11.3f}{arm['tokens_per_s']:>11.1f}")
    head = f"{'ratio (above 1: the first is faster)':<40}{'median':>8}{'90% interval':>17}"
    lines += ["", f"{head}{'pairs':>7}{'dropped':>9}  goal"]
    goals = {goal["name"]: f">= {goal['at_least']:g}: {goal['verdict']}" for goal in data["goals"]}
    for name, ratio in data["ratios"].items():
        interval = "{:.3f} .. {:.3f}".format(*ratio["ci90"]) if ratio["ci90"] else "-"
        median = "-" if ratio["median"] is None else f"{ratio['median']:.3f}"
        judged = [goals[key] for key in (name, f"{name}_strict") if key in goals]
        said = "".join(f"  {text}" for text in judged)
        lines.append(f"{name:<40}{median:>8}{interval:>17}{ratio['pairs']:>7}{ratio['dropped']:>9}{said}")
    if data["undecided"]:
        lines += ["", "undecided: " + ", ".join(u["name"] for u in data["undecided"])]
    return "\n".join(lines) + "\n"
