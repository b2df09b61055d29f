"""``taildraft bench``: our arms and the foreign one, interleaved and compared pair by pair, as one JSON.

A result is data: the exit code says whether it could be measured, goals are reported. The one thing that
fails is a text that differs between two runs of our own.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from controller.calibration import Calibration
from rollout.bench.bound import Peaks
from rollout.bench.cell import HF, Cell
from rollout.bench.drain import drain_cells
from rollout.bench.fixed import fixed_cells
from rollout.bench.grids import Grid, chosen_arms, offgrid_change, open_grid, resolved_engine
from rollout.bench.hf_arm import HfArm
from rollout.bench.machine import MemorySpeed, commit, kernel_rate, machine, versions
from rollout.bench.result import Json, result, table
from rollout.bench.schedule import measure
from rollout.config import EngineConfig
from rollout.errors import ConfigError
from rollout.job_config import JobConfig
from rollout.progress import Progress, say
from rollout.settings import to_plain

RESULT_FILE = "bench.json"

SAMPLE_EVERY_S = 20.0
"""Between measurements of memory and kernel speed: they take up to two seconds, and memory speed changes
over minutes."""


def main(job: JobConfig) -> int:
    """Measure, write the JSON after every repetition, and show the table. Returns 0."""
    bench = job.bench
    rows = bench.prompts if bench.workload == "drain" else max(bench.batches)
    engine_config = resolved_engine(job, rows=rows)
    arms = chosen_arms(job)
    out = _result_path(job)
    torch.set_num_threads(engine_config.threads)
    with Progress("opening policies", total=len(bench.grids), unit="policies") as progress:
        grids = []
        for which in bench.grids:
            grids.append(open_grid(job, engine_config, which))
            progress.advance()
        hf = _foreign_arm(grids, engine_config) if HF in arms else None
    cells = drain_cells(job, grids, arms, hf) if bench.workload == "drain" else fixed_cells(job, grids, arms)
    book = _Book(job, engine_config, grids, cells, hf, out)
    gc.freeze()  # what lives until the end need not be walked before every run
    with Progress(f"bench {bench.workload}", unit="runs") as progress:

        def note(what: str) -> None:
            progress.advance(note=what)

        ending = measure(
            cells,
            limit_s=60 * bench.max_minutes,
            clock=time.monotonic,
            note=note,
            before_repetition=book.sample,
            after_repetition=book.write,
        )
    book.sample()
    data = book.write(ending=ending)
    for opened in grids:
        opened.arms.close()
    say(f"written: {os.path.relpath(out)} ({ending})")
    sys.stdout.write(table(data))
    return 0


def _foreign_arm(grids: Sequence[Grid], engine_config: EngineConfig) -> HfArm | None:
    """Return transformers on the policy as it is; None where only the moved policy is measured."""
    folders = [grid.policy.folder for grid in grids if grid.grid == "on"]
    return HfArm(folders[0], threads=engine_config.threads) if folders else None


class _Book:
    """Keeps what the result says of its conditions, and writes the result."""

    def __init__(
        self,
        job: JobConfig,
        engine_config: EngineConfig,
        grids: Sequence[Grid],
        cells: Sequence[Cell],
        hf: HfArm | None,
        out: Path,
    ) -> None:
        self._job, self._cells, self._out = job, cells, out
        self._memory = MemorySpeed()
        self._rates: list[float] = []
        self._sampled_s = -SAMPLE_EVERY_S
        self._engine = grids[0].arms.engine
        self._started_s = time.monotonic()
        self._fixed = _conditions(job, engine_config, grids, hf)

    def sample(self) -> None:
        """Measure memory and kernel speed, unless that was done a moment ago; nothing else may run."""
        if time.monotonic() - self._sampled_s < SAMPLE_EVERY_S:
            return
        self._sampled_s = time.monotonic()
        self._memory.measure()
        self._rates.append(kernel_rate(self._engine))

    def write(self, *, ending: str | None = None) -> Json:
        """Write the result as it stands and return it."""
        if not self._rates:
            self.sample()
        memory, rates = self._memory, self._rates
        peaks = Peaks(read_bytes_per_s=max(memory.bytes_per_s), flops_per_s=max(rates))
        conditions = {
            **self._fixed,
            "memory_read": {"bytes_per_s": memory.bytes_per_s, "at_s": memory.at_s},
            "kernel_flops_per_s": rates,
            "peaks": asdict(peaks),
            "elapsed_s": time.monotonic() - self._started_s,
            "load_average_at_end": list(os.getloadavg()),
        }
        data = result(
            self._cells,
            workload=self._job.bench.workload,
            conditions=conditions,
            peaks=peaks,
            ending=ending,
        )
        scratch = self._out.with_name(f".{self._out.name}.{os.getpid()}")
        scratch.write_text(json.dumps(data, indent=1) + "\n")
        scratch.replace(self._out)
        return data


def _conditions(
    job: JobConfig, engine_config: EngineConfig, grids: Sequence[Grid], hf: HfArm | None
) -> dict[str, Any]:
    plain = to_plain(replace(job, engine=engine_config, bench=replace(job.bench, out=None)))
    by_grid = {grid.grid: grid for grid in grids}
    change = offgrid_change(by_grid["on"].policy, by_grid["off"].policy) if len(by_grid) == 2 else None
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
        "interleaving": "our own arms in lockstep, round by round; the foreign one before or after them",
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


def _result_path(job: JobConfig) -> Path:
    """Return where the result goes, its folder made. Raises ``ConfigError`` before anything is measured."""
    if job.bench.out is None and job.output_dir is None:
        raise ConfigError("bench.out: no file given, and the job has no folder")
    out = Path(job.bench.out) if job.bench.out is not None else Path(str(job.output_dir)) / RESULT_FILE
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"bench.out: cannot make {out.parent}: {error}") from error
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"bench.out: cannot write {out}")
    return out
