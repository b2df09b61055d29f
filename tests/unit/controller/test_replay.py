import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from controller.config import KINDS, ControllerConfig
from controller.decide import build_controller
from controller.log import (
    Record,
    drafter_built_record,
    facts_from_dict,
    facts_record,
    facts_to_dict,
    load_from_dict,
    load_to_dict,
    plan_from_dict,
    plan_to_dict,
    policy_changed_record,
)
from controller.replay import main, read_log, replay, summary
from controller.testing import HISTORY, SMALL_POLICY, SMALL_W4, SimulatedMachine, load_of, traits_of
from controller.types import POLICY, ForwardSeconds, PassSeconds, RoundPlan

SHAPES = {POLICY: SMALL_POLICY, "w4": SMALL_W4, "history": HISTORY}


def logged_run(kind: str, *, rounds: int = 150) -> list[Record]:
    """A run with updates, rebuilds, failures and a draining batch, as its log, read anew each time."""
    return [json.loads(line) for line in written_run(kind, rounds)]


@functools.cache
def written_run(kind: str, rounds: int) -> tuple[str, ...]:
    """The log's lines."""
    machine = SimulatedMachine(shapes=SHAPES, hazard=lambda drafter, key, position, round_index: 0.8)
    config = ControllerConfig(kind=kind)  # type: ignore[arg-type]
    controller = build_controller(config, traits_of(SHAPES, max_gamma=11), SHAPES, machine.calibration())
    records = [controller.controller_record()]
    version = 0
    for r in range(rounds):
        if r % 60 == 59:
            version += 1
            controller.policy_changed(version)
            records.append(policy_changed_record(version))
            controller.drafter_built("w4", version)
            records.append(drafter_built_record("w4", version))
        load = load_of(max(1, 12 - r // 10), round_index=r, ready={"history": r % 4}, policy_version=version)
        plan = controller.decide(load, now_s=0.1 * r)
        records.append(controller.decision_record())
        done = machine.run(load, plan)
        if r % 50 == 20:
            done = replace(done, drafts=tuple(replace(d, failures=1) for d in done.drafts))
        controller.observe(done)
        records.append(facts_record(done))
    return tuple(json.dumps(r) for r in records)


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_decides_the_same_again(kind: str) -> None:
    decisions = replay(logged_run(kind))
    assert len(decisions) == 150
    assert all(d.same for d in decisions)
    assert all(d.facts is not None for d in decisions)


def test_another_config_says_what_it_would_have_done() -> None:
    records = logged_run("auto")
    decisions = replay(records, config=ControllerConfig(kind="ar"))
    assert all(d.replayed.assignments == {} for d in decisions)
    assert any(not d.same for d in decisions)


def test_a_changed_fact_can_change_a_decision() -> None:
    records = logged_run("auto")
    for record in records:
        if record["event"] == "facts":
            for outcome in record["facts"]["outcomes"]:
                outcome["accepted"], outcome["committed"] = 0, 1
    assert any(not d.same for d in replay(records))


def test_records_survive_json_exactly() -> None:
    machine = SimulatedMachine(shapes=SHAPES)
    load = load_of(3, ready={"history": 2}, waiting=4)
    controller = build_controller(ControllerConfig(), traits_of(SHAPES), SHAPES, machine.calibration())
    plan = controller.decide(load, now_s=0.1)
    done = machine.run(load, plan)
    assert plan.assignments
    assert load_from_dict(json.loads(json.dumps(load_to_dict(load)))) == load
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(plan)))) == plan
    assert facts_from_dict(json.loads(json.dumps(facts_to_dict(done)))) == done


def test_what_a_round_spent_its_time_on_survives_json_and_older_logs_have_none() -> None:
    machine, load = SimulatedMachine(shapes=SHAPES), load_of(2)
    done = machine.run(load, RoundPlan(assignments={}, reason="ar"))
    split = ForwardSeconds(linears_s=0.1, attention_s=0.2, head_s=0.3, rest_s=0.4)
    policy = PassSeconds(forward_s=1.1, choose_s=0.01, split=split)
    told = replace(done, policy_pass=policy, draft_pass=PassSeconds(forward_s=0.5, choose_s=0.02))
    assert facts_from_dict(json.loads(json.dumps(facts_to_dict(told)))) == told
    older = facts_to_dict(told)
    del older["policy_pass"], older["draft_pass"]
    assert facts_from_dict(older) == done


def test_the_command_agrees_with_its_log_and_tells_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, records = tmp_path / "control.jsonl", logged_run("auto")
    log.write_text("\n".join(json.dumps(r) for r in records) + "\n")
    assert main([str(log)]) == 0
    assert "150 decisions, 0 differ" in capsys.readouterr().out
    assert main([str(log), "--kind", "ar"]) == 0
    assert "first difference in round" in capsys.readouterr().out
    for record in records:
        if record["event"] == "decision":
            record["plan"]["reason"] = "tampered"
    log.write_text("\n".join(json.dumps(r) for r in records) + "\n")
    assert main([str(log)]) == 1


def test_a_log_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        replay([])
    with pytest.raises(ValueError, match="controller"):
        replay([{"event": "facts"}])
    with pytest.raises(ValueError, match="unknown event"):
        replay([*logged_run("ar", rounds=1), {"event": "surprise"}])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"event": "controller"}\n{"ev')
    with pytest.raises(ValueError, match=r"broken\.jsonl:2"):
        list(read_log(broken))
    assert summary([]) == ["no decisions"]
