"""The whole command: hosts, TRL, tracking and the run's folder, on a tiny policy, as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("trl", reason="the trl extra is not installed")

from controller.replay import read_log, replay
from rollout.testing import save_tiny_folder
from rollout.tracking.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.trl, pytest.mark.ray]


def taildraft(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollout.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_run_leaves_its_settings_its_identity_and_every_number(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path / "policy", "smollm2")
    done = taildraft(
        tmp_path,
        "run",
        f"policy.source={tmp_path / 'policy'}",
        "engine=torch",
        "engine.dtype=float32",
        "engine.max_batch=4",
        "engine.max_context_tokens=128",
        "controller=fixed",
        "controller.gamma=2",
        "drafter=history",
        "controller.drafter=history",
        "trainer.steps=2",
        "trainer.prompts_per_step=1",
        "trainer.num_generations=2",
        "trainer.max_new_tokens=8",
        "trainer.samples_per_pass=0",
        "trainer.trainable_layers=0",
        "service.object_store_bytes=100000000",
    )
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
