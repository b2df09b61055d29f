"""The command behind ``scripts/train_looped.py``: train, write the folder, score it, write its record."""

import argparse
import logging
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollout.errors import RolloutError
from rollout.progress import Progress, say
from trainers_bridge.looped.batches import held_out
from trainers_bridge.looped.evaluation import DepthReport, score_depths
from trainers_bridge.looped.folder import load_served, write_policy
from trainers_bridge.looped.pretraining import Pretraining, pretrain
from trainers_bridge.looped.record import depth_helps, training_record, write_record

FINISHED, NOT_DEEPER, REFUSED, STOPPED = 0, 1, 2, 3
"""Exit codes: written and as it should be; written, but depth does not help; refused; stopped early."""

EVALUATION_SEED = 0


def main(arguments: Sequence[str]) -> int:
    """Make the looped policy. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = _parser().parse_args(arguments)
    settings = replace(Pretraining(), steps=options.steps, seed=options.seed, threads=options.threads)
    command = shlex.join(["python", "scripts/train_looped.py", *arguments])
    try:
        return make(
            settings,
            out=options.out,
            work=options.work,
            max_minutes=options.max_minutes,
            exercises=options.exercises,
            command=command,
        )
    except RolloutError as error:
        say(f"train_looped: {error}")
        return REFUSED


def make(
    settings: Pretraining, *, out: Path, work: Path, max_minutes: float, exercises: int, command: str
) -> int:
    """Train (or go on), then write the policy's folder and its record. Returns the exit code."""
    trained = pretrain(settings, work, stop_after_s=max_minutes * 60)
    if not trained.finished:
        say(f"stopped after step {trained.step} of {settings.steps}; the same command goes on from there")
        return STOPPED
    write_policy(trained.model, out)
    with Progress("making held-out exercises"):
        given = held_out(seed=EVALUATION_SEED, count=exercises)
    # Scored as served: out of the folder, with the weights rounded as they are there.
    depths = score_depths(load_served(out), given)
    record = training_record(
        settings,
        trained,
        depths,
        folder=out,
        exercises=exercises,
        evaluation_seed=EVALUATION_SEED,
        command=command,
    )
    write_record(out, record)
    for line in told(depths):
        say(line)
    return FINISHED if depth_helps(depths) else NOT_DEEPER


def told(depths: Sequence[DepthReport]) -> list[str]:
    """Return the depths' reports in words, one line each."""
    return [
        f"loops {d.loops}: cross entropy {d.cross_entropy.mean:.4f} +- {d.cross_entropy.standard_error:.4f}, "
        f"right answers {d.accuracy.mean:.3f} +- {d.accuracy.standard_error:.3f}, "
        f"agrees with full depth {d.agreement:.3f}, sum-min {d.sum_min:.3f}"
        for d in depths
    ]


def _parser() -> argparse.ArgumentParser:
    default = Pretraining()
    parser = argparse.ArgumentParser(prog="train_looped.py", description="Train the small looped policy.")
    parser.add_argument("--out", type=Path, default=Path("policies/looped"), help="folder of the policy")
    parser.add_argument("--work", type=Path, default=Path("outputs/looped"), help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--threads", type=int, default=default.threads)
    parser.add_argument(
        "--max-minutes", type=float, default=9.5, help="stop training after so long, to go on another time"
    )
    parser.add_argument("--exercises", type=int, default=1080, help="held-out exercises scored at the end")
    return parser
