"""The whole command: hosts, TRL, tracking and the run's folder, on a tiny policy, as a user starts it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytest.importorskip("trl", reason="the trl extra is not installed")

from controller.replay import read_log, replay
from rollout.cli import INTERRUPTED
from rollout.testing import save_tiny_folder
from rollout.tracking.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.trl, pytest.mark.ray]


SMALL = (
    "engine=torch",
    "engine.dtype=float32",
    "engine.max_batch=4",
    "engine.max_context_tokens=128",
    "controller=fixed",
    "controller.gamma=2",
    "drafter=history",
    "controller.drafter=history",
    "trainer.prompts_per_step=1",
    "trainer.num_generations=2",
    "trainer.max_new_tokens=8",
    "trainer.samples_per_pass=0",
    "trainer.trainable_layers=0",
    "service.object_store_bytes=100000000",
)

INTERRUPTIBLE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from rollout.cli import main; sys.exit(main())"
)
"""The command, also where whoever runs the tests ignores the signal and lets children inherit that."""


def taildraft(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollout.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_run_leaves_its_settings_its_identity_and_every_number(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path / "policy", "smollm2")
    done = taildraft(tmp_path, "run", f"policy.source={tmp_path / 'policy'}", "trainer.steps=2", *SMALL)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder,) = (tmp_path / "outputs" / "run").iterdir()
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["output_dir"] == str(folder)
    assert settings["run_id"] == folder.name
    charted = list(read_jsonl(folder))
    assert {line["run_id"] for line in charted} == {folder.name}
    rollouts = [line["values"] for line in charted if line["clock"] == "rollout/step"]
    assert [line["at"] for line in charted if line["clock"] == "rollout/step"] == [0, 1]
    assert all("rollout/spec_accept_rate" in values for values in rollouts)
    assert [values["rollout/completions"] for values in rollouts] == [2.0, 2.0]
    rounds = list(read_jsonl(folder, "rounds"))
    assert sum(v["rollout/rounds"] for v in rollouts) == len(rounds) > 0
    assert len(list(read_jsonl(folder, "completions"))) == 4
    decisions = replay(read_log(folder / "controller-host-0.jsonl"))
    assert len(decisions) == len(rounds)
    assert all(d.same for d in decisions)
    events = list(read_jsonl(folder, "events"))
    assert events[0]["event"] == "service_started"
    assert events[-1]["event"] == "run_ended"
    updates = [line for line in events if line["event"] == "weight_update"]
    assert [0.0 < line["drafter_build_s"] < line["update_s"] for line in updates] == [True, True]


def test_an_interrupted_run_ends_at_once_closes_its_hosts_and_keeps_its_numbers(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path / "policy", "smollm2")
    words = [sys.executable, "-c", INTERRUPTIBLE, "run", f"policy.source={tmp_path / 'policy'}", *SMALL]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TAILDRAFT_TEST_RUN": str(tmp_path)}
    with (tmp_path / "said").open("w") as said:
        run = subprocess.Popen([*words, "trainer.steps=100000"], cwd=tmp_path, env=environment, stderr=said)
        try:
            wait_until(lambda: run.poll() is not None or len(steps_of(tmp_path)) >= 2, timeout_s=200)
            assert any("PolicyHost" in process for process in processes_of(tmp_path))
            run.send_signal(signal.SIGINT)
            assert run.wait(60) == INTERRUPTED, (tmp_path / "said").read_text()[-4000:]
        finally:
            run.kill()
    assert (tmp_path / "said").read_text().splitlines()[-1] == "taildraft run: interrupted"
    assert "Traceback" not in (tmp_path / "said").read_text()
    assert steps_of(tmp_path)[:2] == [0, 1]
    wait_until(lambda: not processes_of(tmp_path), timeout_s=30)
    page = taildraft(tmp_path, "report")
    assert page.returncode == 0, page.stderr


def steps_of(folder: Path) -> list[int]:
    metrics = list((folder / "outputs" / "run").glob("*/metrics.jsonl"))
    lines = [line for path in metrics for line in read_jsonl(path.parent)]
    return [line["at"] for line in lines if line["clock"] == "rollout/step"]


def processes_of(folder: Path) -> list[str]:
    """Return the processes that a run started, by the name it gave to all of them."""
    mark, found = f"TAILDRAFT_TEST_RUN={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text())
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
    return found


def wait_until(what: Callable[[], bool], *, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.1)
