"""One folder per run: its settings, its numbers, its identity. Two runs never share one by accident."""

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollout.errors import ConfigError
from rollout.output_files import write_whole

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """A folder that is ours, and the run it belongs to."""

    path: Path
    run_id: str
    resumed: bool
    """Whether the folder already held this run."""


def open_run_folder(command: str, *, output_dir: str | None, run_id: str | None) -> RunFolder:
    """Create or re-open the run's folder and write who it belongs to. Raises ``ConfigError``.

    Without ``output_dir`` it is new and unlike any other, however many are opened in the same instant.
    """
    try:
        return _opened(command, output_dir=output_dir, run_id=run_id)
    except OSError as error:
        raise ConfigError(
            f"output_dir: cannot write there: {error}; name a folder with output_dir=FOLDER"
        ) from error


def _opened(command: str, *, output_dir: str | None, run_id: str | None) -> RunFolder:
    path = _fresh(Path("outputs") / command) if output_dir is None else Path(output_dir).resolve()
    record = path / RUN_FILE
    if record.exists():
        known = _read(record)
        if known["command"] != command:
            raise ConfigError(f"output_dir: {path} holds a run of {known['command']!r}, not of {command!r}")
        if run_id not in (None, known["run_id"]):
            raise ConfigError(f"run_id: {path} holds run {known['run_id']!r}, not {run_id!r}")
        return RunFolder(path=path, run_id=known["run_id"], resumed=True)
    path.mkdir(parents=True, exist_ok=True)
    chosen = run_id or (path.name if output_dir is None else f"{path.name}-{secrets.token_hex(4)}")
    write_whole(record, json.dumps({"schema": 1, "command": command, "run_id": chosen}) + "\n")
    return RunFolder(path=path, run_id=chosen, resumed=False)


def save_config(folder: RunFolder, plain: dict[str, Any]) -> Path:
    """Write the resolved settings as YAML and return the file; a resumed run keeps each start's own."""
    path = folder.path / CONFIG_FILE
    if folder.resumed and path.exists():
        number = 1 + len(list(folder.path.glob("config.resume-*.yaml")))
        path = folder.path / f"config.resume-{number}.yaml"
    write_whole(path, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
    return path


def _fresh(parent: Path) -> Path:
    parent = parent.resolve()
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = parent / f"{stamp}-{secrets.token_hex(4)}"
        try:
            path.mkdir()  # fails when it exists: that is what makes the folder ours
        except FileExistsError:
            continue
        return path


def _read(record: Path) -> dict[str, Any]:
    try:
        known = json.loads(record.read_text())
        return {"command": known["command"], "run_id": known["run_id"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"output_dir: {record} is not a run's record: {error}") from error
