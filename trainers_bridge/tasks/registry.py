"""Every task there is, by ``task.kind``."""

from collections.abc import Callable
from typing import Any, Protocol

from trainers_bridge.config import TaskConfig


class Task(Protocol):
    """Prompts and a checkable reward."""

    def rows(self) -> list[dict[str, object]]:
        """Return plain rows with ``prompt`` and the keyword arguments ``reward`` takes."""
        ...

    def reward(self, reply: str, *, ended: bool, **row: Any) -> float:
        """Return the reward of a reply in [0, 1]."""
        ...


def _arithmetic(config: TaskConfig, seed: int) -> Any:
    from trainers_bridge.tasks.arithmetic import ArithmeticTask

    return ArithmeticTask(config, seed=seed)


def _exercises(config: TaskConfig, seed: int) -> Any:
    from trainers_bridge.tasks.exercises import ExerciseTask

    return ExerciseTask(config, seed=seed)


BUILDERS: dict[str, Callable[[TaskConfig, int], Task]] = {"arithmetic": _arithmetic, "exercises": _exercises}
"""From name to builder."""


def build_task(config: TaskConfig, *, seed: int) -> Task:
    """Return the task ``config`` names; same seed, same prompts."""
    return BUILDERS[config.kind](config, seed)
