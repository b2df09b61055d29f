"""Tracking: nothing is dropped whatever the clocks do, one process writes, and rates are pooled."""

import importlib.util
import json
import math
import multiprocessing
import pickle
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.types import (
    AR_ASSIGNMENT,
    Assignment,
    DraftCost,
    RoundFacts,
    RoundLoad,
    RoundPlan,
    SequenceLoad,
    SequenceOutcome,
)
from rollout.config import TrackerConfig
from rollout.errors import ConfigError
from rollout.tokens import TokenRecord, Tokens
from rollout.tracking.jsonl import JsonlTracker, read_jsonl
from rollout.tracking.opening import RunIdentity, open_tracker
from rollout.tracking.recorder import RolloutRecorder, round_record
from rollout.tracking.reduce import (
    AcceptanceCounts,
    RolloutPool,
    completion_record,
    round_gauges,
    slowest_build_s,
)
from rollout.tracking.tracker import Tracker, Trackers
from rollout.types import Completion, Provenance


def outcome(
    key: int, *, gamma: int, accepted: int, drafter: str = "w4", censored: bool = False
) -> SequenceOutcome:
    return SequenceOutcome(
        key=key,
        drafter=drafter if gamma else "ar",
        gamma=gamma,
        accepted=accepted,
        committed=accepted + (0 if censored else 1),
        context_tokens=10,
        censored=censored,
        finished=censored,
    )


def facts(*outcomes: SequenceOutcome, index: int = 0, total_s: float = 0.1, version: int = 3) -> RoundFacts:
    return RoundFacts(
        round_index=index,
        policy_version=version,
        batch=len(outcomes),
        prefill_rows=0,
        verify_rows=sum(1 + o.gamma for o in outcomes),
        context_tokens=10,
        draft_s=0.02,
        verify_s=0.05,
        commit_s=0.01,
        total_s=total_s,
        drafts=(DraftCost(drafter="w4", passes=2, rows=4, context_tokens=40, seconds=0.02, failures=1),),
        outcomes=outcomes,
    )


def record(*outcomes: SequenceOutcome, host: str = "host-0", index: int = 0) -> Any:
    # Here, because spawned processes import this file and have no use for torch.
    from rollout.service.records import RoundRecord

    assignments = {
        o.key: Assignment(drafter=o.drafter, gamma=o.gamma) if o.gamma else AR_ASSIGNMENT for o in outcomes
    }
    return RoundRecord(
        host=host,
        at_s=1.5,
        load=RoundLoad(
            round_index=index,
            policy_version=3,
            sequences=tuple(
                SequenceLoad(key=o.key, context_tokens=10, generated_tokens=2, remaining_tokens=5)
                for o in outcomes
            ),
        ),
        plan=RoundPlan(assignments=assignments, reason="tail", predicted_s=0.08, predicted_tokens=4.0),
        facts=facts(*outcomes, index=index),
    )


def completion(*, tokens: int, finish_reason: Any = "stop") -> Completion:
    return Completion(
        prompt_uid="p",
        sample_index=0,
        attempt=0,
        tokens=Tokens(
            TokenRecord(
                token_id=i,
                raw_logprob=-1.0,
                scaled_logprob=-1.0,
                target_logprob=-1.0,
                kept_logmass=0.0,
                policy_version=3,
                origin="accepted" if i % 2 else "plain",
                drafter="w4",
            )
            for i in range(tokens)
        ),
        text="secret text",
        finish_reason=finish_reason,
        error=None,
        provenance=Provenance(
            seed=1,
            host="host-0",
            fingerprint="f",
            drafter_versions={"w4": 3},
            rounds=2,
            drafted=4,
            accepted=3,
            verified_rows=6,
            queued_s=0.0,
            prefill_s=0.1,
            decode_s=0.2,
        ),
    )


# ---- the reducer ----------------------------------------------------------------------------------


def test_acceptance_is_pooled_over_draft_tokens_not_averaged_over_requests() -> None:
    pool = RolloutPool()
    pool.add_round(facts(outcome(1, gamma=8, accepted=8), outcome(2, gamma=2, accepted=0)))
    metrics = pool.metrics(wall_s=1.0)
    assert metrics["rollout/spec_accept_rate"] == pytest.approx(8 / 10)
    assert metrics["rollout/spec_accept_length"] == pytest.approx(1 + 8 / 2)


