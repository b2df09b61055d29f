"""What ``taildraft evaluate`` refuses before it measures: by the setting or file, with a way out."""

from pathlib import Path
from typing import Any

import pytest

from drafters.config import DrafterConfig
from rollout.bench.questions import PROMPTS_FILE
from rollout.config import PolicyConfig
from rollout.errors import ConfigError
from rollout.evaluation.questions import prompts_of
from rollout.evaluation.subject import drafters_of, most_new_tokens
from rollout.job_config import EvaluateConfig, JobConfig
from rollout.jobs import evaluate
from rollout.policy.source import Policy, load_policy
from rollout.testing import TINY_POSITIONS, save_tiny_folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder: Path = tmp_path_factory.mktemp("looped")
    save_tiny_folder(folder, "ouro")
    return load_policy(PolicyConfig(source=str(folder)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": (8, 300)}, r"evaluate\.lengths: its longest text, of 300 tokens, .* 256 positions"),
        ({"chain_tokens": 256}, r"evaluate\.chain_tokens: its longest text, of 256 tokens"),
        ({"max_tokens": 128}, r"evaluate\.max_tokens: its longest text, of 256 tokens"),
    ],
)
def test_texts_longer_than_the_context_are_refused_by_their_setting(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        most_new_tokens(EvaluateConfig(**settings), positions=TINY_POSITIONS)
    laws_alone = EvaluateConfig(**settings, parts=("laws",))
    assert most_new_tokens(laws_alone, positions=TINY_POSITIONS) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafters": ("wavefront", "wavefront")}, r"evaluate\.drafters must name each drafter once"),
        ({"drafters": ("shallow_loop_1",)}, r"evaluate\.drafters: a policy that runs its block once has no"),
    ],
)
def test_drafters_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafters_of(1, DrafterConfig(), EvaluateConfig(**settings))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no question; write one a line"),
        (b"\n  \n", "holds no question; write one a line"),
        (b"what is 1 + 1?\n" + b"a" * 300 + b"\n", r"line 2: 30\d tokens and 32 new ones do not fit"),
        (b"\xff\xfe\n", "is not UTF-8 text"),
    ],
    ids=["empty", "blank", "a line too long", "no text"],
)
def test_a_prompts_file_that_cannot_be_asked_is_named(policy: Policy, content: bytes, message: str) -> None:
    own = policy.folder / PROMPTS_FILE
    own.write_bytes(content)
    try:
        with pytest.raises(ConfigError, match=rf"^policy\.source: .*{PROMPTS_FILE}.*{message}"):
            prompts_of(policy, new_tokens=32)
    finally:
        own.unlink()


def test_of_our_own_prompts_those_are_asked_that_leave_room(policy: Policy) -> None:
    everything, fewer = (prompts_of(policy, new_tokens=n) for n in (1, 190))
    assert fewer == [p for p in everything if len(p) + 190 <= TINY_POSITIONS]
    assert 0 < len(fewer) < len(everything)
    with pytest.raises(ConfigError, match=r"^evaluate\.lengths.* do not fit the policy's 256 positions"):
        prompts_of(policy, new_tokens=250)


def test_a_page_in_place_of_the_result_is_refused_before_the_policy_is_read(tmp_path: Path) -> None:
    one = str(tmp_path / "evaluate.html")
    job = JobConfig(
        policy=PolicyConfig(source="nowhere"),
        evaluate=EvaluateConfig(out=one, html=one),
        output_dir=str(tmp_path),
    )
    with pytest.raises(ConfigError, match=r"evaluate\.html and evaluate\.out both name"):
        evaluate.main(job)
