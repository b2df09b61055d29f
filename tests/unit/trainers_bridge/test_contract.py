from dataclasses import replace
from typing import Any

import pytest

from rollout.errors import ConfigError
from rollout.settings import load_config
from rollout.tokens import TokenRecord, Tokens
from rollout.types import Completion, Request, SamplingParams
from trainers_bridge.config import TrainerConfig
from trainers_bridge.contract import (
    IncompleteRolloutError,
    UnreproducibleSamplingError,
    check_answered,
    check_handed,
    check_params,
    handed_logprobs,
    training_params,
)

TOKEN = TokenRecord(
    token_id=5,
    raw_logprob=-1.0,
    scaled_logprob=-2.0,
    target_logprob=-0.5,
    kept_logmass=-0.1,
    policy_version=1,
    origin="plain",
    drafter="ar",
)
SAMPLE = Completion(
    prompt_uid="p",
    sample_index=0,
    attempt=0,
    tokens=Tokens([TOKEN, replace(TOKEN, token_id=1, scaled_logprob=-3.0)]),
    text="x",
    finish_reason="stop",
    error=None,
    provenance=None,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("logit_bias", {3: 1.0}),
        ("min_tokens", 4),
    ],
)
def test_what_no_trainer_recomputes_is_refused_by_name_even_when_filters_are_allowed(
    name: str, value: Any
) -> None:
    """A13: a convention the trainer cannot share is refused."""
    params = SamplingParams.from_mapping({name: value})
    with pytest.raises(UnreproducibleSamplingError, match=name):
        check_params(params, allow_filters=True)


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 40), ("min_p", 0.05)])
def test_filters_are_refused_by_name_unless_opted_in(name: str, value: Any) -> None:
    params = SamplingParams.from_mapping({name: value})
    with pytest.raises(UnreproducibleSamplingError, match=name):
        check_params(params, allow_filters=False)
    check_params(params, allow_filters=True)


def test_every_parameter_at_fault_is_named_at_once() -> None:
    params = SamplingParams(top_p=0.5, min_tokens=2, temperature=0.0)
    with pytest.raises(UnreproducibleSamplingError, match=r"min_tokens.*top_p.*temperature"):
        check_params(params, allow_filters=False)


def test_what_only_ends_a_sample_is_fine() -> None:
    check_params(SamplingParams(stop=("x",), stop_ids=(4,), max_tokens=3), allow_filters=False)


def test_training_params_come_from_the_trainers_settings() -> None:
    params = training_params(TrainerConfig(temperature=0.8, max_new_tokens=40, sampling={"stop": ["\n"]}))
    assert (params.temperature, params.max_tokens, params.stop) == (0.8, 40, ("\n",))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 0.5}, r"trainer\.sampling\.temperature: set trainer\.temperature"),
        ({"max_tokens": 5}, r"trainer\.sampling\.max_tokens"),
        ({"topp": 0.5}, r"trainer\.sampling: unknown sampling parameter topp"),
        ({"top_p": 0.0}, r"trainer\.sampling: top_p"),
        ({"top_p": 0.8}, r"trainer\.sampling\.top_p=0\.8: .* trainer\.allow_filters"),
        ({"min_tokens": 3}, r"trainer\.sampling\.min_tokens=3"),
    ],
)
def test_wrong_sampling_settings_are_refused_with_their_path(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"sampling": sampling}, TrainerConfig, path="trainer")


def test_the_scaled_logprobs_are_handed_over() -> None:
    assert handed_logprobs(SAMPLE) == [-2.0, -3.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": "failed", "error": "NumericError: x"}, "NumericError"),
        ({"finish_reason": "aborted", "error": "AbortedError: x"}, "AbortedError"),
        ({"tokens": Tokens()}, "empty"),
        ({"tokens": Tokens([replace(TOKEN, scaled_logprob=float("nan"))])}, "nan"),
        ({"tokens": Tokens([replace(TOKEN, scaled_logprob=0.5)])}, "0.5"),
    ],
)
def test_a_sample_a_trainer_could_not_learn_from_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(IncompleteRolloutError, match=message):
        handed_logprobs(replace(SAMPLE, **change))


def test_missing_swapped_and_extra_answers_are_errors() -> None:
    asked = [
        Request(prompt_uid="p", sample_index=i, prompt_ids=(3,), params=SamplingParams(), seed=i)
        for i in range(2)
    ]
    first, second = SAMPLE, replace(SAMPLE, sample_index=1)
    check_answered(asked, [first, second])
    for wrong in ([first], [second, first], [first, first], [first, second, second]):
        with pytest.raises(IncompleteRolloutError):
            check_answered(asked, wrong)


def test_ids_and_logprobs_of_unequal_length_never_reach_a_trainer() -> None:
    check_handed(samples=2, completion_ids=[[1], [2, 3]], logprobs=[[-1.0], [-1.0, -1.0]])
    for ids, logprobs in (
        ([[1], [2, 3]], [[-1.0], [-1.0]]),
        ([[1], []], [[-1.0], []]),
        ([[1]], [[-1.0]]),
    ):
        with pytest.raises(IncompleteRolloutError):
            check_handed(samples=2, completion_ids=ids, logprobs=logprobs)