def test_a_positions_denominator_counts_only_blocks_that_drafted_it() -> None:
    counts = AcceptanceCounts()
    counts.add(outcome(1, gamma=3, accepted=3))
    counts.add(outcome(2, gamma=3, accepted=1))
    counts.add(outcome(3, gamma=1, accepted=1))
    counts.add(outcome(4, gamma=0, accepted=0))
    assert counts.by_position() == {0: 1.0, 1: 1 / 2, 2: 1 / 2}
    assert counts.drafts == 3


def test_a_block_cut_by_a_stop_says_nothing_about_the_positions_it_cut_off() -> None:
    counts = AcceptanceCounts()
    counts.add(outcome(1, gamma=4, accepted=2, censored=True))
    assert counts.by_position() == {0: 1.0, 1: 1.0}
    counts.add(outcome(2, gamma=4, accepted=2))
    assert counts.by_position() == {0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0}


def test_draft_tokens_judged_singly_have_one_position_and_wrong_ones_end_blocks() -> None:
    counts = AcceptanceCounts()
    counts.add(outcome(1, gamma=9, accepted=6)._replace(judged_singly=True))
    counts.add(outcome(2, gamma=2, accepted=2)._replace(judged_singly=True))
    assert counts.by_position() == {0: 8 / 11}
    assert (counts.drafts, counts.drafted, counts.accepted) == (4, 11, 8)


def test_a_step_without_speculation_sends_zeros_and_no_made_up_positions() -> None:
    pool = RolloutPool()
    pool.add_round(facts(outcome(1, gamma=0, accepted=0)))
    metrics = pool.metrics(wall_s=1.0)
    assert metrics["rollout/spec_accept_rate"] == 0.0
    assert metrics["rollout/spec_accept_length"] == 0.0
    assert metrics["rollout/spec_drafted_tokens"] == 0.0
    assert metrics["rollout/ar_rounds_frac"] == 1.0
    assert not [name for name in metrics if "_pos_" in name]
    assert all(math.isfinite(v) for v in RolloutPool().metrics(wall_s=0.0).values())


def test_times_tokens_and_prediction_error_add_up() -> None:
    pool = RolloutPool()
    for predicted_s in (0.05, 0.15):
        plan = RoundPlan(assignments={}, reason="", predicted_s=predicted_s, probe=predicted_s > 0.1)
        pool.add_round(facts(outcome(1, gamma=2, accepted=1), outcome(2, gamma=0, accepted=0)), plan)
    pool.add_completions([completion(tokens=4), completion(tokens=8, finish_reason="length")])
    pool.add_update(version=4, update_s=0.5, drafter_build_s=0.3)
    metrics = pool.metrics(wall_s=2.0)
    expected = {
        "tokens": 12.0,
        "tokens_per_s": 6.0,
        "committed_tokens": 6.0,
        "draft_s": 0.04,
        "verify_s": 0.1,
        "commit_s": 0.02,
        "round_s": 0.2,
        "batch_mean": 2.0,
        "gamma_mean": 1.0,
        "drafter_frac_w4": 0.5,
        "probe_rounds_frac": 0.5,
        "predicted_over_measured": 1.0,
        "prediction_error_frac": 0.5,
        "spec_draft_failures": 2.0,
        "length_mean_tokens": 6.0,
        "length_max_tokens": 8.0,
        "finish_length_frac": 0.5,
        "weight_sync_s": 0.5,
        "drafter_build_s": 0.3,
        "policy_version": 4.0,
    }
    for name, value in expected.items():
        assert metrics[f"rollout/{name}"] == pytest.approx(value), name


def test_the_time_of_a_drafter_build_is_the_slowest_hosts_and_unknown_is_not_zero() -> None:
    stats = {
        "host/a/drafter/w4_build_s": 0.2,
        "host/a/drafter/history_build_s": 0.1,
        "host/b/drafter/w4_build_s": 0.25,
        "host/b/drafter/w4_version": 7.0,
        "service/live": 9.0,
    }
    assert slowest_build_s(stats) == pytest.approx(0.3)
    assert slowest_build_s({"service/live": 9.0}) is None
    pool = RolloutPool()
    pool.add_update(version=1, update_s=0.5, drafter_build_s=None)
    assert "rollout/drafter_build_s" not in pool.metrics(wall_s=1.0)


