"""What a bridge may hand a trainer, and what it needs to get it. No torch, no trainer here.

A trainer turns logprobs into importance ratios: its own, recomputed over the full vocabulary at the
sampling temperature, over the ones it was handed. So exactly that convention is handed over, called
``scaled`` throughout, and whatever the trainer could not recompute that way is refused by name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from rollout.errors import ConfigError, RolloutError, SamplingParamsError
from rollout.types import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from rollout.service.records import RoundRecord
    from trainers_bridge.config import TrainerConfig

LOGPROB_CONVENTION: Literal["scaled"] = "scaled"
"""Natural logs, temperature only, full vocabulary: ``TokenRecord.scaled_logprob``."""

LOGPROB_SLACK = 1e-5
"""How far above 0 rounding may push the logprob of a near-certain token in float32."""

NEVER_REPRODUCED = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
)
"""Parameters that change logits by the text so far or by id. No trainer recomputes them."""

FILTERS = ("top_p", "top_k", "min_p")
"""Parameters that only cut the distribution: the trainer's ratio stays defined, the law differs."""


class UnreproducibleSamplingError(ConfigError):
    """A sampling parameter is set that the trainer cannot recompute; the message names it."""


class IncompleteRolloutError(RolloutError):
    """A trainer was about to get fewer, empty, failed or mismatched samples; the message says which."""


class PolicyPushError(RolloutError):
    """The trainer's weights cannot be served as they are, or the service did not take them over."""


class RolloutClient(Protocol):
    """What a bridge needs of the rollout service. Calls block until they are done."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return one completion per request, in order, each ended exactly once."""
        ...

    def update_weights(self, state_dict: "Mapping[str, Tensor]", version: int) -> int:
        """Switch to ``state_dict`` (Hugging Face names, ties sent once) as ``version``, whole or not at all.

        Returns the version now live. Raises ``WeightUpdateError``.
        """
        ...

    def take_records(self) -> "list[RoundRecord]":
        """Return the rounds run since the last call, in the order they ran on each host."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return loggable numbers; a host's own stand under ``host/NAME/``."""
        ...


def training_params(config: "TrainerConfig") -> SamplingParams:
    """Return the sampling parameters of a training run. Raises ``ConfigError`` for what is wrong and
    ``UnreproducibleSamplingError`` for what cannot be trained on; both name the setting in full."""
    better = {"temperature": "trainer.temperature", "max_tokens": "trainer.max_new_tokens"}
    for name, instead in better.items():
        if name in config.sampling:
            raise ConfigError(f"trainer.sampling.{name}: set {instead} instead")
    try:
        params = SamplingParams.from_mapping(
            {**config.sampling, "temperature": config.temperature, "max_tokens": config.max_new_tokens}
        )
    except SamplingParamsError as error:
        raise ConfigError(f"trainer.sampling: {error}") from error
    check_params(params, allow_filters=config.allow_filters, path="trainer.sampling.")
    return params


def check_params(params: SamplingParams, *, allow_filters: bool, path: str = "") -> None:
    """Raise ``UnreproducibleSamplingError`` naming every parameter a trainer could not recompute."""
    neutral = SamplingParams()

    def changed(names: Sequence[str]) -> list[str]:
        values = [(n, getattr(params, n)) for n in names]
        return [f"{path}{n}={v!r}" for n, v in values if v != getattr(neutral, n)]

    problems = [f"{what}: the trainer cannot recompute it" for what in changed(NEVER_REPRODUCED)]
    if not allow_filters:
        problems += [
            f"{what}: the trainer scores the full vocabulary; trainer.allow_filters=true trains on it anyway"
            for what in changed(FILTERS)
        ]
    if params.temperature == 0:
        problems.append(f"{path}temperature=0: greedy text has no logprobs to train on")
    if problems:
        raise UnreproducibleSamplingError("; ".join(problems))


def handed_logprobs(completion: Completion) -> list[float]:
    """Return the logprobs a trainer gets for ``completion``: ``scaled``, one per token id.

    Raises ``IncompleteRolloutError`` for a sample that failed, is empty, or holds a logprob that is none.
    """
    name = f"sample {completion.sample_index} of prompt {completion.prompt_uid}"
    if completion.finish_reason not in ("stop", "length"):
        raise IncompleteRolloutError(f"{name} {completion.finish_reason}: {completion.error}")
    if not completion.tokens:
        raise IncompleteRolloutError(f"{name} is empty; a sample has at least its end-of-sequence token")
    logprobs = completion.tokens.scaled_logprobs
    for i, value in enumerate(logprobs):
        if not (math.isfinite(value) and value <= LOGPROB_SLACK):
            raise IncompleteRolloutError(f"{name}: token {i} has logprob {value}")
    return logprobs


def check_handed(
    *, samples: int, completion_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
) -> None:
    """Raise ``IncompleteRolloutError`` unless there are ``samples`` non-empty items, one logprob per id."""
    if not samples == len(completion_ids) == len(logprobs):
        raise IncompleteRolloutError(
            f"{samples} samples wanted; {len(completion_ids)} id lists and {len(logprobs)} logprob lists made"
        )
    for i, (ids, values) in enumerate(zip(completion_ids, logprobs, strict=True)):
        if not ids or len(ids) != len(values):
            raise IncompleteRolloutError(f"item {i}: {len(ids)} ids with {len(values)} logprobs")


def check_answered(requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Raise ``IncompleteRolloutError`` unless every request has its own completion, in order."""
    if len(requests) != len(completions):
        raise IncompleteRolloutError(f"{len(requests)} samples asked for, {len(completions)} returned")
    for i, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        got = (completion.prompt_uid, completion.sample_index)
        if got != request.key:
            raise IncompleteRolloutError(f"item {i}: asked for {request.key}, got {got}")
