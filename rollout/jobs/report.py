"""``taildraft report``: one self-contained HTML page about runs that have ended or still go on."""

import json
import sys
from pathlib import Path

from rollout.errors import ConfigError
from rollout.job_config import JobConfig
from rollout.progress import Progress
from rollout.report.build import build_all
from rollout.run_folder import RUN_FILE

OUTPUTS = Path("outputs")


def main(job: JobConfig) -> int:
    """Write the page, print where it is, and return 0."""
    runs = [_run_folder(name) for name in job.report.runs] or [newest_run(OUTPUTS)]
    out = Path(job.report.out) if job.report.out else runs[0] / "report.html"
    with Progress(f"reading {len(runs)} run{'s' if len(runs) > 1 else ''}"):
        build_all(runs, out)
    sys.stdout.write(f"{out}\n")
    return 0


def newest_run(outputs: Path) -> Path:
    """Return the folder of the ``taildraft run`` last opened under ``outputs``; others keep no journal."""
    records = [r for r in outputs.glob(f"*/*/{RUN_FILE}") if json.loads(r.read_text())["command"] == "run"]
    if not records:
        raise ConfigError(
            f"report.runs: no run under {outputs.resolve()}; name one with runs=[FOLDER], or make one with "
            "taildraft run"
        )
    return max(records, key=lambda record: record.stat().st_mtime).parent


def _run_folder(name: str) -> Path:
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(f"report.runs: there is no folder {name!r}")
    if not (folder / RUN_FILE).exists() and not any(folder.glob("*.jsonl")):
        raise ConfigError(f"report.runs: {name!r} holds no run; name a folder under outputs/run")
    return folder