def test_a_rounds_point_of_the_timeline_names_drafters_gamma_and_batch() -> None:
    gauges = round_gauges(facts(outcome(1, gamma=4, accepted=2), outcome(2, gamma=0, accepted=0)))
    assert (gauges["engine/batch"], gauges["engine/gamma_mean"], gauges["engine/gamma_max"]) == (2, 2, 4)
    assert gauges["engine/sequences_w4"] == 1
    assert gauges["engine/accept_rate"] == 0.5
    assert "engine/accept_rate" not in round_gauges(facts(outcome(1, gamma=0, accepted=0)))


def test_a_completions_line_is_plain_and_holds_no_text() -> None:
    line = completion_record(completion(tokens=5))
    assert json.loads(json.dumps(line)) == line
    assert line["num_accepted_draft_tokens"] == 3
    assert line["tokens_by_origin"] == {"plain": 3, "accepted": 2}
    assert "secret" not in json.dumps(line)


# ---- the journal ----------------------------------------------------------------------------------


def test_every_line_is_versioned_and_carries_its_own_clock(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, run_id="r1")
    tracker.log({"rollout/tokens": 4}, clock="rollout/step", at=7)
    tracker.record("events", {"event": "start"})
    tracker.finish()
    (line,) = read_jsonl(tmp_path)
    assert (line["schema"], line["kind"], line["run_id"]) == (1, "metrics", "r1")
    assert (line["clock"], line["at"], line["values"]) == ("rollout/step", 7, {"rollout/tokens": 4})
    (event,) = read_jsonl(tmp_path, "events")
    assert event["event"] == "start"


def test_a_resumed_run_appends_and_loses_nothing_when_a_clock_steps_back(tmp_path: Path) -> None:
    """A46."""
    first = JsonlTracker(tmp_path, run_id="r1")
    for step in range(40, 50):
        first.log({"trainer/loss": step}, clock="trainer/step", at=step)
    first.finish()
    second = JsonlTracker(tmp_path, run_id="r1")
    for step in range(40, 60):
        second.log({"trainer/loss": step}, clock="trainer/step", at=step)
        second.log({"engine/batch": 2}, clock="engine/round", at=10 * step)
    second.finish()
    lines = list(read_jsonl(tmp_path))
    assert [x["at"] for x in lines if x["clock"] == "trainer/step"] == [*range(40, 50), *range(40, 60)]
    assert sum(x["clock"] == "engine/round" for x in lines) == 20


@pytest.mark.parametrize("padding", [0, 200_000])
def test_a_line_torn_by_a_crash_is_cut_off_and_the_rest_kept(tmp_path: Path, padding: int) -> None:
    tracker = JsonlTracker(tmp_path, run_id="r1")
    tracker.record("events", {"event": "whole", "more": "x" * padding})
    tracker.finish()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"schema": 1, "event": "torn' + b"y" * padding)
    assert [x["event"] for x in read_jsonl(tmp_path, "events")] == ["whole"]
    again = JsonlTracker(tmp_path, run_id="r1")
    again.record("events", {"event": "after"})
    again.finish()
    assert [x["event"] for x in read_jsonl(tmp_path, "events")] == ["whole", "after"]


def test_a_journal_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"schema": 99}\n')
    with pytest.raises(ValueError, match="schema 99"):
        list(read_jsonl(tmp_path))


def test_what_is_not_finite_is_named_not_hidden(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, run_id="r1")
    tracker.log({"trainer/loss": math.nan, "trainer/lr": 0.1}, clock="trainer/step", at=1)
    (line,) = read_jsonl(tmp_path)
    assert (line["values"], line["nonfinite"]) == ({"trainer/lr": 0.1}, ["trainer/loss"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine/batch": 1.0}, "runs on engine/round, not on rollout/step"),
        ({"loss": 1.0}, "expected AREA/NAME"),
        ({"nowhere/x": 1.0}, "expected AREA/NAME"),
        ({"rollout/x": "1"}, "not a number"),
        ({"rollout/x": True}, "not a number"),
    ],
)
def test_a_metric_under_a_wrong_name_clock_or_type_is_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    tracker = Trackers([JsonlTracker(tmp_path, run_id="r1")])
    with pytest.raises(ValueError, match=message):
        tracker.log(values, clock="rollout/step", at=0)


def test_a_record_that_is_not_plain_is_refused(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, run_id="r1")
    with pytest.raises(ValueError, match="not plain data"):
        tracker.record("events", {"handle": object()})
    with pytest.raises(ValueError, match="cannot name a kind"):
        tracker.record("../metrics", {})


# ---- the recorder ---------------------------------------------------------------------------------


