"""What a benchmark's result says of its conditions, and the file it goes to."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from controller.calibration import Calibration
from controller.types import POLICY
from rollout.bench.bound import Peaks
from rollout.bench.grids import Grid, load_grid, offgrid_change
from rollout.bench.hf_arm import HfArm
from rollout.bench.machine import MemorySpeed, commit, kernel_rate, machine, versions
from rollout.bench.result import Json
from rollout.config import EngineConfig
from rollout.job_config import JobConfig
from rollout.output_files import check_apart, output_path, writable, write_result
from rollout.settings import to_plain

RESULT_FILE = "bench.json"

SAMPLE_EVERY_S = 20.0
"""Between measurements of memory and kernel speed: they take up to two seconds, and memory speed changes
over minutes."""

Compose = Callable[[Json, Peaks], Json]
"""Makes a result from its conditions and the machine's peaks."""


class Book:
    """Keeps what the result says of its conditions, and writes the result."""

    def __init__(
        self,
        job: JobConfig,
        engine_config: EngineConfig,
        grids: Sequence[Grid],
        out: Path,
        *,
        hf: HfArm | None = None,
        parts: Sequence[str] = (POLICY,),
    ) -> None:
        """``parts`` are those whose kernels' rate is measured, the policy first."""
        self.memory = MemorySpeed()
        self.out = out
        self._parts = parts
        self._rates: dict[str, list[float]] = {part: [] for part in parts}
        self._sampled_s = -SAMPLE_EVERY_S
        self._engine = grids[0].arms.engine
        self._started_s = time.monotonic()
        self._fixed = _conditions(job, engine_config, grids, hf)

    def sample(self) -> None:
        """Measure memory and kernel speed, unless that was done a moment ago; nothing else may run."""
        if time.monotonic() - self._sampled_s < SAMPLE_EVERY_S:
            return
        self._sampled_s = time.monotonic()
        self.memory.measure()
        for part in self._parts:
            self._rates[part].append(kernel_rate(self._engine, part))

    def rate(self, part: str) -> float:
        """Return the most operations per second seen of a part's kernels or, if more, of the policy's."""
        return max(*self._rates[POLICY], *self._rates[part])

    def write(self, compose: Compose) -> Json:
        """Write the result as it stands and return it."""
        if not self._rates[POLICY]:
            self.sample()
        peaks = Peaks(read_bytes_per_s=max(self.memory.bytes_per_s), flops_per_s=max(self._rates[POLICY]))
        conditions = {
            **self._fixed,
            "memory_read": {"bytes_per_s": self.memory.bytes_per_s, "at_s": self.memory.at_s},
            "kernel_flops_per_s": self._rates[POLICY],
            "peaks": asdict(peaks),
            "elapsed_s": time.monotonic() - self._started_s,
            "load_average_at_end": list(os.getloadavg()),
        }
        drafters = {part: rates for part, rates in self._rates.items() if part != POLICY}
        if drafters:
            conditions["drafter_flops_per_s"] = drafters
        data = compose(conditions, peaks)
        write_result(self.out, json.dumps(data, indent=1) + "\n", "out")
        return data


def _conditions(
    job: JobConfig, engine_config: EngineConfig, grids: Sequence[Grid], hf: HfArm | None
) -> dict[str, Any]:
    bench = replace(job.bench, out=None, html=None, peers_env=None)
    evaluate = replace(job.evaluate, out=None, html=None)
    plain = to_plain(replace(job, engine=engine_config, bench=bench, evaluate=evaluate))
    by_grid = {grid.grid: grid.policy for grid in grids}
    change = None
    if "off" in by_grid:
        on = by_grid.get("on") or load_grid(job, engine_config, "on")
        change = offgrid_change(on, by_grid["off"])
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "threads": engine_config.threads,
        # Where this machine keeps things says nothing about the numbers.
        "config": {name: value for name, value in plain.items() if name not in ("output_dir", "run_id")},
        "policies": {
            grid.grid: {
                "weights": grid.policy.checksum,
                "fingerprint": grid.arms.engine.fingerprint,
                "numerics": grid.arms.engine.traits.numerics,
            }
            for grid in grids
        },
        "calibrations": {
            grid.grid: None if grid.calibration is None else told(grid.calibration) for grid in grids
        },
        "offgrid_perplexity": None if change is None else {**asdict(change), "ratio": change.ratio},
        "hf_dtype": None if hf is None else str(hf.dtype).removeprefix("torch."),
        "interleaving": "our own arms in lockstep, round by round; foreign ones before or after them",
        "between_runs": "controllers start fresh, prompts are named anew, no prompt page is kept",
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def told(calibration: Calibration) -> dict[str, Any]:
    """Return what ``auto`` was told of the machine, and how far that can be trusted."""
    return {
        "taken_utc": calibration.taken_utc,
        "quality": asdict(calibration.quality),
        "parts": {name: asdict(fit) for name, fit in calibration.parts.items()},
        "other": asdict(calibration.other),
    }


def result_path(job: JobConfig) -> Path:
    """Return where a benchmark's result goes. Raises ``ConfigError`` before anything is measured."""
    return output_path(job.bench.out, folder=job.output_dir, name=RESULT_FILE, setting="bench.out")


def page_path(job: JobConfig, out: Path) -> Path:
    """Return where the drawing of the result at ``out`` goes. Raises ``ConfigError`` as ``result_path``."""
    page = out.with_suffix(".html") if job.bench.html is None else Path(job.bench.html)
    check_apart(page, "bench.html", out, "bench.out")
    return writable(page, "bench.html")
