"""The command behind ``scripts/looped_teaching.py``: what the loops' auxiliary loss is worth to drafting.

The shipped policy is trained on with the cross entropy of its last loop, as a trainer that knows nothing of
loops would, and once more with the distillation beside it: same start, same batches, same steps. Before and
after, every depth is scored on held-out replies, and the engine drafts with it.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from controller.config import ControllerConfig
from drafters.config import DrafterConfig
from rollout.bench.arms import EngineArms, Work, fixed_arm
from rollout.bench.machine import commit, machine, versions
from rollout.config import EngineConfig, PolicyConfig
from rollout.engine.native.build import engine_of
from rollout.errors import RolloutError
from rollout.output_files import writable
from rollout.policy.place import resolve
from rollout.policy.source import load_policy
from rollout.progress import Progress, say
from trainers_bridge.looped.batches import batch_of, held_out
from trainers_bridge.looped.configuration import DISTILLATION_WEIGHT
from trainers_bridge.looped.evaluation import estimate, score_depths
from trainers_bridge.looped.folder import load_served, write_policy
from trainers_bridge.looped.model import OuroForCausalLM
from trainers_bridge.looped.readable_json import readable_json
from trainers_bridge.looped.tokenizer import prompt_ids
from trainers_bridge.tasks.exercises import Exercise

WRITTEN, REFUSED = 0, 2

UNSEEN_SEED = 1000
"""Added to a run's seed: the policy was made from batches of seed 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuing:
    """How the policy is trained on."""

    steps: int = 200
    batch_tokens: int = 768
    learning_rate: float = 1e-3
    """At its height, a quarter of what the policy was made with: enough to move it in minutes."""

    warmup_steps: int = 10
    max_grad_norm: float = 1.0

    def learning_rate_at(self, step: int) -> float:
        """Return a step's learning rate: up in a line, then down in a line, nearly to nothing."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self.learning_rate * (self.steps - step) / max(1, self.steps - self.warmup_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """What is looked at before and after."""

    exercises: int = 400
    """Held-out replies scored at every depth."""

    questions: int = 96
    """Of them, those answered by the engine, in one sample each at temperature 1."""

    gamma: int = 4
    max_tokens: int = 64


def main(arguments: Sequence[str]) -> int:
    """Train with every weight and seed, measure, and write the record. Returns the exit code."""
    options = _parser().parse_args(arguments)
    training = Continuing(steps=options.steps, learning_rate=options.learning_rate)
    measuring = Measuring(exercises=options.exercises)
    torch.set_num_threads(options.threads)
    try:
        out = writable(options.out, "--out")  # minutes of training must not end in a file that cannot be
        record = compare(
            options.policy, training, measuring, weights=options.weights, seeds=range(options.seeds)
        )
    except RolloutError as error:
        say(f"looped_teaching: {error}")
        return REFUSED
    out.write_text(readable_json(record))
    return WRITTEN


def compare(
    policy: str, training: Continuing, measuring: Measuring, *, weights: Sequence[float], seeds: Sequence[int]
) -> dict[str, Any]:
    """Return what training on with each weight of the distillation came to, the first weight's run compared
    with each of the others, seed by seed. Raises ``RolloutError`` for a policy that cannot be had."""
    start = resolve(PolicyConfig(source=policy))
    given = held_out(seed=UNSEEN_SEED, count=measuring.exercises)
    before = measured(load_served(start), given, measuring)
    after: dict[float, list[dict[str, Any]]] = {}
    for weight in weights:
        for seed in seeds:
            model = continued(start, training, seed=UNSEEN_SEED + seed, distillation=weight)
            after.setdefault(weight, []).append({"seed": seed, **measured(model, given, measuring)})
    base = weights[0]
    return {
        "schema": 1,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "policy": policy,
        "training": asdict(training),
        "measuring": asdict(measuring),
        "before": before,
        "after": {str(weight): runs for weight, runs in after.items()},
        "gain_over_" + str(base): {
            str(weight): gains(after[base], runs) for weight, runs in after.items() if weight != base
        },
    }


def continued(folder: Path, training: Continuing, *, seed: int, distillation: float) -> OuroForCausalLM:
    """Return the policy in ``folder`` after more steps on the last loop's cross entropy, with
    ``distillation`` times the mean KL of the other loops to it."""
    model = load_served(folder)
    setattr(model.config, DISTILLATION_WEIGHT, distillation)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    with Progress(f"training on, distillation {distillation:g}, seed {seed}", total=training.steps) as done:
        for step in range(training.steps):
            batch = batch_of(seed=seed, step=step, tokens=training.batch_tokens)
            output = model(input_ids=batch.input_ids_BT, labels=batch.labels_BT)
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate_at(step)
            optimizer.zero_grad()
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
            optimizer.step()
            done.advance(note=" ".join(f"{loss:.3f}" for loss in output.loop_losses.tolist()))
    model.eval()
    return model


def measured(model: OuroForCausalLM, given: Sequence[Exercise], measuring: Measuring) -> dict[str, Any]:
    """Return what each depth predicts and how its drafts fare, the weights rounded as they are served."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_policy(model, folder)
        depths = score_depths(load_served(folder), given, decode_replies=False)
        drafts = drafts_kept(folder, [e.question for e in given[: measuring.questions]], measuring)
    return {
        "depths": [
            {
                "loops": depth.loops,
                "cross_entropy": asdict(depth.cross_entropy),
                "agreement": depth.agreement,
                "sum_min": depth.sum_min,
            }
            for depth in depths
        ],
        "drafts": drafts,
    }


