"""Runs set side by side: what is compared, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.types import AR, RoundFacts, RoundLoad, RoundPlan, SequenceOutcome
from rollout.jobs.compose import compose_job
from rollout.report.journal import read_journal
from rollout.service.records import RoundRecord
from rollout.settings import to_plain
from rollout.tracking.jsonl import JsonlTracker
from rollout.tracking.recorder import RolloutRecorder
from trainers_bridge.looped.grpo_record import REFUSED, Standing, main, side_by_side
from trainers_bridge.looped.readable_json import readable_json
from trainers_bridge.looped.run_acceptance import acceptance
from trainers_bridge.summary import DraftTally, StepResult
from trainers_bridge.watch import STEPS, step_fields


def outcome(drafter: str, *, gamma: int, accepted: int, singly: bool = False) -> SequenceOutcome:
    return SequenceOutcome(
        key=0,
        drafter=drafter,
        gamma=gamma,
        accepted=accepted,
        committed=accepted + 1,
        context_tokens=20,
        censored=False,
        finished=False,
        judged_singly=singly,
    )


def record_rounds(tracker: JsonlTracker) -> None:
    """Two rounds under version 1 and one under version 2."""
    rounds = {
        1: [
            (outcome("shallow_loop_3", gamma=4, accepted=4), outcome("wavefront", gamma=6, accepted=5)),
            (outcome("shallow_loop_3", gamma=4, accepted=0), outcome(AR, gamma=0, accepted=0)),
        ],
        2: [(outcome("wavefront", gamma=8, accepted=8, singly=True),)],
    }
    recorder = RolloutRecorder(tracker)
    for version, each in rounds.items():
        for outcomes in each:
            facts = RoundFacts(
                round_index=0,
                policy_version=version,
                batch=len(outcomes),
                prefill_rows=0,
                verify_rows=4,
                context_tokens=40,
                draft_s=0.001,
                verify_s=0.001,
                commit_s=0.001,
                total_s=0.003,
                outcomes=outcomes,
            )
            load = RoundLoad(round_index=0, policy_version=version, sequences=())
            plan = RoundPlan(assignments={}, reason="asked")
            recorder.rounds([RoundRecord(host="h", at_s=0.0, load=load, plan=plan, facts=facts)])


def record_steps(tracker: JsonlTracker) -> None:
    tally = DraftTally(drafted=4, accepted=3, first_decided=2, first_kept=1)
    for step, by_drafter in ((1, {"shallow_loop_3": tally, "wavefront": tally}), (2, {"wavefront": tally})):
        result = StepResult(
            step=step,
            policy_version=step,
            rewards=(0.1, 1.0),
            step_s=1.0,
            generate_s=0.5,
            weight_sync_s=0.1,
            mismatch_s=0.1,
            drafted_tokens=8,
            accepted_tokens=6,
            tokens=20,
            ids_digest=str(step),
            by_drafter=by_drafter,
        )
        tracker.record(STEPS, step_fields(result))


def run_folder(folder: Path, *overrides: str, digests: list[str] | None) -> Path:
    tracker = JsonlTracker(folder, run_id=folder.name)
    record_rounds(tracker)
    record_steps(tracker)
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
        conditions = {"commit": {"id": "abc", "changed": False}, "versions": {"taildraft": "0.1.0"}}
        summary = {"ids_digest_by_step": digests, "reward_by_step": [0.2, 0.3], "conditions": conditions}
        (folder / "summary.json").write_text(json.dumps(summary))
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
    assert told["plain"]["settings"]["controller"]["kind"] == "ar"
    assert told["taught"]["settings"]["controller"]["kind"] == "auto"
    assert told["taught"]["settings"]["drafter"]["wavefront_depth"] == 2
    assert "wavefront" in told["taught"]["settings"]["drafter"]["names"]
    assert (told["taught"]["commit"]["id"], told["taught"]["version"]) == ("abc", "0.1.0")
    assert told["taught"]["summary"]["reward_by_step"] == [0.2, 0.3]
    assert told["other"]["settings"]["trainer"]["loop_distillation_weight"] == 0
    overlap = told["taught"]["loop_overlap"]
    assert sorted(overlap) == ["1", "2"]
    assert overlap["1"]["first_quarter"] == pytest.approx(0.505)
    assert overlap["1"]["last_quarter"] == pytest.approx(0.565)
    assert str(tmp_path) not in json.dumps(record)


def test_acceptance_is_told_by_drafter_over_steps_and_over_policy_versions(tmp_path: Path) -> None:
    journal = read_journal(run_folder(tmp_path / "run", digests=["a"]))
    found = acceptance(journal)
    assert found["by_policy_version"] == {
        "shallow_loop_3": {
            "policy_version": [1],
            "drafted": [8],
            "accepted": [4],
            "first_decided": [2],
            "first_kept": [1],
        },
        "wavefront": {
            "policy_version": [1, 2],
            "drafted": [6, 8],
            "accepted": [5, 8],
            "first_decided": [1, 8],
            "first_kept": [1, 8],
        },
    }
    tally = {"drafted": [4, 4], "accepted": [3, 3], "first_decided": [2, 2], "first_kept": [1, 1]}
    assert found["by_step"]["wavefront"] == {"step": [1, 2], "policy_version": [1, 2], **tally}
    assert found["by_step"]["shallow_loop_3"]["step"] == [1]


def test_a_policys_gain_is_paired_by_question() -> None:
    before = Standing(depths=[], greedy=(True, False, False, True), sampled=(False, False, False, True))
    after = Standing(depths=[], greedy=(True, True, False, True), sampled=(True, True, True, True))
    told = after.told_beside(before)
    assert told["greedy_accuracy"]["mean"] == 0.75
    assert told["greedy_gain"] == {"mean": 0.25, "standard_error": pytest.approx(0.25)}
    assert told["sampled_gain"]["mean"] == 0.75


def test_the_json_says_what_the_record_does_with_lists_of_numbers_in_a_line() -> None:
    record = {
        "a": [1, 2.5, None, 3],
        "b": [{"c": [1.23456789, -1e-9]}, {}],
        "d": [math.nan, math.inf],
        "e": {"f": [[1, 2], [3]]},
    }
    text = readable_json(record)
    assert '"a": [1, 2.5, null, 3]' in text
    assert json.loads(text) == record | {"b": [{"c": [1.23457, -1e-9]}, {}], "d": [None, None]}


def test_a_run_that_has_not_ended_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path / "going", digests=None)
    assert main([f"going={folder}", "--out", str(tmp_path / "out.json")]) == REFUSED
    assert "no summary in going" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
