"""Opens the tracker a run asks for: the journal always, one backend beside it. Backends import themselves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import TrackerConfig
from rollout.errors import ConfigError
from rollout.tracking.jsonl import JsonlTracker
from rollout.tracking.tracker import Tracker, Trackers


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """What a backend may know of the run it shows."""

    folder: Path
    run_id: str
    settings: Mapping[str, Any]
    """The whole job's, as plain data."""


def open_tracker(config: TrackerConfig, run: RunIdentity) -> Tracker:
    """Return the one writer of ``run``, appending if its folder already holds it. Raises ``ConfigError``."""
    try:
        backend = BACKENDS[config.kind](config, run)
        exports = [_parquet(run.folder)] if config.parquet else []
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracker: {config.kind!r} needs the package {error.name!r}; install taildraft[report]"
        ) from error
    return Trackers([JsonlTracker(run.folder, run_id=run.run_id), *backend, *exports])


def _none(config: TrackerConfig, run: RunIdentity) -> list[Tracker]:
    return []


def _wandb(config: TrackerConfig, run: RunIdentity) -> list[Tracker]:
    from rollout.tracking.wandb_run import WandbTracker

    return [
        WandbTracker(
            run.folder,
            project=config.project,
            name=config.name,
            run_id=run.run_id,
            offline=config.offline,
            config=run.settings,
        )
    ]


def _trackio(config: TrackerConfig, run: RunIdentity) -> list[Tracker]:
    from rollout.tracking.trackio_run import TrackioTracker

    return [TrackioTracker(project=config.project, run_id=run.run_id, config=run.settings)]


def _tensorboard(config: TrackerConfig, run: RunIdentity) -> list[Tracker]:
    from rollout.tracking.tensorboard_run import TensorboardTracker

    return [TensorboardTracker(run.folder)]


def _parquet(folder: Path) -> Tracker:
    from rollout.tracking.parquet import ParquetExport

    return ParquetExport(folder)


BACKENDS: dict[str, Callable[[TrackerConfig, RunIdentity], list[Tracker]]] = {
    "jsonl": _none,
    "wandb": _wandb,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
}
"""Every backend there is, by ``tracker.kind``."""
