"""``taildraft calibrate``: what this machine can do with this policy, measured once and kept.

Forwards are timed on an idle engine; whole rounds are run on throw-away requests, to price what a round
does beside its forwards. The result is kept under the cache folder, by machine and model, and nothing
of the weights' values enters its name: a new policy version needs no new calibration.
"""

import fcntl
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

import numpy as np

from controller.calibration import OTHER, Calibration, Sample, SweepPoint, fit, sweep_plan
from controller.config import ControllerConfig
from controller.types import AR_ASSIGNMENT, POLICY, Assignment, PartShape, RoundFacts, RoundPlan
from drafters.kernels.build import cpu_features
from rollout.config import EngineConfig
from rollout.engine.protocol import Engine
from rollout.errors import CapacityError, ConfigError
from rollout.jobs.config import JobConfig
from rollout.paths import cache_dir
from rollout.progress import Progress, say
from rollout.settings import to_plain
from rollout.types import Request, SamplingParams

log = logging.getLogger(__name__)

SWEEP_BUDGET_S = 13.0
"""No further pass over the sweep starts after this, so that the whole stays under 20 s."""

PASSES = 5
"""Passes over the sweep after the one that warms up. Passes, not repetitions of a point: a stall then
spoils one pass of every point instead of every repetition of one."""

MIN_SAMPLES = 4
"""Of each part, whatever the time: fewer cannot fix its parameters."""

ROUNDS_PER_BATCH = 5
"""Rounds run to price a batch: the first warms up, and the median of four survives one stall."""

DRAFT_GAMMA = 4
PROMPT_IDS = tuple(range(3, 11))
"""Short of a KV page, so that no page of a throw-away prompt is ever kept for others."""


def main(job: JobConfig) -> int:
    """Measure anew, save, and show the fit. Returns 0."""
    from rollout.engine.native.build import build_engine

    with Progress(f"loading policy {job.policy.source}"):
        engine = build_engine(job.policy, job.engine, job.drafter, host="calibrate")
    started_s = time.monotonic()
    key = calibration_key(engine, job.engine)
    calibration = calibrate(engine, job.controller, key=key)
    path = _save(calibration)
    engine.close()
    say(f"calibrated in {time.monotonic() - started_s:.1f} s, saved as {path}")
    if job.calibrate.out is not None:
        _write(Path(job.calibrate.out), calibration.to_json())
    sys.stdout.write(_table(calibration))
    return 0


def load_or_calibrate(
    engine: Engine,
    controller_config: ControllerConfig,
    engine_config: EngineConfig,
    *,
    budget_s: float = SWEEP_BUDGET_S,
) -> Calibration:
    """Return the calibration of ``engine`` on this machine, measuring it when there is none yet.

    The engine must be idle. Of several processes that start together one measures, the others wait for it.
    """
    key = calibration_key(engine, engine_config)
    with _one_at_a_time(key):
        known = _load(key)
        if known is not None:
            return known
        calibration = calibrate(engine, controller_config, key=key, budget_s=budget_s)
        path = _save(calibration)
    log.info("calibrated this machine for this policy: %s", path)
    return calibration


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


