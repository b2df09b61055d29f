"""Where calibrations are kept, and when one is good enough to be used again.

They lie under the cache folder, by machine and model; nothing of the weights' values enters a name: a new
policy version needs no new calibration. A kept one is used again when it was judged good and a few of its
forwards, taken again, agree; one taken on a busy machine is used for now and taken again at a later start. It
lies beside the good one, which may hold again by then.
"""

import fcntl
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

import drafters.int4
import drafters.kernels
import rollout.engine.native.compiled_forward.kernels
from controller.calibration import Calibration
from controller.config import ControllerConfig
from drafters.kernels.build import sources_key
from drafters.kernels.processor import processor
from rollout.calibration.measure import SWEEP_BUDGET_S, calibrate, contradiction
from rollout.config import EngineConfig
from rollout.cores import usable_cores
from rollout.engine.protocol import Engine
from rollout.errors import ConfigError
from rollout.output_files import write_whole
from rollout.paths import cache_dir
from rollout.progress import Progress
from rollout.settings import to_plain

log = logging.getLogger(__name__)

PROVISIONAL = ".provisional.json"

KERNEL_FOLDERS = tuple(
    Path(str(module.__file__)).parent
    for module in (drafters.int4, drafters.kernels, rollout.engine.native.compiled_forward.kernels)
)

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
        known = _load(_path(key), key)
        contradicted = _contradiction(engine, known) if known is not None else ""
        if known is not None and not contradicted:
            return known
        calibration = _fresh_provisional(key)
        if calibration is None:
            if contradicted:
                log.warning("the kept calibration is taken again: %s", contradicted)
            calibration = calibrate(engine, controller_config, key=key, budget_s=budget_s)
            _save(calibration)
    log.log(
        logging.INFO if calibration.quality.verdict == "good" else logging.WARNING, "%s", words(calibration)
    )
    return calibration


def calibrate_anew(
    engine: Engine, controller_config: ControllerConfig, engine_config: EngineConfig
) -> tuple[Calibration, Path]:
    """Measure whatever is kept, keep that too and return it with its file; waits for others that measure."""
    key = calibration_key(engine, engine_config)
    with _one_at_a_time(key):
        calibration = calibrate(engine, controller_config, key=key)
        return calibration, _save(calibration)


def words(calibration: Calibration) -> str:
    """Return the verdict on a calibration as a sentence for people."""
    quality = calibration.quality
    if quality.verdict == "good":
        return f"the calibration is good: {quality.reason}"
    return (
        f"the calibration is {quality.verdict}: {quality.reason}. It is used for now unless an earlier good "
        "one holds, rounds correct it, and it is taken again at the first start after "
        f"{PROVISIONAL_S / 60:.0f} minutes"
    )


def _contradiction(engine: Engine, known: Calibration) -> str:
    """Return in words why a kept calibration may not be used; empty when it may."""
    if known.quality.verdict != "good":
        return known.quality.reason or "it was not found good"
    with Progress("checking the calibration"):
        return contradiction(engine, known)


def _fresh_provisional(key: str) -> Calibration | None:
    """Return the provisional calibration that is still used as it is, if there is one."""
    path = _path(key, PROVISIONAL)
    if not path.exists() or not 0.0 <= time.time() - path.stat().st_mtime < PROVISIONAL_S:
        return None
    return _load(path, key)


def calibration_key(engine: Engine, engine_config: EngineConfig) -> str:
    """Return the name of everything a timing depends on: machine, kernels, model shape, threads."""
    named = {
        "processor": processor().identity,
        "kernels": sources_key(KERNEL_FOLDERS),
        "cores": len(usable_cores()),
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


def _save(calibration: Calibration) -> Path:
    """Keep a calibration in place of an earlier one of its kind and return its file.

    What a busy machine contradicts may hold at the next start: only a good one replaces a good one.
    """
    provisional = _path(calibration.key, PROVISIONAL)
    good = calibration.quality.verdict == "good"
    path = _path(calibration.key) if good else provisional
    write(path, calibration.to_json())
    if good:
        provisional.unlink(missing_ok=True)
    return path


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises ``ConfigError``."""
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _path(key: str, suffix: str = ".json") -> Path:
    return cache_dir() / "calibration" / f"{key}{suffix}"


def _load(path: Path, key: str) -> Calibration | None:
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
