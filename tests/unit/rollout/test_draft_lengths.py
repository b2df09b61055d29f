"""Draft lengths of our choice follow ``drafter.max_gamma``; those asked for are tried or refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from drafters.config import DrafterConfig
from rollout.draft_lengths import gammas_to_try
from rollout.errors import ConfigError
from rollout.job_config import EvaluateConfig, JobConfig, VerifyConfig
from rollout.jobs import evaluate, verify


def test_the_usual_lengths_are_tried_as_they_are_where_they_can_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gammas_to_try((), usual=(1, 2, 4, 8), max_gamma=8, setting="evaluate.gammas") == (1, 2, 4, 8)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("max_gamma", "tried"), [(6, (1, 2, 4, 6)), (4, (1, 2, 4)), (3, (1, 2, 3)), (1, (1,))]
)
def test_usual_lengths_end_at_the_longest_draft_and_it_is_said(
    max_gamma: int, tried: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gammas_to_try((), usual=(1, 2, 4, 8), max_gamma=max_gamma, setting="evaluate.gammas") == tried
    said = f"drafts of {', '.join(map(str, tried))} instead of up to 8 tokens: drafter.max_gamma={max_gamma}"
    assert capsys.readouterr().err == said + "\n"


def test_a_length_that_was_asked_for_is_tried_or_refused_by_name() -> None:
    assert gammas_to_try((5, 2), usual=(1,), max_gamma=5, setting="verify.gammas") == (5, 2)
    with pytest.raises(ConfigError, match=r"^verify\.gammas: 6 is more than drafter\.max_gamma=5; ask for"):
        gammas_to_try((2, 6), usual=(1,), max_gamma=5, setting="verify.gammas")


@pytest.mark.parametrize("command", ["evaluate", "verify"])
def test_commands_refuse_what_was_asked_for_and_nothing_else(command: str, tmp_path: Path) -> None:
    """The usual lengths get as far as the policy, which is none here."""
    nowhere = str(tmp_path / "nowhere")
    main = {"evaluate": evaluate.main, "verify": verify.main}[command]

    def refusal(gammas: tuple[int, ...]) -> str:
        job = JobConfig(
            output_dir=str(tmp_path),
            drafter=DrafterConfig(max_gamma=3),
            evaluate=EvaluateConfig(gammas=gammas),
            verify=VerifyConfig(gammas=gammas),
        )
        with pytest.raises(ConfigError) as refused:
            main(replace(job, policy=replace(job.policy, source=nowhere)))
        return str(refused.value)

    assert refusal(()).startswith("policy.source=")
    assert refusal((3,)).startswith("policy.source=")
    assert refusal((4,)).startswith(f"{command}.gammas: 4 is more than drafter.max_gamma=3")
