"""Calibration: measured once per machine and model, by one process at a time, on an idle engine only."""

import dataclasses
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.types import AR_ASSIGNMENT, POLICY, RoundPlan
from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.jobs.calibrate import calibrate, calibration_key, load_or_calibrate
from rollout.testing import tiny_policy
from rollout.testing_native import requests_for, tiny_engine

SETTINGS = EngineConfig(max_batch=2, max_context_tokens=64, decoder="torch", threads=1)
CONTROLLER = ControllerConfig()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NativeEngine:
    monkeypatch.setenv("TAILDRAFT_CACHE", str(tmp_path))
    drafters = [build(name, DrafterConfig(w4_kernel="torch")) for name in ("w4", "history")]
    return tiny_engine(tiny_policy(), drafters, compiled=False, config=SETTINGS)


def test_every_part_that_runs_a_model_is_priced_and_history_is_not(engine: NativeEngine) -> None:
    found = calibrate(engine, CONTROLLER, key="k", budget_s=0.5)
    assert set(found.parts) == {POLICY, "w4"}
    assert all(part.samples >= 4 for part in found.parts.values())
    assert found.other.base_s + found.other.s_per_row > 0
    assert Calibration.from_json(found.to_json(), key="k") == found


def test_nothing_of_the_throw_away_requests_stays(engine: NativeEngine) -> None:
    before = engine.gauges()["engine/kv_pages_used"]
    calibrate(engine, CONTROLLER, key="k", budget_s=0.1)
    assert not engine.busy
    assert engine.gauges()["engine/kv_pages_used"] == before


def test_a_busy_engine_is_not_calibrated(engine: NativeEngine) -> None:
    engine.add(requests_for(vocab=48, prompts=1)[0])
    engine.run_round(
        RoundPlan(assignments={s.key: AR_ASSIGNMENT for s in engine.load().sequences}, reason="")
    )
    with pytest.raises(ValueError, match="idle"):
        calibrate(engine, CONTROLLER, key="k")


def test_the_second_start_on_a_machine_loads_what_the_first_measured(
    engine: NativeEngine, tmp_path: Path
) -> None:
    first = load_or_calibrate(engine, CONTROLLER, SETTINGS, budget_s=0.1)
    (file,) = (tmp_path / "calibration").glob("*.json")
    stamp = file.stat().st_mtime_ns
    assert load_or_calibrate(engine, CONTROLLER, SETTINGS, budget_s=0.1) == first
    assert file.stat().st_mtime_ns == stamp


def test_a_damaged_file_is_measured_anew_and_said_so(
    engine: NativeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "calibration"
    folder.mkdir()
    file = folder / f"{calibration_key(engine, SETTINGS)}.json"
    file.write_text("{")
    load_or_calibrate(engine, CONTROLLER, SETTINGS, budget_s=0.1)
    assert "measured anew" in caplog.text
    assert json.loads(file.read_text())["key"] == file.stem


@pytest.mark.parametrize("change", [{"threads": 2}, {"decoder": "compiled"}, {"dtype": "float32"}])
def test_what_a_timing_depends_on_is_in_its_name(engine: NativeEngine, change: dict[str, Any]) -> None:
    other = dataclasses.replace(SETTINGS, **change)
    assert calibration_key(engine, SETTINGS) != calibration_key(engine, other)


def test_another_policy_version_needs_no_new_calibration(engine: NativeEngine) -> None:
    before = calibration_key(engine, SETTINGS)
    engine.policy_version += 1
    assert calibration_key(engine, SETTINGS) == before


def _hold(path: str, told: Any) -> None:
    import fcntl

    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        told.put("held")
        time.sleep(0.5)


def test_two_processes_do_not_measure_at_the_same_time(engine: NativeEngine, tmp_path: Path) -> None:
    lock = tmp_path / "calibration" / f"{calibration_key(engine, SETTINGS)}.lock"
    lock.parent.mkdir()
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    holder = context.Process(target=_hold, args=(str(lock), told))
    holder.start()
    told.get(timeout=20)
    started_s = time.monotonic()
    load_or_calibrate(engine, CONTROLLER, SETTINGS, budget_s=0.1)
    assert time.monotonic() - started_s > 0.3
    holder.join(10)
