"""The command behind ``scripts/looped_grpo.py``: what training runs of a looped policy came to, side by side.

Reads finished runs of ``taildraft run experiment=looped`` from their folders and writes one JSON: rewards,
acceptance and agreement of loops by step, what the policy can do afterwards on questions it never saw, and
in which steps two runs sampled the same ids.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from rollout.bench.machine import machine, versions
from rollout.config import PolicyConfig
from rollout.errors import ConfigError, RolloutError
from rollout.policy.place import resolve
from rollout.progress import say
from rollout.report.journal import Journal, read_journal
from trainers_bridge.looped.agreement import LOOP_OVERLAP
from trainers_bridge.looped.evaluation import score_depths
from trainers_bridge.looped.folder import load_served
from trainers_bridge.tasks.exercises import KINDS, Exercise, exercises

POLICY_FOLDER = "policy"
"""In a run's folder, where ``trainer.save_policy`` was set."""

FOUND, REFUSED = 0, 2


def main(arguments: Sequence[str]) -> int:
    """Write the record of the runs named. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="looped_grpo.py", description="Set training runs side by side.")
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="a finished run, and what to call it")
    parser.add_argument("--exercises", type=int, default=400, help="held-out exercises scored; 0: none")
    parser.add_argument("--out", type=Path, required=True, help="the JSON written")
    options = parser.parse_args(arguments)
    try:
        folders = {name: Path(folder) for name, _, folder in (run.partition("=") for run in options.runs)}
        record = side_by_side({n: read_journal(f) for n, f in folders.items()}, held_out=options.exercises)
    except RolloutError as error:
        say(f"looped_grpo: {error}")
        return REFUSED
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return FOUND


def side_by_side(journals: Mapping[str, Journal], *, held_out: int) -> dict[str, Any]:
    """Return the record of ``journals``, by name. The first is compared with each of the others.

    All are to have trained the same policy on the same task as the first. Raises ``ConfigError`` for a run
    that has no summary, and so has not ended.
    """
    unfinished = [name for name, journal in journals.items() if journal.summary is None]
    if unfinished:
        raise ConfigError(f"no summary in {', '.join(unfinished)}: wait for the run's end, or resume it")
    first, *others = journals
    asked = journals[first].settings
    source = exercises(seed="grpo/held out", split="held_out", kinds=asked["task"].get("exercises", KINDS))
    given = list(islice(source, held_out))
    start = resolve(PolicyConfig(source=asked["policy"]["source"]))
    return {
        "schema": 1,
        "machine": machine(),
        "versions": versions(),
        "same_ids": {name: same_ids(journals[first], journals[name]) for name in others},
        "held_out_before": held_out_of(start, given),
        "runs": {name: _run(journal, given) for name, journal in journals.items()},
    }


def same_ids(one: Journal, other: Journal) -> dict[str, Any]:
    """Return over how many steps, from the first on, two runs sampled the very same ids."""
    digests = [(journal.summary or {})["ids_digest_by_step"] for journal in (one, other)]
    steps = min(map(len, digests))
    equal = next((i for i in range(steps) if digests[0][i] != digests[1][i]), steps)
    return {"steps_compared": steps, "equal_from_the_start": equal}


def held_out_of(folder: Path, given: Sequence[Exercise]) -> list[dict[str, Any]]:
    """Return what the policy in ``folder`` can do at each depth; empty where nothing is given or saved."""
    if not given or not folder.is_dir():
        return []
    return [asdict(report) for report in score_depths(load_served(folder), given)]


def _run(journal: Journal, given: Sequence[Exercise]) -> dict[str, Any]:
    settings = journal.settings
    return {
        "settings": {
            "seed": settings["seed"],
            "policy": settings["policy"]["source"],
            "engine_threads": settings["engine"]["threads"],
            "controller": settings["controller"]["kind"],
            "drafters": settings["drafter"]["names"],
            "task": settings["task"],
            "trainer": settings["trainer"],
        },
        "summary": journal.summary,
        "loop_overlap": loop_overlap(journal),
        "held_out_after": held_out_of(journal.folder / POLICY_FOLDER, given),
    }


def loop_overlap(journal: Journal) -> dict[str, Any]:
    """Return by depth what a shallow loop's law shares with the last one's, over the steps.

    Steps of a quarter weigh alike.
    """
    steps = [values for _, values in sorted(journal.step_metrics.items())]
    names = sorted({name for values in steps for name in values if name.startswith(LOOP_OVERLAP)})
    out: dict[str, Any] = {}
    for name in names:
        values = [step[name] for step in steps if name in step]
        size = max(1, len(values) // 4)
        out[name.removeprefix(LOOP_OVERLAP)] = {
            "first_quarter": sum(values[:size]) / size,
            "last_quarter": sum(values[-size:]) / size,
            "by_step": values,
        }
    return out
