"""``taildraft calibrate``: measure anew what this machine can do with this policy, keep and show it."""

import sys
import time
from pathlib import Path

from controller.calibration import OTHER, Calibration
from drafters.int4.kept_menus import forget_all
from rollout.calibration.store import calibrate_anew, words, write
from rollout.job_config import JobConfig
from rollout.output_files import writable
from rollout.progress import Progress, say


def main(job: JobConfig) -> int:
    """Measure anew, save, and show the fit. Returns 0."""
    from rollout.engine.native.build import build_engine

    out = None if job.calibrate.out is None else writable(Path(job.calibrate.out), "calibrate.out")
    forget_all()
    with Progress(f"loading policy {job.policy.source}"):
        engine = build_engine(job.policy, job.engine, job.drafter, host="calibrate")
    started_s = time.monotonic()
    calibration, path = calibrate_anew(engine, job.controller, job.engine)
    engine.close()
    say(f"calibrated in {time.monotonic() - started_s:.1f} s, saved as {path}")
    say(words(calibration))
    if out is not None:
        write(out, calibration.to_json())
    sys.stdout.write(_table(calibration))
    return 0


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
