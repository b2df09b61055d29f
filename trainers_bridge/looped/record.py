"""What is known of a trained looped policy, as plain data beside its weights."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollout.policy.embedded import sha256_of
from trainers_bridge.looped.batches import data_digest
from trainers_bridge.looped.evaluation import DepthReport
from trainers_bridge.looped.folder import WEIGHTS
from trainers_bridge.looped.pretraining import Pretraining, Trained, plain_settings

RECORD = "training.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")


def training_record(
    settings: Pretraining,
    trained: Trained,
    depths: Sequence[DepthReport],
    *,
    folder: Path,
    exercises: int,
    evaluation_seed: int,
    command: str,
) -> dict[str, Any]:
    """Return how the policy in ``folder`` was made and what was measured of it, all plain data."""
    return {
        "command": command,
        "settings": plain_settings(settings),
        "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
        "steps": trained.step,
        "tokens": trained.tokens,
        "seconds": round(trained.seconds, 1),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "machine": platform.machine(),
        "first_batches_sha256": data_digest(seed=settings.seed, tokens=settings.batch_tokens),
        "weights_sha256": sha256_of(folder / WEIGHTS),
        "held_out": {
            "exercises": exercises,
            "seed": evaluation_seed,
            "numerics": "bfloat16 weights, float32 arithmetic",
            "depths": [asdict(report) for report in depths],
        },
    }


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the record beside the weights."""
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def read_record(folder: Path) -> dict[str, Any]:
    """Return a folder's record."""
    record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return record


def depth_helps(depths: Sequence[DepthReport]) -> bool:
    """Whether no loop makes predictions worse and the last one is better than the first beyond doubt.

    Better is: lower cross entropy by more than five standard errors (paired), and more right answers by more
    than three standard errors of the difference.
    """
    first, last = depths[0], depths[-1]
    falling = all(b.cross_entropy.mean < a.cross_entropy.mean for a, b in pairwise(depths))
    gained = sum(report.gain.mean for report in depths[1:])
    doubt = sum(report.gain.standard_error for report in depths[1:])
    more_right = last.accuracy.mean - first.accuracy.mean
    noise = (last.accuracy.standard_error**2 + first.accuracy.standard_error**2) ** 0.5
    return falling and gained > 5 * doubt and more_right > 3 * noise