def test_the_recorder_charts_and_journals_every_round_of_every_host(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, run_id="r1")
    recorder = RolloutRecorder(tracker)
    recorder.rounds([record(outcome(1, gamma=2, accepted=1), index=i) for i in range(3)])
    recorder.rounds([record(outcome(9, gamma=0, accepted=0), host="host-1", index=i) for i in range(2)])
    recorder.completions([completion(tokens=3)], rollout_step=0)
    recorder.update(version=5, update_s=0.2, drafter_build_s=0.1)
    metrics = recorder.step(0, wall_s=1.0, more={"rollout/reward_mean": 0.5})
    after = recorder.step(1, wall_s=1.0)
    tracker.finish()
    rounds = list(read_jsonl(tmp_path, "rounds"))
    assert [r["round"] for r in rounds] == [0, 1, 2, 3, 4]
    assert [r["host"] for r in rounds] == ["host-0"] * 3 + ["host-1"] * 2
    assert rounds[0]["plan"]["reason"] == "tail"
    assert rounds[0]["facts"]["outcomes"]["gamma"] == [2]
    assert metrics["rollout/rounds"] == 5
    assert metrics["rollout/reward_mean"] == 0.5
    assert (after["rollout/rounds"], after["rollout/policy_version"]) == (0.0, 5.0)
    points = [x for x in read_jsonl(tmp_path) if x["clock"] == "engine/round"]
    assert [x["at"] for x in points] == [0, 1, 2, 3, 4]
    (ended,) = read_jsonl(tmp_path, "completions")
    assert (ended["rollout_step"], ended["tokens"]) == (0, 3)


def test_a_rounds_line_keeps_every_fact_that_replays_the_decision() -> None:
    source = record(outcome(1, gamma=2, accepted=1), outcome(2, gamma=0, accepted=0))
    line = round_record(
        host=source.host, at_s=source.at_s, load=source.load, plan=source.plan, facts=source.facts
    )
    assert json.loads(json.dumps(line)) == line
    assert line["load"]["sequences"]["key"] == [1, 2]
    assert line["plan"]["assignments"] == {"key": [1, 2], "drafter": ["w4", "ar"], "gamma": [2, 0]}
    assert line["facts"]["outcomes"]["accepted"] == [1, 0]


# ---- one writer -----------------------------------------------------------------------------------


def test_a_tracker_refuses_to_be_sent_to_another_process(tmp_path: Path) -> None:
    """A47: a run has one owner."""
    with pytest.raises(TypeError, match="cannot be sent"):
        pickle.dumps(Trackers([JsonlTracker(tmp_path, run_id="r1")]))


def test_a_finished_tracker_takes_nothing_and_finishing_twice_is_harmless(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, run_id="r1")
    tracker.finish()
    tracker.finish()
    with pytest.raises(RuntimeError, match="finished"):
        tracker.record("events", {})


PATIENCE_S = 60.0
"""Until what another process should do is given up: as slow as a machine may be."""


def _send_rows(rows: Any, count: int) -> None:
    for i in range(count):
        rows.put({"rollout/tokens": i})
    if count > 100:
        time.sleep(60)


def _misuse(tracker: JsonlTracker, told: Any) -> None:
    try:
        tracker.log({"rollout/tokens": 1}, clock="rollout/step", at=0)
    except RuntimeError as error:
        told.put(str(error))


def _open(folder: Path, kind: Any, **more: Any) -> Tracker:
    run = RunIdentity(folder=folder, run_id="r1", settings={"seed": 0})
    return open_tracker(TrackerConfig(kind=kind, **more), run)


