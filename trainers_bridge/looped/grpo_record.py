"""The command behind ``scripts/looped_grpo.py``: what training runs of a looped policy came to, side by side.

Reads finished runs of ``taildraft run experiment=looped`` from their folders and writes one JSON: what ran
them, rewards, acceptance of every drafter by step and by policy version, agreement of loops by step, what the
policy can do afterwards on questions it never saw, and in which steps two runs sampled the same ids.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from rollout.bench.machine import commit, machine, versions
from rollout.config import PolicyConfig
from rollout.errors import ConfigError, RolloutError
from rollout.output_files import writable
from rollout.policy.place import resolve
from rollout.progress import say
from rollout.report.journal import Journal, read_journal
from trainers_bridge.looped.agreement import LOOP_OVERLAP
from trainers_bridge.looped.evaluation import estimate, right_answers, score_depths
from trainers_bridge.looped.folder import load_served
from trainers_bridge.looped.readable_json import readable_json
from trainers_bridge.looped.run_acceptance import acceptance
from trainers_bridge.tasks.exercises import KINDS, Exercise, exercises

POLICY_FOLDER = "policy"
"""In a run's folder, where ``trainer.save_policy`` was set."""

SAMPLED_SEED = 0
"""Of the one sample per held-out question, before and after alike."""

FOUND, REFUSED = 0, 2


def main(arguments: Sequence[str]) -> int:
    """Write the record of the runs named. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="looped_grpo.py", description="Set training runs side by side.")
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="a finished run, and what to call it")
    parser.add_argument("--exercises", type=int, default=400, help="held-out exercises scored; 0: none")
    parser.add_argument("--out", type=Path, required=True, help="the JSON written")
    options = parser.parse_args(arguments)
    try:
        out = writable(options.out, "--out")
        folders = {name: Path(folder) for name, _, folder in (run.partition("=") for run in options.runs)}
        record = side_by_side({n: read_journal(f) for n, f in folders.items()}, held_out=options.exercises)
    except RolloutError as error:
        say(f"looped_grpo: {error}")
        return REFUSED
    out.write_text(readable_json(record))
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
    before = standing_of(resolve(PolicyConfig(source=asked["policy"]["source"])), given)
    return {
        "schema": 2,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "same_ids": {name: same_ids(journals[first], journals[name]) for name in others},
        "held_out_before": None if before is None else before.told(),
        "runs": {name: _run(journal, given, before) for name, journal in journals.items()},
    }


def same_ids(one: Journal, other: Journal) -> dict[str, Any]:
    """Return over how many steps, from the first on, two runs sampled the very same ids."""
    digests = [(journal.summary or {})["ids_digest_by_step"] for journal in (one, other)]
    steps = min(map(len, digests))
    equal = next((i for i in range(steps) if digests[0][i] != digests[1][i]), steps)
    return {"steps_compared": steps, "equal_from_the_start": equal}


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What a policy can do on exercises it never saw, all in the order given."""

    depths: list[dict[str, Any]]
    """A ``DepthReport`` per depth, as plain data."""

    greedy: tuple[bool, ...]
    """Right answers at full depth, of the most likely tokens."""

    sampled: tuple[bool, ...]
    """The same in one sample each at temperature 1: what the reward is about."""

    def told(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "exercises": len(self.greedy),
            "depths": self.depths,
            "greedy_accuracy": asdict(_mean(self.greedy)),
            "sampled_accuracy": asdict(_mean(self.sampled)),
        }

    def told_beside(self, before: "Standing") -> dict[str, Any]:
        """Return it as plain data, with what was gained since ``before``, paired by exercise."""
        pairs = (("greedy", before.greedy, self.greedy), ("sampled", before.sampled, self.sampled))
        gains = {
            f"{name}_gain": asdict(_mean([float(b) - float(a) for a, b in zip(was, now, strict=True)]))
            for name, was, now in pairs
        }
        return self.told() | gains


def standing_of(folder: Path, given: Sequence[Exercise]) -> Standing | None:
    """Return what the policy in ``folder`` can do; None where nothing is given or saved."""
    if not given or not folder.is_dir():
        return None
    model = load_served(folder)
    loops = int(model.config.total_ut_steps)
    return Standing(
        depths=[asdict(report) for report in score_depths(model, given)],
        greedy=tuple(right_answers(model, given, loops=loops)),
        sampled=tuple(right_answers(model, given, loops=loops, sampled_seed=SAMPLED_SEED)),
    )


def _mean(values: Sequence[float]) -> Any:
    return estimate(torch.tensor([float(value) for value in values]))


def _run(journal: Journal, given: Sequence[Exercise], before: Standing | None) -> dict[str, Any]:
    settings, summary = journal.settings, dict(journal.summary or {})
    conditions = summary.pop("conditions", {})
    after = standing_of(journal.folder / POLICY_FOLDER, given)
    return {
        "commit": conditions.get("commit"),
        "version": (conditions.get("versions") or {}).get("taildraft"),
        "settings": {
            "seed": settings["seed"],
            "policy": settings["policy"]["source"],
            "engine_threads": settings["engine"]["threads"],
            "controller": settings["controller"],
            "drafter": settings["drafter"],
            "task": settings["task"],
            "trainer": settings["trainer"],
        },
        "summary": summary,
        "acceptance": acceptance(journal),
        "loop_overlap": loop_overlap(journal),
        "held_out_after": None if after is None or before is None else after.told_beside(before),
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
