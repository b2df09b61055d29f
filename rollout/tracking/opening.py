"""Opens the tracker a job asks for: the journal always, one backend beside it. Backends import themselves."""

from collections.abc import Callable
from pathlib import Path

from rollout.errors import ConfigError
from rollout.jobs.config import JobConfig
from rollout.settings import to_plain
from rollout.tracking.jsonl import JsonlTracker
from rollout.tracking.tracker import Tracker, Trackers


def open_tracker(job: JobConfig) -> Tracker:
    """Return the one writer of ``job``'s run, appending if the folder already holds it.

    The job's folder must be open (``output_dir`` and ``run_id`` known). Raises ``ConfigError``.
    """
    if job.output_dir is None or job.run_id is None:
        raise ValueError("open the run's folder before its tracker")
    folder = Path(job.output_dir)
    try:
        backend = BACKENDS[job.tracker.kind](job, folder)
        exports = [_parquet(folder)] if job.tracker.parquet else []
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracker: {job.tracker.kind!r} needs the package {error.name!r}; install taildraft[report]"
        ) from error
    return Trackers([JsonlTracker(folder, run_id=job.run_id), *backend, *exports])


def _none(job: JobConfig, folder: Path) -> list[Tracker]:
    return []


def _wandb(job: JobConfig, folder: Path) -> list[Tracker]:
    from rollout.tracking.wandb_run import WandbTracker

    settings = job.tracker
    return [
        WandbTracker(
            folder,
            project=settings.project,
            name=settings.name,
            run_id=str(job.run_id),
            offline=settings.offline,
            config=to_plain(job),
        )
    ]


def _trackio(job: JobConfig, folder: Path) -> list[Tracker]:
    from rollout.tracking.trackio_run import TrackioTracker

    return [TrackioTracker(project=job.tracker.project, run_id=str(job.run_id), config=to_plain(job))]


def _tensorboard(job: JobConfig, folder: Path) -> list[Tracker]:
    from rollout.tracking.tensorboard_run import TensorboardTracker

    return [TensorboardTracker(folder)]


def _parquet(folder: Path) -> Tracker:
    from rollout.tracking.parquet import ParquetExport

    return ParquetExport(folder)


BACKENDS: dict[str, Callable[[JobConfig, Path], list[Tracker]]] = {
    "jsonl": _none,
    "wandb": _wandb,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
}
"""Every backend there is, by ``tracker.kind``."""
