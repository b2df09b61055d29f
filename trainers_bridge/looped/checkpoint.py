"""A training run's checkpoint: all that its further steps depend on, written whole or not at all.

Batches and learning rates follow from the step, and nothing else is random: the step is the state of every
generator.
"""

import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.errors import RolloutError

UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    struct.error,
    pickle.UnpicklingError,
)
"""What torch raises for a file that is none of its own, depending on where it notices."""


class CheckpointError(RolloutError):
    """A checkpoint cannot be gone on from: it is damaged, or of a run with other settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A run after ``step`` steps."""

    settings: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    step: int
    tokens: int
    seconds: float
    """Of training, in all sessions together."""


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write beside ``path`` and rename: a reader, or a later run, never finds half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    parts = {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__}
    torch.save(parts, unfinished)
    unfinished.replace(path)


def read_checkpoint(path: Path, *, settings: dict[str, Any]) -> Checkpoint | None:
    """Return the checkpoint, or None where there is none. Raises ``CheckpointError``."""
    if not path.is_file():
        return None
    try:
        checkpoint = Checkpoint(**torch.load(path, weights_only=True))
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read ({error}): delete it to begin again") from error
    differing = sorted(
        name
        for name in {*settings, *checkpoint.settings}
        if settings.get(name) != checkpoint.settings.get(name)
    )
    if differing:
        raise CheckpointError(
            f"{path} belongs to a run with other settings ({', '.join(differing)}): "
            "name another folder, or delete it to begin again"
        )
    return checkpoint