@pytest.mark.parametrize("kind", ["jsonl", pytest.param("wandb", marks=pytest.mark.slow)])
def test_four_forked_and_spawned_senders_and_a_killed_one_do_not_stop_the_writer(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A47."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracker = _open(tmp_path, kind)
    fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
    rows = spawn.Queue()
    senders = [c.Process(target=_send_rows, args=(rows, 5)) for c in (fork, fork, spawn)]
    victim_rows = fork.Queue()  # a killed process may take its queue's lock with it: it has its own
    victim = fork.Process(target=_send_rows, args=(victim_rows, 1000))
    for process in (*senders, victim):
        process.start()
    victim_rows.get(timeout=PATIENCE_S)
    victim.kill()
    for at in range(15):
        tracker.log(rows.get(timeout=PATIENCE_S), clock="rollout/step", at=at)
    for process in (*senders, victim):
        process.join(PATIENCE_S)
        assert process.exitcode is not None
    tracker.finish()
    assert len(list(read_jsonl(tmp_path))) == 15


def test_a_forked_child_cannot_write_to_the_drivers_journal(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, run_id="r1")
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    child = context.Process(target=_misuse, args=(tracker, told))
    child.start()
    assert "belongs to the driver" in told.get(timeout=PATIENCE_S)
    child.join(PATIENCE_S)
    assert list(read_jsonl(tmp_path)) == []


# ---- backends -------------------------------------------------------------------------------------


def _wandb_records(path: Path) -> list[bytes]:
    """Return the records of an offline run's file: 32 KiB blocks of checked chunks after a 7-byte head."""
    data, records, pending, at = path.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, part = struct.unpack_from("<HB", data, at + 4)
        pending += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # a whole record, or its last chunk
            records.append(pending)
            pending = b""
    return records


@pytest.mark.slow
def test_wandb_keeps_every_row_offline_when_the_trainers_step_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A46."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    tracker = _open(tmp_path, "wandb")
    steps = [*range(45, 50), *range(40, 60)]
    for i, step in enumerate(steps):
        tracker.log({"trainer/loss": float(step)}, clock="trainer/step", at=step)
        tracker.log({"engine/batch": float(i)}, clock="engine/round", at=i)
    tracker.finish()
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # finish() returns before wandb's own process has written the file; this waits for it

    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    parsed = [Record.FromString(raw) for raw in _wandb_records(file)]
    history = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in parsed
        if r.WhichOneof("record_type") == "history"
    ]
    assert [row["trainer/step"] for row in history if "trainer/loss" in row] == steps
    assert [row["engine/round"] for row in history if "engine/batch" in row] == list(range(25))
    metrics = [r.metric for r in parsed if r.WhichOneof("record_type") == "metric"]
    assert {m.glob_name: m.step_metric for m in metrics if m.glob_name}["engine/*"] == "engine/round"
    assert len(list(read_jsonl(tmp_path))) == 50


@pytest.mark.slow
def test_without_a_login_an_online_run_stays_offline_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = _open(tmp_path, "wandb", offline=False)
    tracker.finish()
    assert "no wandb login found" in caplog.text
    assert list(tmp_path.glob("wandb/offline-run-*"))


@pytest.mark.parametrize("kind", ["trackio", "tensorboard"])
def test_a_backend_that_is_not_installed_is_named_with_its_extra(tmp_path: Path, kind: str) -> None:
    if importlib.util.find_spec(kind):
        pytest.skip(f"{kind} is installed")
    with pytest.raises(ConfigError, match=r"needs the package '.*'; install taildraft\[report\]"):
        _open(tmp_path, kind)


def test_tensorboard_gets_every_curve_over_its_own_clock(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the report extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = _open(tmp_path, "tensorboard")
    for at in (5, 6, 2):
        tracker.log({"trainer/loss": float(at)}, clock="trainer/step", at=at)
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.purge_orphaned_data = False
    events.Reload()
    assert sorted(e.step for e in events.Scalars("trainer/loss")) == [2, 5, 6]


def test_trackio_stores_rows_with_their_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="the report extra is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    tracker = _open(tmp_path, "trackio")
    for at in (5, 6, 2):
        tracker.log({"trainer/loss": float(at)}, clock="trainer/step", at=at)
    tracker.finish()
    rows = SQLiteStorage.get_logs("taildraft", "r1")
    assert [row["trainer/step"] for row in rows] == [5, 6, 2]


def test_parquet_holds_every_value_of_the_journal(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    tracker = _open(tmp_path, "jsonl", parquet=True)
    recorder = RolloutRecorder(tracker, folder=tmp_path)
    first = record(outcome(1, gamma=2, accepted=1))
    recorder.rounds([replace(first, events=({"event": "controller"},))])
    recorder.step(0, wall_s=1.0)
    tracker.finish()
    metrics = pq.read_table(tmp_path / "metrics.parquet").to_pylist()
    lines = list(read_jsonl(tmp_path))
    assert len(metrics) == sum(len(x["values"]) for x in lines)
    rounds = pq.read_table(tmp_path / "rounds.parquet").to_pylist()
    assert json.loads(rounds[0]["facts"])["batch"] == 1
    control = tmp_path / "controller-host-0.jsonl"  # in the same folder, and no kind of the journal
    assert control.exists()
    assert not list(tmp_path.glob("controller-*.parquet"))
