import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.errors import ConfigError
from rollout.paths import config_dir
from rollout.settings import load_config
from trainers_bridge.config import TaskConfig, TrainerConfig
from trainers_bridge.summary import DraftTally, StepResult, quarter, summarize


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepz": 3}, r"trainer\.stepz: unknown setting"),
        ({"steps": 0}, r"trainer\.steps must be >= 1"),
        ({"steps": 1.5}, r"trainer\.steps"),
        ({"num_generations": 1}, r"trainer\.num_generations must be >= 2"),
        ({"max_new_tokens": 97}, r"trainer\.max_new_tokens must be in 1\.\.96"),
        ({"learning_rate": 0.0}, r"trainer\.learning_rate"),
        ({"temperature": math.nan}, r"trainer\.temperature"),
        ({"samples_per_pass": 5}, r"trainer\.samples_per_pass must divide"),
        ({"kind": "mine"}, r"trainer\.kind"),
        ({"reward_scale": "deviation"}, r"trainer\.reward_scale: expected one of 'group', 'batch', 'none'"),
    ],
)
def test_wrong_trainer_settings_are_refused_with_their_path(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(values, TrainerConfig, path="trainer")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"operations": []}, r"task\.operations"),
        ({"operations": ["divide"]}, r"task\.operations\[0\]"),
        ({"smallest": 5, "largest": 4}, r"task\.smallest"),
        ({"prompts": 0}, r"task\.prompts"),
    ],
)
def test_wrong_task_settings_are_refused_with_their_path(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(values, TaskConfig, path="task")


def test_every_shipped_file_of_the_trainer_and_the_task_loads() -> None:
    for group, cls in (("trainer", TrainerConfig), ("task", TaskConfig)):
        files = sorted((config_dir() / group).glob("*.yaml"))
        assert files
        for file in files:
            load_config(yaml.safe_load(file.read_text()), cls, path=group)


def test_settings_import_nothing_heavy() -> None:
    code = (
        "import sys, trainers_bridge.config, trainers_bridge.contract, trainers_bridge.summary;"
        "print([m for m in ('torch', 'trl', 'transformers', 'ray') if m in sys.modules])"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def _steps(rewards: list[float]) -> list[StepResult]:
    return [
        StepResult(
            step=i + 1,
            policy_version=i + 1,
            rewards=(r, r),
            step_s=10.0,
            generate_s=3.0,
            weight_sync_s=1.0,
            mismatch_s=0.5,
            drafted_tokens=20,
            accepted_tokens=15,
            tokens=60,
            ids_digest=f"{i:02x}",
            by_drafter={"w4": DraftTally(drafted=20, accepted=15, first_decided=5, first_kept=5 - i % 2)},
        )
        for i, r in enumerate(rewards)
    ]


def test_a_quarter_is_judged_by_the_spread_of_its_steps() -> None:
    found = quarter([0.1, 0.2, 0.3, 0.2])
    assert found.mean == pytest.approx(0.2)
    assert found.standard_error == pytest.approx(math.sqrt(0.02 / 3 / 4))


def test_the_verdict_needs_two_standard_errors_and_a_rise() -> None:
    def improved(first: list[float], last: list[float]) -> Any:
        return summarize(_steps([*first, 0.5, 0.5, 0.5, 0.5, *last]), stopped_by="steps", total_s=1.0)[
            "reward"
        ]["improved"]

    assert improved([0.1, 0.12], [0.8, 0.82]) is True
    assert improved([0.1, 0.5], [0.3, 0.7]) is False
    assert improved([0.8, 0.82], [0.1, 0.12]) is False
    assert improved([0.1, 0.1], [0.1, 0.1]) is False


def test_a_run_too_short_for_a_standard_error_gets_no_verdict() -> None:
    summary = summarize(_steps([0.0] * 3 + [1.0] * 4), stopped_by="time", total_s=70.0)
    assert summary["reward"]["improved"] is None
    assert "reason" in summary["reward"]


def test_the_summary_splits_the_time_and_pools_acceptance(tmp_path: Path) -> None:
    summary = summarize(_steps([0.1] * 8), stopped_by="steps", total_s=81.0)
    assert summary["seconds"] == {
        "total": 81.0,
        "generate": 24.0,
        "weight_sync": 8.0,
        "mismatch": 4.0,
        "optimize": 44.0,
    }
    assert summary["accept_rate"] == 0.75
    assert summary["tokens_per_s"] == 20.0
    json.dumps(summary, allow_nan=False)


def test_the_summary_tells_every_drafters_acceptance_over_the_steps() -> None:
    steps = _steps([0.1] * 8)
    other = DraftTally(drafted=8, accepted=2, first_decided=0, first_kept=0)
    steps[3] = replace(steps[3], by_drafter={**steps[3].by_drafter, "history": other})
    told = summarize(steps, stopped_by="steps", total_s=81.0)["drafters"]
    assert told["w4"] == {
        "drafted": 160,
        "accepted": 120,
        "accept_rate_by_step": [0.75] * 8,
        "first_draft_kept": {"first_quarter": 0.9, "last_quarter": 0.9, "by_step": [1.0, 0.8] * 4},
    }
    assert told["history"] == {
        "drafted": 8,
        "accepted": 2,
        "accept_rate_by_step": [None, None, None, 0.25, None, None, None, None],
        "first_draft_kept": {"first_quarter": None, "last_quarter": None, "by_step": [None] * 8},
    }
