"""What a caller's item must be before anything else sees it. Each refusal concerns that item alone.

Only the engine knows the vocabulary: ids beyond it are refused there, in the same words.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from rollout.errors import (
    EmptyPromptError,
    PromptTooLongError,
    RequestError,
    SamplingParamsError,
    TokenRangeError,
)
from rollout.seeds import sample_seed
from rollout.service.live import failed_completion
from rollout.types import Completion, Request, SamplingParams

FIELDS = (
    "prompt_uid",
    "sample_index",
    "prompt_ids",
    "params",
    "seed",
    "trainer_step",
    "attempt",
    "prefix_ids",
    "deadline_s",
)
"""Names an item given as plain data may have. Only ``prompt_ids`` must be there."""

SEED_LIMIT = 2**63


def check_item(item: object, index: int, *, context_tokens: int, run_seed: int) -> Request:
    """Return the request an item stands for. Raises a ``RequestError`` that says what is wrong with it.

    A missing seed follows from run, trainer step, prompt and sample: two rollouts never share noise by
    accident, and the same rollout asked for again gets the same.
    """
    request = item if isinstance(item, Request) else _from_plain(item, index, run_seed)
    _check_ids("prompt_ids", request.prompt_ids)
    _check_ids("prefix_ids", request.prefix_ids)
    if not request.prompt_ids:
        raise EmptyPromptError(f"request {request.key} has an empty prompt")
    if len(request.prompt_ids) >= context_tokens:
        raise PromptTooLongError(
            f"prompt of {len(request.prompt_ids)} tokens leaves no room in a context of {context_tokens}"
        )
    if not 0 <= request.seed < SEED_LIMIT:
        raise RequestError(f"seed must be in 0 .. 2**63 - 1, got {request.seed}")
    if request.attempt < 0 or request.sample_index < 0:
        raise RequestError("attempt and sample_index must be >= 0")
    deadline_s = request.deadline_s
    if deadline_s is not None and not (math.isfinite(deadline_s) and deadline_s > 0):
        raise RequestError(f"deadline_s must be finite and > 0, got {deadline_s}")
    return request


def refused_item(item: object, index: int, error: RequestError) -> Completion:
    """Return the ending of an item that never became a request, under the names it came with."""
    if isinstance(item, Request):
        return failed_completion(item, error)
    plain = item if isinstance(item, Mapping) else {}
    uid, sample, attempt = (plain.get(name) for name in ("prompt_uid", "sample_index", "attempt"))
    return Completion(
        prompt_uid=uid if isinstance(uid, str) else default_uid(index),
        sample_index=sample if isinstance(sample, int) else 0,
        attempt=attempt if isinstance(attempt, int) else 0,
        tokens=(),
        text=None,
        finish_reason="failed",
        error=f"{type(error).__name__}: {error}",
        provenance=None,
    )


def default_uid(index: int) -> str:
    """Return the name of a prompt that came without one."""
    return f"item-{index}"


def _from_plain(item: object, index: int, run_seed: int) -> Request:
    if not isinstance(item, Mapping):
        raise RequestError(f"expected a Request or a mapping, got {type(item).__name__}")
    unknown = sorted(str(name) for name in item if name not in FIELDS)
    if unknown:
        raise RequestError(f"unknown field {', '.join(unknown)}; known: {', '.join(FIELDS)}")
    if "prompt_ids" not in item:
        raise RequestError("prompt_ids is missing")
    uid = item.get("prompt_uid", default_uid(index))
    if not isinstance(uid, str) or not uid:
        raise RequestError(f"prompt_uid must be a non-empty string, got {uid!r}")
    sample_index = _whole("sample_index", item.get("sample_index", 0))
    step = _whole("trainer_step", item.get("trainer_step", 0))
    seed = item.get("seed")
    deadline_s = item.get("deadline_s")
    return Request(
        prompt_uid=uid,
        sample_index=sample_index,
        prompt_ids=_ids("prompt_ids", item["prompt_ids"]),
        params=_params(item.get("params")),
        seed=sample_seed(run_seed=run_seed, trainer_step=step, prompt_uid=uid, sample_index=sample_index)
        if seed is None
        else _whole("seed", seed),
        attempt=_whole("attempt", item.get("attempt", 0)),
        prefix_ids=_ids("prefix_ids", item.get("prefix_ids", ())),
        deadline_s=None if deadline_s is None else _seconds("deadline_s", deadline_s),
    )


def _params(value: object) -> SamplingParams:
    if value is None:
        return SamplingParams()
    if isinstance(value, SamplingParams):
        return value
    if not isinstance(value, Mapping):
        raise SamplingParamsError(f"params must be given by name, got {type(value).__name__}")
    try:
        return SamplingParams.from_mapping(value)
    except (TypeError, ValueError) as error:
        raise SamplingParamsError(f"a sampling parameter has the wrong type: {error}") from error


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TokenRangeError(f"{name} must be a list of ids, got {type(value).__name__}")
    return tuple(_whole(name, v, TokenRangeError) for v in value)


def _check_ids(name: str, ids: tuple[int, ...]) -> None:
    wrong = [v for v in ids if not isinstance(v, int) or v < 0]
    if wrong:
        raise TokenRangeError(f"{name} holds {wrong[:5]}, which are no token ids")


def _whole(name: str, value: Any, error: type[RequestError] = RequestError) -> int:
    try:
        return operator.index(value)  # numpy and torch integers too; never a float
    except TypeError:
        raise error(f"{name} must hold whole numbers, got {value!r}") from None


def _seconds(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RequestError(f"{name} must be a number of seconds, got {value!r}") from None
