"""What is known of a trained looped policy, as plain data beside its weights."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
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
    """Whether every loop predicts better than the one before, and the last answers better than the first.

    Better means by more than three standard errors, paired by exercise.
    """
    losses = [report.gain.mean > 3 * report.gain.standard_error for report in depths[1:]]
    answers = depths[-1].accuracy_gain
    return all(losses) and answers.mean > 3 * answers.standard_error
