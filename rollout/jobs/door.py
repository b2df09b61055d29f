"""The one door from here to ``trainers_bridge``, which lies above this package and imports it.

A trainer is found by the name in ``trainer.kind``: module ``trainers_bridge.KIND`` must offer
``run(job: JobConfig, client: RolloutClient, tracker: Tracker) -> int``. Its settings are defined by
``trainers_bridge.config`` (``TrainerConfig``, ``TaskConfig``), so only there can they be checked.
"""

import importlib
from types import ModuleType
from typing import Any

from rollout.errors import ConfigError
from rollout.job_config import JobConfig
from rollout.settings import load_config


def check_trainer(job: JobConfig) -> None:
    """Load the task's and the trainer's settings and drop them. Raises ``ConfigError`` before any work."""
    config = _module("config")
    load_config(job.task, config.TaskConfig, path="task")
    load_config(job.trainer, config.TrainerConfig, path="trainer")


def bridge(job: JobConfig) -> Any:
    """Return the module of the trainer ``job`` names. Raises ``ConfigError`` when it cannot be had."""
    kind = job.trainer.get("kind")
    if not isinstance(kind, str) or not kind.isidentifier():
        raise ConfigError(f"trainer.kind: expected the name of a trainer bridge, got {kind!r}")
    try:
        return _module(kind)
    except ModuleNotFoundError as error:
        if error.name == f"trainers_bridge.{kind}":
            raise ConfigError(f"trainer.kind: there is no trainer bridge {kind!r}") from error
        raise ConfigError(
            f"trainer.kind: bridge {kind!r} needs the package {error.name!r}; install taildraft[{kind}]"
        ) from error


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"trainers_bridge.{name}")
