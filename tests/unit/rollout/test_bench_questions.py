"""``bench.questions``: whose questions the workloads ``drain`` and ``fixed`` ask."""

import json
from pathlib import Path

import pytest

from rollout.bench.prompts import encoded, prompt_ids
from rollout.bench.questions import PROMPTS_FILE, SAMPLES, questions_asked
from rollout.config import EngineConfig, PolicyConfig
from rollout.errors import ConfigError
from rollout.evaluation.questions import prompts_of
from rollout.job_config import BenchConfig, JobConfig
from rollout.jobs.bench import main
from rollout.policy.source import Policy, load_policy
from rollout.testing import save_tiny_folder

LINES = ("sum 2 7", "sort 31", "reverse abc")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A policy whose folder brings three questions."""
    folder: Path = tmp_path_factory.mktemp("trained")
    save_tiny_folder(folder)
    (folder / PROMPTS_FILE).write_text("\n\n".join(LINES) + "\n")
    return load_policy(PolicyConfig(source=str(folder)))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder: Path = tmp_path_factory.mktemp("untrained")
    save_tiny_folder(folder)
    return load_policy(PolicyConfig(source=str(folder)))


def test_a_policy_is_asked_what_its_folder_brings_just_as_when_it_is_evaluated(trained: Policy) -> None:
    asked = questions_asked(trained, "auto", rows=3, new_tokens=8)
    assert asked.source == "policy"
    assert list(asked.prompts) == prompts_of(trained, new_tokens=8)
    assert trained.tokenizer is not None
    assert asked.prompts == tuple(encoded(trained.tokenizer, line) for line in LINES)


def test_more_rows_than_questions_ask_them_again_in_turn_and_only_so_often(trained: Policy) -> None:
    once = questions_asked(trained, "policy", rows=3, new_tokens=8).prompts
    most = questions_asked(trained, "policy", rows=3 * SAMPLES, new_tokens=8)
    assert (most.prompts, most.different) == (once * SAMPLES, 3)
    with pytest.raises(ConfigError, match=rf"13 sequences wanted, and .*{PROMPTS_FILE} has 3 questions"):
        questions_asked(trained, "auto", rows=3 * SAMPLES + 1, new_tokens=8)


def test_our_own_are_asked_where_a_folder_has_none_or_where_they_are_wanted(
    trained: Policy, untrained: Policy
) -> None:
    for policy, setting in ((untrained, "auto"), (untrained, "general"), (trained, "general")):
        asked = questions_asked(policy, setting, rows=2, new_tokens=8)
        assert (asked.source, asked.different) == ("general", 2)
        assert list(asked.prompts) == prompt_ids(policy.tokenizer, 2)


def test_a_policys_own_questions_are_refused_where_there_are_none_or_they_leave_no_room(
    trained: Policy, untrained: Policy
) -> None:
    with pytest.raises(ConfigError, match=rf"bench\.questions=policy: .* has no {PROMPTS_FILE}"):
        questions_asked(untrained, "policy", rows=1, new_tokens=8)
    with pytest.raises(ConfigError, match=rf"policy\.source: .*{PROMPTS_FILE}, line 1: .* do not fit"):
        questions_asked(trained, "auto", rows=1, new_tokens=trained.spec.max_positions)


@pytest.mark.parametrize("workload", ["fixed", "drain"])
def test_the_result_says_whose_questions_were_asked(trained: Policy, tmp_path: Path, workload: str) -> None:
    out = tmp_path / "bench.json"
    fixed = workload == "fixed"
    bench = BenchConfig(
        workload="fixed" if fixed else "drain",
        out=str(out),
        arms=("ar",),
        laws=("natural",),
        grids=("on",),
        prompts=4,
        batches=(1, 4) if fixed else (),
        cap_tokens=4,
        fixed_tokens=4,
        min_pairs=2,
        max_pairs=2,
    )
    engine = EngineConfig(decoder="torch", dtype="float32", threads=1, max_batch=4, max_context_tokens=64)
    assert main(JobConfig(policy=PolicyConfig(source=str(trained.folder)), engine=engine, bench=bench)) == 0
    data = json.loads(out.read_text())
    four = {"from": "policy", "different": 3}
    told = {"fixed_b1_": {"from": "policy", "different": 1}, "fixed_b4_": four}
    assert data["questions"] == (told if fixed else {"natural_": four})
    assert data["conditions"]["config"]["bench"]["questions"] == "auto"
