"""Calibration: measured once per machine and model, by one process at a time, on an idle engine only."""

import dataclasses
import json
import multiprocessing
import os
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.testing import SMALL_POLICY, SMALL_W4, SimulatedMachine
from controller.types import AR_ASSIGNMENT, POLICY, RoundPlan
from drafters.config import DrafterConfig
from drafters.kernels.processor import Processor
from drafters.registry import build
from rollout.calibration import neighbours, store
from rollout.calibration.measure import MIN_SAMPLES, ROUNDS_PER_BATCH, calibrate
from rollout.calibration.neighbours import TICKS_PER_S
from rollout.calibration.store import calibrate_anew, calibration_key, load_or_calibrate
from rollout.config import EngineConfig
from rollout.engine.native import build as native_build
from rollout.engine.native.engine import NativeEngine
from rollout.engine.protocol import RoundOutcome
from rollout.job_config import JobConfig
from rollout.jobs.calibrate import main as calibrate_command
from rollout.testing import tiny_looped_policy, tiny_policy
from rollout.testing_native import requests_for, tiny_engine

SETTINGS = EngineConfig(max_batch=2, max_context_tokens=64, decoder="compiled", threads=1)
CONTROLLER = ControllerConfig()

LONG = 250.0
"""So many times a small policy's forward is one of a policy of billions of weights."""

PATIENCE_S = 60.0
"""Until what another process should do is given up: as slow as a machine may be."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NativeEngine:
    drafters = [build(name, DrafterConfig()) for name in ("w4", "history")]
    built = tiny_engine(tiny_policy(), drafters, compiled=True, config=SETTINGS)
    monkeypatch.setenv("TAILDRAFT_CACHE", str(tmp_path))  # not before: the kernels stay where they are
    return built


def test_every_part_that_runs_a_model_is_priced_and_history_is_not(engine: NativeEngine) -> None:
    found = calibrate(engine, CONTROLLER, key="k", budget_s=0.5)
    assert set(found.parts) == {POLICY, "w4"}
    assert all(part.samples >= 4 for part in found.parts.values())
    assert found.other.base_s + found.other.s_per_row > 0
    assert set(found.drafts) == {"w4"}, "what its rounds cost beside passes is told apart"
    assert found.taken_utc.endswith("Z")
    assert Calibration.from_json(found.to_json(), key="k") == found


def test_rounds_that_price_lanes_are_as_long_as_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that ends in one cuts it short, and what the round costs would be spread over few passes."""
    settings = EngineConfig(max_batch=1, max_context_tokens=512, decoder="compiled", threads=1)
    built = tiny_engine(
        tiny_looped_policy(layers=1), [build("wavefront", DrafterConfig())], compiled=True, config=settings
    )
    passes = built.part_shapes()["wavefront"].passes_of(1, alone=True)
    seen: list[int] = []
    run_round = built.run_round

    def noted(plan: RoundPlan) -> RoundOutcome:
        outcome = run_round(plan)
        seen.extend(d.passes for d in outcome.facts.drafts)
        return outcome

    monkeypatch.setattr(built, "run_round", noted)
    calibrate(built, CONTROLLER, key="k", budget_s=0.1)
    assert passes > 4
    assert seen == [passes] * ROUNDS_PER_BATCH


def test_a_policy_of_long_forwards_is_calibrated_in_about_the_time_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forwards of a second, as of billions of weights on a processor, on a clock of the test's own."""
    settings = dataclasses.replace(SETTINGS, max_batch=16)
    engine = tiny_engine(tiny_policy(), [build("w4", DrafterConfig())], compiled=True, config=settings)
    clockwork, now_s = Clockwork(engine, monkeypatch), [0.0]
    clockwork.factors = dict.fromkeys(clockwork.factors, LONG)
    time_forward, run_round = clockwork.time_forward, engine.run_round
    calls: Counter[str] = Counter()
    batches: set[int] = set()

    def timed(part: str, **shape: int) -> float:
        seconds = time_forward(part, **shape)
        now_s[0] += seconds
        calls[part] += 1
        return seconds

    def ran(plan: RoundPlan) -> RoundOutcome:
        now_s[0] += 1.0
        outcome = run_round(plan)
        batches.add(outcome.facts.batch)
        return outcome

    monkeypatch.setattr(engine, "time_forward", timed)
    monkeypatch.setattr(engine, "run_round", ran)
    found = calibrate(engine, CONTROLLER, key="k", clock=lambda: now_s[0])
    assert found.parts["w4"].samples == MIN_SAMPLES, "after the policy's the time is over"
    assert found.parts[POLICY].samples >= MIN_SAMPLES
    assert found.quality.verdict == "provisional"
    assert max(batches) == 1, "rounds of more sequences are left out"
    assert now_s[0] < 60.0, calls


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