def calibrate(
    engine: Engine,
    controller_config: ControllerConfig,
    *,
    key: str,
    budget_s: float = SWEEP_BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> Calibration:
    """Time forwards and rounds of an idle engine and return the fit. Takes under 20 s on two slow cores."""
    if engine.busy:
        raise ValueError("calibrate only an idle engine")
    shapes = engine.part_shapes()
    points = _points(engine, shapes, controller_config)
    with Progress("calibrating", total=len(points) * (PASSES + 1), unit="forwards") as progress:
        times = _sweep(engine, points, progress, until_s=clock() + budget_s, clock=clock)
        progress.note("whole rounds")
        extras = _price_rounds(engine, shapes, until_s=clock() + budget_s / 3, clock=clock)
    samples = [
        Sample(
            part=point.part,
            rows=point.rows,
            sequences=point.sequences,
            context_tokens=point.context_tokens,
            seconds=seconds + extras.draft_s(point.part, point.rows),
        )
        for point, measured in times.items()
        for seconds in _faster_half(measured)
    ]
    return fit([*samples, *extras.other], shapes, key=key)


# ---- single forwards ------------------------------------------------------------------------------


def _points(engine: Engine, shapes: Mapping[str, PartShape], config: ControllerConfig) -> list[SweepPoint]:
    traits = engine.traits
    return sweep_plan(
        shapes,
        traits.max_batch,
        max_context_tokens=max(8, min(512, traits.max_context_tokens // 2)),
        max_gamma=max(config.gammas),
    )


def _sweep(
    engine: Engine,
    points: Sequence[SweepPoint],
    progress: Progress,
    *,
    until_s: float,
    clock: Callable[[], float],
) -> dict[SweepPoint, list[float]]:
    """Return the seconds of every point that fits the engine; the first pass is not among them."""
    live = list(points)
    times: dict[SweepPoint, list[float]] = {point: [] for point in points}
    for number in range(PASSES + 1):
        for point in list(live):
            try:
                seconds = engine.time_forward(
                    point.part,
                    rows=point.rows,
                    context_tokens=point.context_tokens,
                    sequences=point.sequences,
                )
            except CapacityError as error:
                log.info("calibration leaves out %s: %s", point, error)
                live.remove(point)
                del times[point]
                continue
            if number > 0:
                times[point].append(seconds)
            progress.advance(note=f"{point.part}, {point.rows} rows")
        if clock() > until_s and _enough(times):
            log.info("calibration stops after %d of %d passes", number, PASSES)
            break
    return times


def _enough(times: Mapping[SweepPoint, Sequence[float]]) -> bool:
    kept: dict[str, int] = {}
    for point, seconds in times.items():
        kept[point.part] = kept.get(point.part, 0) + len(_faster_half(seconds))
    return all(count >= MIN_SAMPLES for count in kept.values())


def _faster_half(seconds: Sequence[float]) -> list[float]:
    # Other work on the machine only ever makes a forward longer.
    return sorted(seconds)[: (len(seconds) + 1) // 2]


# ---- whole rounds ---------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Extras:
    """What rounds cost beside the forwards ``time_forward`` sees."""

    other: list[Sample] = field(default_factory=list)
    """A plain round minus its forward: choosing, committing, bookkeeping."""

    per_pass: dict[str, dict[int, float]] = field(default_factory=dict)
    """By drafter and rows: seconds of a draft pass beside its forward."""

    def draft_s(self, part: str, rows: int) -> float:
        """Return what a pass of ``part`` over ``rows`` costs beside its forward; 0 for the policy."""
        known = self.per_pass.get(part)
        if not known:
            return 0.0
        at = sorted(known)
        return float(np.interp(rows, at, [known[r] for r in at]))


def _price_rounds(
    engine: Engine, shapes: Mapping[str, PartShape], *, until_s: float, clock: Callable[[], float]
) -> _Extras:
    """Price batches, the two ends first; those in between are left out when the time is over."""
    extras = _Extras()
    drafters = {d.name: d for d in engine.traits.drafters if shapes[d.name].rows_per_draft_token > 0}
    largest = engine.traits.max_batch
    for number, batch in enumerate(dict.fromkeys(min(b, largest) for b in (1, largest, 4, 16))):
        if number >= 2 and clock() > until_s:
            log.info("calibration leaves out rounds of %d sequences and more", batch)
            break
        plain = _run_rounds(engine, batch, AR_ASSIGNMENT)
        if plain:
            forward_s = _forward_s(engine, POLICY, batch)
            seconds = max(statistics.median(f.total_s for f in plain) - forward_s, 1e-6)
            extras.other.append(
                Sample(part=OTHER, rows=batch, sequences=batch, context_tokens=0, seconds=seconds)
            )
        for name, traits in drafters.items():
            gamma = min(DRAFT_GAMMA, traits.max_gamma)
            facts = _run_rounds(engine, batch, Assignment(drafter=name, gamma=gamma))
            costs = [d for f in facts for d in f.drafts if d.drafter == name and d.passes and not d.failures]
            if costs:
                pass_s = statistics.median(d.seconds / d.passes for d in costs)
                spare_s = pass_s - _forward_s(engine, name, batch)
                extras.per_pass.setdefault(name, {})[batch] = max(spare_s, 0.0)
    return extras


def _forward_s(engine: Engine, part: str, batch: int) -> float:
    context_tokens = len(PROMPT_IDS) + 2
    return statistics.median(
        engine.time_forward(part, rows=batch, context_tokens=context_tokens, sequences=batch)
        for _ in range(3)
    )


def _run_rounds(engine: Engine, batch: int, assignment: Assignment) -> list[RoundFacts]:
    """Run a few rounds of ``batch`` throw-away requests; return those in which all of them decoded."""
    name = f"calibration/{assignment.drafter}/{batch}"
    params = SamplingParams(max_tokens=(ROUNDS_PER_BATCH + 1) * (DRAFT_GAMMA + 1), ignore_eos=True)
    keys = [(f"{name}/{i}", 0) for i in range(batch)]
    facts: list[RoundFacts] = []
    try:
        for i, (uid, sample) in enumerate(keys):
            engine.add(
                Request(prompt_uid=uid, sample_index=sample, prompt_ids=PROMPT_IDS, params=params, seed=i)
            )
        for _ in range(2 * ROUNDS_PER_BATCH):
            load = engine.load()
            plan = RoundPlan(assignments={s.key: assignment for s in load.sequences}, reason="calibration")
            outcome = engine.run_round(plan)
            if outcome.facts.batch == batch and outcome.facts.prefill_rows == 0:
                facts.append(outcome.facts)
            if len(facts) == ROUNDS_PER_BATCH or not engine.busy:
                break
    finally:
        for key in keys:
            engine.abort(key, reason="calibration is over")
    return facts[1:]


# ---- the file -------------------------------------------------------------------------------------


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


def _save(calibration: Calibration) -> Path:
    path = _path(calibration.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, calibration.to_json())
    return path


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text + "\n")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


@contextmanager
def _one_at_a_time(key: str) -> Iterator[None]:
    path = _path(key, ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file, Progress("waiting for another process to calibrate") as waiting:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting.hush()
        yield


def _table(calibration: Calibration) -> str:
    lines = [
        f"{'part':<10}{'GB/s':>8}{'Gflop/s':>9}{'context x':>11}{'call ms':>9}{'row ms':>8}{'error %':>9}"
    ]
    for name, part in calibration.parts.items():
        lines.append(
            f"{name:<10}{part.bandwidth_bytes_per_s / 1e9:>8.1f}{part.flops_per_s / 1e9:>9.1f}"
            f"{part.context_factor:>11.2f}{part.overhead_s * 1e3:>9.3f}{part.overhead_s_per_row * 1e3:>8.3f}"
            f"{part.mape_frac * 100:>9.1f}"
        )
    other = calibration.other
    lines.append(f"{OTHER:<10}{'':>28}{other.base_s * 1e3:>9.3f}{other.s_per_row * 1e3:>8.3f}")
    return "\n".join(lines) + "\n"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
