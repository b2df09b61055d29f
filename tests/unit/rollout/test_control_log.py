"""Runs write control logs, and those logs decide the same again."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.replay import Replayed, main, read_log, replay
from controller.testing import SimulatedMachine
from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.config import EngineConfig
from rollout.policy.weights import manifest
from rollout.service.loop import EngineLoop
from rollout.service.records import HostEvents, RoundRecord
from rollout.testing import tiny_policy
from rollout.testing_native import requests_for, tiny_engine
from rollout.tracking.jsonl import JsonlTracker
from rollout.tracking.recorder import RolloutRecorder
from rollout.types import SamplingParams

PARAMS = (SamplingParams(max_tokens=30, ignore_eos=True),)
SETTINGS = EngineConfig(max_batch=6, max_context_tokens=128)


class Run:
    """The native engine under ``auto``, turned by hand, its records handed to a recorder."""

    def __init__(self, folder: Path, *, record_limit: int = 4096) -> None:
        drafters = [build(name, DrafterConfig()) for name in ("w4", "history")]
        engine = tiny_engine(tiny_policy(), drafters, compiled=True, config=SETTINGS)
        shapes = engine.part_shapes()
        # Any calibration will do: the plans are auto's own, the facts this machine's.
        calibration: Calibration = SimulatedMachine(shapes=shapes).calibration(max_batch=6)
        controller = build_controller(ControllerConfig(), engine.traits, shapes, calibration)
        self.events: list[HostEvents] = []
        self.loop = EngineLoop(
            engine, controller, host="host-0", deliver=self.events.append, record_limit=record_limit
        )
        self.recorder = RolloutRecorder(JsonlTracker(folder, run_id="r"), folder=folder)

    def generate(self, seed: int) -> list[RoundRecord]:
        """Run a few requests to their end and return the records of their rounds."""
        self.loop.add(requests_for(vocab=48, prompts=8, params=PARAMS, seed=seed))
        self.loop.turn()
        while self.loop.status().live:
            self.loop.turn()
        return self.loop.take_records()

    def update(self, version: int) -> None:
        """Switch to other weights."""
        state = tiny_policy(seed=version).state
        for future in (
            self.loop.begin_update(manifest(state, version), "drain"),
            self.loop.stage(list(state.items())),
            self.loop.commit_update(),
        ):
            self.loop.turn()
            future.result(timeout=0)


def replayed(folder: Path) -> list[Replayed]:
    return replay(read_log(folder / "controller-host-0.jsonl"))


def test_a_runs_control_log_decides_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    records: list[RoundRecord] = []
    for version in range(3):
        if version:
            run.update(version)
        ran = run.generate(seed=version)
        run.recorder.rounds(ran)
        records += ran
    names = [e["event"] for r in records for e in r.events]
    update = ["policy_changed", "drafter_built", "drafter_built"]
    assert names == ["controller", "drafter_built", "drafter_built", *update, *update]
    decisions = replayed(tmp_path)
    assert [d.logged for d in decisions] == [r.plan for r in records]
    assert [d.facts for d in decisions] == [r.facts for r in records]
    assert all(d.same for d in decisions)
    assert {bool(d.logged.assignments) for d in decisions} == {True, False}
    assert main([str(tmp_path / "controller-host-0.jsonl")]) == 0
    assert f"{len(records)} decisions, 0 differ" in capsys.readouterr().out


def test_a_resumed_run_goes_on_in_the_same_log(tmp_path: Path) -> None:
    first, second = Run(tmp_path), Run(tmp_path)
    first.recorder.rounds(first.generate(seed=1))
    with (tmp_path / "controller-host-0.jsonl").open("a") as file:
        file.write('{"event": "deci')
    second.recorder.rounds(second.generate(seed=2))
    decisions = replayed(tmp_path)
    assert sum(d.load.round_index == 0 for d in decisions) == 2
    assert all(d.same for d in decisions)


def test_a_log_ends_where_records_were_lost_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    records = run.generate(seed=1)
    gap = len(records) // 2
    with caplog.at_level(logging.WARNING, logger="rollout.tracking.control_log"):
        run.recorder.rounds(records[:gap])
        run.recorder.rounds(records[gap + 2 :])
        run.recorder.rounds([replace(records[-1], load=records[0].load)])
    decisions = replayed(tmp_path)
    assert [d.logged for d in decisions] == [r.plan for r in records[:gap]]
    assert all(d.same for d in decisions)
    (warning,) = caplog.messages
    assert f"host-0 lacks rounds {gap} to {gap + 1} and ends" in warning


def test_a_log_whose_start_was_dropped_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, record_limit=5)
    records = run.generate(seed=1)
    assert run.loop.status().records_dropped > 0
    run.recorder.rounds(records)
    run.recorder.rounds(run.generate(seed=2))
    assert not list(tmp_path.glob("controller-*"))
    (warning,) = caplog.messages
    assert "host-0 has no start" in warning