def drafts_kept(folder: Path, questions: Sequence[str], measuring: Measuring) -> dict[str, Any]:
    """Return by shallow drafter what the engine kept of its drafts, of ``gamma`` tokens in every round."""
    policy = load_policy(PolicyConfig(source=str(folder)))
    names = tuple(f"shallow_loop_{depth}" for depth in range(1, policy.spec.loops))
    engine_config = EngineConfig(threads=1, max_context_tokens=256)
    arms = EngineArms(engine_of(policy, engine_config, DrafterConfig(names=names)), None)
    work = Work(
        prompts=tuple(tuple(prompt_ids(question)) for question in questions),
        max_tokens=(measuring.max_tokens,) * len(questions),
        ignore_eos=False,
        temperature=1.0,
        run_seed=0,
        rows_at_once=engine_config.max_batch,
    )
    found = {}
    try:
        for name in names:
            arm = fixed_arm(ControllerConfig(), name, gamma=measuring.gamma)
            counts = arms.run(arm, work).summary.acceptance[name]
            found[name] = {
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                "accepted_share": counts.rate,
                "first_kept_share": counts.accepted_by_position[0] / counts.decided_by_position[0],
            }
    finally:
        arms.close()
    return found


def gains(base: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what ``runs`` have over ``base``, seed by seed: means and their standard errors over seeds."""
    gained = [_difference(numbers(a), numbers(b)) for a, b in zip(base, runs, strict=True)]
    return {name: asdict(estimate(torch.tensor([each[name] for each in gained]))) for name in gained[0]}


def numbers(run: Mapping[str, Any]) -> dict[str, float]:
    """Return what is compared of a run, by name."""
    found: dict[str, float] = {}
    for depth in run["depths"]:
        of = f"depth {depth['loops']}"
        found[f"cross entropy of {of}"] = depth["cross_entropy"]["mean"]
        found[f"agreement of {of}"] = depth["agreement"]
        found[f"sum_min of {of}"] = depth["sum_min"]
    return found | {f"drafts kept of {name}": kept["accepted_share"] for name, kept in run["drafts"].items()}


def _difference(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: b[name] - a[name] for name in a}


def _weight(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"a weight is a number >= 0, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    default = Continuing()
    parser = argparse.ArgumentParser(
        prog="looped_teaching.py", description="What the loops' auxiliary loss is worth to drafting."
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON written")
    parser.add_argument("--policy", default="looped")
    parser.add_argument(
        "--weights", type=_weight, nargs="+", default=[0.0, 0.3, 1.0], help="of the distillation"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--exercises", type=int, default=Measuring().exercises)
    parser.add_argument("--threads", type=int, default=1)
    return parser
