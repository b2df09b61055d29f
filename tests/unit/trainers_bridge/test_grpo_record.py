"""Runs set side by side: what is compared, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.jobs.compose import compose_job
from rollout.report.journal import read_journal
from rollout.settings import to_plain
from rollout.tracking.jsonl import JsonlTracker
from trainers_bridge.looped.grpo_record import REFUSED, main, side_by_side


def run_folder(folder: Path, *overrides: str, digests: list[str] | None) -> Path:
    tracker = JsonlTracker(folder, run_id=folder.name)
    for step in range(8):
        values = {
            "trainer/loop_overlap_1": 0.5 + 0.01 * step,
            "trainer/loop_overlap_2": 0.9,
            "reward/mean": 0.1,
        }
        tracker.log(values, clock="trainer/step", at=step + 1)
    tracker.finish()
    settings = to_plain(compose_job("run", ["experiment=looped", *overrides]))
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    if digests is not None:
        (folder / "summary.json").write_text(json.dumps({"ids_digest_by_step": digests}))
    return folder


def test_runs_are_compared_by_their_ids_and_told_with_their_loops(tmp_path: Path) -> None:
    folders = {
        "taught": run_folder(tmp_path / "taught", digests=["a", "b", "c"]),
        "plain": run_folder(tmp_path / "plain", "controller=ar", digests=["a", "b", "c"]),
        "other": run_folder(
            tmp_path / "other", "trainer.loop_distillation_weight=0", digests=["a", "x", "c"]
        ),
    }
    record = side_by_side({name: read_journal(folder) for name, folder in folders.items()}, held_out=0)
    assert record["same_ids"] == {
        "plain": {"steps_compared": 3, "equal_from_the_start": 3},
        "other": {"steps_compared": 3, "equal_from_the_start": 1},
    }
    told: dict[str, Any] = record["runs"]
    assert told["plain"]["settings"]["controller"] == "ar"
    assert told["other"]["settings"]["trainer"]["loop_distillation_weight"] == 0
    overlap = told["taught"]["loop_overlap"]
    assert sorted(overlap) == ["1", "2"]
    assert overlap["1"]["first_quarter"] == pytest.approx(0.505)
    assert overlap["1"]["last_quarter"] == pytest.approx(0.565)
    assert str(tmp_path) not in json.dumps(record)


def test_a_run_that_has_not_ended_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path / "going", digests=None)
    assert main([f"going={folder}", "--out", str(tmp_path / "out.json")]) == REFUSED
    assert "no summary in going" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