def test_the_command_forgets_the_kept_timings_of_kernels_before_it_builds_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class ReachedError(Exception):
        pass

    def build_engine(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setenv("TAILDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(native_build, "build_engine", build_engine)
    kept, another = tmp_path / "calibration" / "kernels-1.json", tmp_path / "calibration" / "1.json"
    kept.parent.mkdir()
    kept.touch()
    another.touch()
    with pytest.raises(ReachedError):
        calibrate_command(JobConfig())
    assert not kept.exists()
    assert another.exists()


class Clockwork:
    """Forwards that take exactly what a simulated machine says, times a factor by part and by call."""

    def __init__(self, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = SimulatedMachine(
            shapes={name: SMALL_POLICY if name == POLICY else SMALL_W4 for name in (POLICY, "w4")}
        )
        self.factors = {POLICY: 1.0, "w4": 1.0}
        self.jitter = [1.0]
        self.calls = 0
        monkeypatch.setattr(engine, "time_forward", self.time_forward)
        monkeypatch.setattr(
            neighbours.Neighbours, "share", lambda self: 0.0
        )  # other work here is no part of the test

    def time_forward(self, part: str, *, rows: int, context_tokens: int, sequences: int = 0) -> float:
        self.calls += 1
        sequences = sequences or rows
        seconds = self.machine.forward_s(
            part,
            rows=rows,
            sequences=sequences,
            read=context_tokens * sequences,
            context=context_tokens * rows,
            round_index=0,
        )
        return seconds * self.factors[part] * self.jitter[self.calls % len(self.jitter)]


@pytest.fixture
def clockwork(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    return Clockwork(engine, monkeypatch)


def start(engine: NativeEngine) -> Calibration:
    return load_or_calibrate(engine, CONTROLLER, SETTINGS)


def test_the_second_start_on_a_machine_loads_what_the_first_measured_and_checks_it(
    engine: NativeEngine, tmp_path: Path, clockwork: Clockwork
) -> None:
    first = start(engine)
    assert first.quality.verdict == "good"
    (file,) = (tmp_path / "calibration").glob("*.json")
    stamp, calls = file.stat().st_mtime_ns, clockwork.calls
    assert start(engine) == first
    assert file.stat().st_mtime_ns == stamp
    assert 0 < clockwork.calls - calls < 40


def test_memory_shared_with_neighbours_is_left_to_the_rounds(
    engine: NativeEngine, clockwork: Clockwork
) -> None:
    first = start(engine)
    clockwork.factors = {POLICY: 1.6, "w4": 1.6}
    assert start(engine) == first


@pytest.mark.parametrize(
    "factors",
    [
        {POLICY: 1.5, "w4": 1.0},
        {POLICY: 1 / 1.5, "w4": 1.0},
        {POLICY: 1.0, "w4": 0.5},
        {POLICY: 2.0, "w4": 2.0},
    ],
)
def test_a_kept_calibration_that_no_longer_holds_is_taken_again_and_said_so(
    engine: NativeEngine,
    clockwork: Clockwork,
    factors: dict[str, float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = start(engine)
    clockwork.factors = factors
    second = start(engine)
    assert "now take" in caplog.text
    changed = {a.part: b.fastest_s / a.fastest_s for a, b in zip(first.timings, second.timings, strict=True)}
    assert changed == pytest.approx(factors)
    assert start(engine) == second


def test_a_calibration_whose_repeats_differ_is_provisional_says_so_and_is_taken_again(
    engine: NativeEngine,
    clockwork: Clockwork,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clockwork.jitter = [1.0, 1.3, 1.9, 2.8, 3.9, 5.0, 7.0]
    first = start(engine)
    assert first.quality.verdict == "provisional"
    assert "repeats differ" in first.quality.reason
    assert "provisional" in caplog.text
    clockwork.jitter = [1.0]
    assert start(engine) == first  # hosts that start together share it
    monkeypatch.setattr(store, "PROVISIONAL_S", 0.0)
    second = start(engine)
    assert second.quality.verdict == "good"
    assert start(engine) == second


def test_a_busy_moment_does_not_replace_a_good_calibration(
    engine: NativeEngine, clockwork: Clockwork
) -> None:
    first = start(engine)
    clockwork.factors = {POLICY: 3.0, "w4": 1.0}
    clockwork.jitter = [1.0, 1.3, 1.9, 2.8, 3.9, 5.0, 7.0]
    assert start(engine).quality.verdict == "provisional"
    clockwork.factors, clockwork.jitter = {POLICY: 1.0, "w4": 1.0}, [1.0]
    assert start(engine) == first


def test_hosts_that_start_on_a_busy_machine_measure_once(engine: NativeEngine, clockwork: Clockwork) -> None:
    start(engine)
    clockwork.factors = {POLICY: 3.0, "w4": 1.0}
    clockwork.jitter = [1.0, 1.3, 1.9, 2.8, 3.9, 5.0, 7.0]
    provisional = start(engine)
    calls = clockwork.calls
    for _ in range(3):
        assert start(engine) == provisional
    assert clockwork.calls - calls < 3 * 40  # checks of the good one, no measurement


def test_a_calibration_asked_for_replaces_a_good_one_only_if_it_is_good(
    engine: NativeEngine, clockwork: Clockwork
) -> None:
    first = start(engine)
    clockwork.jitter = [1.0, 1.3, 1.9, 2.8, 3.9, 5.0, 7.0]
    asked, aside = calibrate_anew(engine, CONTROLLER, SETTINGS)
    assert asked.quality.verdict == "provisional"
    clockwork.jitter = [1.0]
    assert start(engine) == first
    clockwork.factors = {POLICY: 1.1, "w4": 1.0}
    second, kept = calibrate_anew(engine, CONTROLLER, SETTINGS)
    assert start(engine) == second != first
    assert kept != aside
    assert not aside.exists()


def test_other_kernels_need_another_calibration(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = calibration_key(engine, SETTINGS)
    folders = []
    for number, folder in enumerate(store.KERNEL_FOLDERS):
        folders.append(tmp_path / str(number) / folder.name)
        shutil.copytree(folder, folders[-1])
    monkeypatch.setattr(store, "KERNEL_FOLDERS", tuple(folders))
    assert calibration_key(engine, SETTINGS) == before
    for folder, name in zip(folders, ("linear_int4.h", "simd.h", "forward.cpp"), strict=True):
        known, path = calibration_key(engine, SETTINGS), folder / name
        path.write_text(path.read_text() + "// faster\n")
        assert calibration_key(engine, SETTINGS) != known


def test_a_kept_calibration_nobody_judged_is_taken_again(
    engine: NativeEngine, tmp_path: Path, clockwork: Clockwork
) -> None:
    first = start(engine)
    (file,) = (tmp_path / "calibration").glob("*.json")
    old = {k: v for k, v in json.loads(file.read_text()).items() if k not in ("quality", "timings")}
    file.write_text(json.dumps(old))
    calls = clockwork.calls
    assert start(engine).timings == first.timings
    assert clockwork.calls - calls > 60


def _spin(seconds: float) -> float:
    """Work for some processor time and return how much it was."""
    began_s = time.process_time()
    while time.process_time() - began_s < seconds:
        pass
    return time.process_time() - began_s


def _write_stat(path: Path, *, user_s: float, steal_s: float) -> None:
    """Write what the system says of our cores, all of it on the first; columns as in proc(5)."""
    cores = sorted(os.sched_getaffinity(0))
    numbers = {c: [0] * 10 for c in cores}
    numbers[cores[0]][0] = round(user_s * TICKS_PER_S)
    numbers[cores[0]][3] = 5000
    numbers[cores[0]][7] = round(steal_s * TICKS_PER_S)
    lines = [f"cpu{c} " + " ".join(map(str, n)) for c, n in numbers.items()]
    path.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5"]) + "\n")


def test_work_of_others_and_stolen_time_are_seen_and_our_own_work_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One core, and a clock of the test's own: a span is as long here as it says."""
    stat, now_s = tmp_path / "stat", [100.0]
    monkeypatch.setattr(neighbours, "STAT", stat)
    monkeypatch.setattr(neighbours, "usable_cores", lambda: sorted(os.sched_getaffinity(0))[:1])
    monkeypatch.setattr(neighbours, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    _write_stat(stat, user_s=0.0, steal_s=0.0)
    watch = neighbours.Neighbours()
    assert watch.share() is None, "nothing can be said of an instant"
    own_s = _spin(neighbours.LEAST_S / 2)
    now_s[0] += neighbours.LEAST_S
    _write_stat(stat, user_s=own_s, steal_s=0.0)
    assert watch.share() == pytest.approx(0.0, abs=0.05)
    now_s[0] += neighbours.LEAST_S
    _write_stat(stat, user_s=own_s + 0.2, steal_s=0.1)
    assert watch.share() == pytest.approx(0.3 / (2 * neighbours.LEAST_S), abs=0.05)
    stat.unlink()
    assert watch.share() is None


def test_a_damaged_file_is_measured_anew_and_said_so(
    engine: NativeEngine, tmp_path: Path, clockwork: Clockwork, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "calibration"
    folder.mkdir()
    file = folder / f"{calibration_key(engine, SETTINGS)}.json"
    file.write_text("{")
    start(engine)
    assert "measured anew" in caplog.text
    assert json.loads(file.read_text())["key"] == file.stem


@pytest.mark.parametrize("change", [{"threads": 2}, {"decoder": "torch"}, {"dtype": "float32"}])
def test_what_a_timing_depends_on_is_in_its_name(engine: NativeEngine, change: dict[str, Any]) -> None:
    other = dataclasses.replace(SETTINGS, **change)
    assert calibration_key(engine, SETTINGS) != calibration_key(engine, other)


@pytest.mark.parametrize("change", [{"family": 25}, {"model": 49}, {"stepping": 0}, {"features": ("avx2",)}])
def test_another_processor_of_the_same_name_has_a_calibration_of_its_own(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    first = Processor(name="AMD EPYC", family=23, model=1, stepping=2, features=("avx2", "fma"))
    keys = []
    for one in (first, dataclasses.replace(first, **change), first):
        monkeypatch.setattr(store, "processor", lambda one=one: one)
        keys.append(calibration_key(engine, SETTINGS))
    assert keys[0] == keys[2] != keys[1]


def test_another_policy_version_needs_no_new_calibration(engine: NativeEngine) -> None:
    before = calibration_key(engine, SETTINGS)
    engine.policy_version += 1
    assert calibration_key(engine, SETTINGS) == before


def _hold(path: str, told: Any, over: Any) -> None:
    import fcntl

    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        told.set()
        assert over.wait(PATIENCE_S)


def test_two_processes_do_not_measure_at_the_same_time(
    engine: NativeEngine, tmp_path: Path, clockwork: Clockwork
) -> None:
    lock = tmp_path / "calibration" / f"{calibration_key(engine, SETTINGS)}.lock"
    lock.parent.mkdir()
    context = multiprocessing.get_context("fork")
    told, over = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(str(lock), told, over))
    holder.start()
    assert told.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(start, engine)
        try:
            with pytest.raises(TimeoutError):
                second.result(timeout=0.2)
            assert clockwork.calls == 0
        finally:
            over.set()
        second.result(timeout=PATIENCE_S)
    assert clockwork.calls > 0
    holder.join(PATIENCE_S)
