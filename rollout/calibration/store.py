"""Where calibrations are kept, and when one is good enough to be used again.

They lie under the cache folder, by machine and model; nothing of the weights' values enters a name: a new
policy version needs no new calibration. A kept one is used again when it was judged good and a few of its
forwards, taken again, agree; one taken on a busy machine is used for now and taken again at a later start.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

from controller.calibration import Calibration
from controller.config import ControllerConfig
from drafters.kernels.build import cpu_features
from rollout.calibration.measure import SWEEP_BUDGET_S, calibrate, contradiction
from rollout.config import EngineConfig
from rollout.engine.protocol import Engine
from rollout.errors import ConfigError
from rollout.paths import cache_dir
from rollout.progress import Progress
from rollout.settings import to_plain

log = logging.getLogger(__name__)

PROVISIONAL_S = 600.0
"""How long a provisional calibration is used as it is: hosts that start together, or one started again in the
middle of a run, would only find the same busy machine."""


def load_or_calibrate(
    engine: Engine,
    controller_config: ControllerConfig,
    engine_config: EngineConfig,
    *,
    budget_s: float = SWEEP_BUDGET_S,
) -> Calibration:
    """Return the calibration of ``engine`` on this machine, measuring it when there is none that holds.

    The engine must be idle. Of several processes that start together one measures, the others wait for it.
    """
    key = calibration_key(engine, engine_config)
    with _one_at_a_time(key):
        known = _load(key)
        if known is not None and _still_holds(engine, known):
            return known
        calibration = calibrate(engine, controller_config, key=key, budget_s=budget_s)
        if known is None or known.quality.verdict != "good" or calibration.quality.verdict == "good":
            save(calibration)
        # Else the good one stays: what a busy machine contradicts may well hold at the next start.
    log.log(
        logging.INFO if calibration.quality.verdict == "good" else logging.WARNING, "%s", words(calibration)
    )
    return calibration


def words(calibration: Calibration) -> str:
    """Return the verdict on a calibration as a sentence for people."""
    quality = calibration.quality
    if quality.verdict == "good":
        return f"the calibration is good: {quality.reason}"
    return (
        f"the calibration is {quality.verdict}: {quality.reason}. It is used for now, rounds correct it, and "
        f"it is taken again at the first start after {PROVISIONAL_S / 60:.0f} minutes"
    )


def _still_holds(engine: Engine, known: Calibration) -> bool:
    """Return whether a kept calibration may be used, and say why not."""
    verdict, reason = known.quality.verdict, known.quality.reason
    if verdict == "provisional":
        age_s = time.time() - _path(known.key).stat().st_mtime
        if 0.0 <= age_s < PROVISIONAL_S:
            log.warning("%s", words(known))
            return True
    elif verdict == "good":
        with Progress("checking the calibration"):
            reason = contradiction(engine, known)
        if not reason:
            return True
    log.warning("the kept calibration is taken again: %s", reason)
    return False


def calibration_key(engine: Engine, engine_config: EngineConfig) -> str:
    """Return the name of everything a timing depends on: machine, kernels, model shape, threads."""
    named = {
        "processor": cpu_features(),
        "cores": _usable_cores(),
        "versions": {name: metadata.version(name) for name in ("torch", "numpy")},
        "engine": engine.traits.engine,
        "numerics": engine.traits.numerics,
        "max_batch": engine.traits.max_batch,
        "settings": {
            n: getattr(engine_config, n) for n in ("decoder", "device", "dtype", "threads", "verify")
        },
        "parts": to_plain(dict(engine.part_shapes())),
    }
    return blake2b(json.dumps(named, sort_keys=True).encode(), digest_size=12).hexdigest()


def save(calibration: Calibration) -> Path:
    """Keep a calibration in place of an earlier one and return its file."""
    path = _path(calibration.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, calibration.to_json())
    return path


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises ``ConfigError``."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text + "\n")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _path(key: str, suffix: str = ".json") -> Path:
    return cache_dir() / "calibration" / f"{key}{suffix}"


def _load(key: str) -> Calibration | None:
    path = _path(key)
    if not path.exists():
        return None
    try:
        return Calibration.from_json(path.read_text(), key=key)
    except ValueError as error:
        log.warning("%s is not usable and is measured anew: %s", path, error)
        return None


@contextmanager
def _one_at_a_time(key: str) -> Iterator[None]:
    path = _path(key, ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file, Progress("waiting for another process to calibrate") as waiting:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting.hush()
        yield


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
