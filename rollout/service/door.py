"""What a caller's item must be before anything else sees it. Each refusal concerns that item alone.

Only the engine knows the vocabulary: ids beyond it are refused there, in the same words.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from rollout.errors import EmptyPromptError, PromptTooLongError, RequestError, SamplingParamsError
from rollout.fields import count, real, shown, text, token_ids
from rollout.seeds import sample_seed
from rollout.tokens import Tokens
from rollout.types import Completion, Request, SamplingParams

Value = TypeVar("Value")
NAMES = ("prompt_uid", "sample_index", "attempt")
"""What a completion is known by."""

FIELDS = (
    "prompt_uid",
    "sample_index",
    "prompt_ids",
    "params",
    "seed",
    "run_seed",
    "trainer_step",
    "attempt",
    "prefix_ids",
    "deadline_s",
)
"""Names an item given as plain data may have. Only ``prompt_ids`` must be there. ``run_seed`` stands in for
the service's own where a seed is missing."""


def check_item(item: object, index: int, *, context_tokens: int, run_seed: int) -> Request:
    """Return the request an item stands for, of plain Python data alone.

    Raises a ``RequestError`` that says what is wrong with it. A missing seed follows from run, trainer step,
    prompt and sample: two rollouts never share noise by accident, and the same rollout asked for again gets
    the same.
    """
    request = _plain(item if isinstance(item, Request) else _from_mapping(item, index, run_seed))
    if not request.prompt_ids:
        raise EmptyPromptError(f"request {request.key} has an empty prompt")
    if len(request.prompt_ids) >= context_tokens:
        raise PromptTooLongError(
            f"prompt of {len(request.prompt_ids)} tokens leaves no room in a context of {context_tokens}"
        )
    return request


def refused_item(item: object, index: int, error: RequestError) -> Completion:
    """Return the ending of an item that never became a request, under the names it came with."""
    given = _readable(item)
    return Completion(
        prompt_uid=_or(default_uid(index), prompt_uid, given.get("prompt_uid")),
        sample_index=_or(0, partial(count, "sample_index"), given.get("sample_index")),
        attempt=_or(0, partial(count, "attempt"), given.get("attempt")),
        tokens=Tokens(),
        text=None,
        finish_reason="failed",
        error=f"{type(error).__name__}: {error}",
        provenance=None,
    )


def default_uid(index: int) -> str:
    """Return the name of a prompt that came without one."""
    return f"item-{index}"


def prompt_uid(value: Any) -> str:
    """Return the name of a prompt. Raises ``RequestError``."""
    if not text("prompt_uid", value):
        raise RequestError("prompt_uid must not be empty")
    return str(value)


def sampling_params(value: Any) -> SamplingParams:
    """Return the parameters ``value`` stands for; None: all neutral. Raises ``SamplingParamsError``."""
    if isinstance(value, SamplingParams):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise SamplingParamsError(f"params must be given by name, got {type(value).__name__}")
    return SamplingParams.from_mapping(value or {})


def _plain(request: Request) -> Request:
    """Check every field: a dataclass holds whatever it was made with."""
    if not isinstance(request.params, SamplingParams):
        raise SamplingParamsError(f"params must be SamplingParams, got {type(request.params).__name__}")
    return Request(
        prompt_uid=prompt_uid(request.prompt_uid),
        sample_index=count("sample_index", request.sample_index),
        prompt_ids=token_ids("prompt_ids", request.prompt_ids),
        params=request.params,
        seed=count("seed", request.seed),
        attempt=count("attempt", request.attempt),
        prefix_ids=token_ids("prefix_ids", request.prefix_ids),
        deadline_s=None if request.deadline_s is None else _deadline(request.deadline_s),
    )


def _from_mapping(item: object, index: int, run_seed: int) -> Request:
    """Fill in what is missing. What is given stays as it is, unchecked but for what a seed follows from."""
    if not isinstance(item, Mapping):
        raise RequestError(f"expected a Request or a mapping, got {type(item).__name__}")
    unknown = sorted(shown(name).strip("'") for name in item if name not in FIELDS)
    if unknown:
        raise RequestError(f"unknown field {', '.join(unknown)}; known: {', '.join(FIELDS)}")
    if "prompt_ids" not in item:
        raise RequestError("prompt_ids is missing")
    uid = prompt_uid(item.get("prompt_uid", default_uid(index)))
    sample = count("sample_index", item.get("sample_index", 0))
    step = count("trainer_step", item.get("trainer_step", 0))
    run = count("run_seed", item.get("run_seed", run_seed))
    seed = item.get("seed")
    if seed is None:
        seed = sample_seed(run_seed=run, trainer_step=step, prompt_uid=uid, sample_index=sample)
    return Request(
        prompt_uid=uid,
        sample_index=sample,
        prompt_ids=item["prompt_ids"],
        params=sampling_params(item.get("params")),
        seed=seed,
        attempt=item.get("attempt", 0),
        prefix_ids=item.get("prefix_ids", ()),
        deadline_s=item.get("deadline_s"),
    )


def _deadline(value: Any) -> float:
    seconds = real("deadline_s", value)
    if not (math.isfinite(seconds) and seconds > 0):
        raise RequestError(f"deadline_s must be finite and > 0, got {seconds}")
    return seconds


def _readable(item: object) -> dict[Any, Any]:
    """Return what can be read of an item that was refused, perhaps because it cannot be."""
    if isinstance(item, Request):
        return {name: getattr(item, name) for name in NAMES}
    try:
        return dict(item) if isinstance(item, Mapping) else {}
    except Exception:  # noqa: BLE001 - whatever a caller's mapping does, it is this item alone that fails
        return {}


def _or(default: Value, read: Callable[[Any], Value], given: Any) -> Value:
    try:
        return read(given)
    except Exception:  # noqa: BLE001 - as above: a name may be any object
        return default
