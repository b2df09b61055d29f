"""The rollout's words: what a caller asks, and what it gets back. No tensors, no handles.

A ``Request`` is one sample of one prompt. It ends exactly once, as one ``Completion``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rollout.errors import SamplingParamsError
from rollout.fields import count, flag, items, real, shown, text
from rollout.tokens import Tokens

FinishReason = Literal["stop", "length", "aborted", "failed"]
"""``stop``: a stop id, EOS or stop string; ``length``: max_tokens or the context ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a sample is drawn. Every default is neutral.

    Values are kept as plain Python data, whatever number or list types they came in. Raises
    ``SamplingParamsError`` for a wrong type as for a wrong value, naming every parameter at fault.
    """

    temperature: float = 1.0
    """0 is greedy."""

    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all. Ties are kept by lowest id."""

    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches this."""

    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most probable one."""

    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already in the output."""

    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to logits by id; ``-inf`` bans a token."""

    min_tokens: int = 0
    """Stop ids cannot be sampled before this many tokens."""

    max_tokens: int | None = None
    """None: as many as the context allows."""

    stop_ids: tuple[int, ...] = ()
    """Beside the policy's own end-of-sequence ids."""

    stop: tuple[str, ...] = ()
    """Stop strings: ids keep the token that completes one, text is cut before it. A bare string is one.
    One complete before ``min_tokens`` neither stops nor cuts."""

    ignore_eos: bool = False
    """Neither stops at nor bans the policy's end-of-sequence ids."""

    def __post_init__(self) -> None:
        problems = []
        for name, plain in _PLAIN.items():
            try:
                object.__setattr__(self, name, plain(name, getattr(self, name)))
            except SamplingParamsError as error:
                problems.append(str(error))
        problems = problems or [message for bad, message in self._checks() if bad]
        if problems:
            raise SamplingParamsError("; ".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        """Say of each value whether it means nothing; their types are right by now."""
        finite = math.isfinite
        return [
            (
                not (finite(self.temperature) and self.temperature >= 0),
                f"temperature must be finite and >= 0, got {self.temperature}",
            ),
            (not 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}"),
            (not 0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}"),
            (
                not (finite(self.repetition_penalty) and self.repetition_penalty > 0),
                f"repetition_penalty must be > 0, got {self.repetition_penalty}",
            ),
            (
                not finite(self.presence_penalty),
                f"presence_penalty must be finite, got {self.presence_penalty}",
            ),
            (
                not finite(self.frequency_penalty),
                f"frequency_penalty must be finite, got {self.frequency_penalty}",
            ),
            (
                any(math.isnan(b) or b == math.inf for b in self.logit_bias.values()),
                "logit_bias must be finite or -inf",
            ),
            (self.max_tokens == 0, "max_tokens must be > 0, got 0"),
            (
                self.max_tokens is not None and self.min_tokens > self.max_tokens,
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}",
            ),
            ("" in self.stop, "stop must not contain the empty string"),
        ]

    @property
    def has_penalties(self) -> bool:
        """Whether the target distribution depends on which tokens were committed before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p cut the distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from plain data; an unknown name is an error, never ignored."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(shown(name).strip("'") for name in set(values) - known)
        if unknown:
            raise SamplingParamsError(
                f"unknown sampling parameter {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        clean = dict(values)
        bias = clean.get("logit_bias")
        if isinstance(bias, Mapping):
            # JSON has no other names than strings.
            clean["logit_bias"] = {int(k) if _is_numeral(k) else k: v for k, v in bias.items()}
        return cls(**clean)


def _is_numeral(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 19


def _count(name: str, value: Any) -> int:
    return count(name, value, SamplingParamsError)


def _count_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _count(name, value)


def _real(name: str, value: Any) -> float:
    return real(name, value, SamplingParamsError)


def _flag(name: str, value: Any) -> bool:
    return flag(name, value, SamplingParamsError)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_count(f"{name}[{at}]", v) for at, v in enumerate(items(name, value, SamplingParamsError)))


def _texts(name: str, value: Any) -> tuple[str, ...]:
    members = (value,) if isinstance(value, str) else items(name, value, SamplingParamsError)
    return tuple(text(f"{name}[{at}]", v, SamplingParamsError) for at, v in enumerate(members))


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise SamplingParamsError(f"{name} must map ids to numbers, got {shown(value)}")
    return {_count(f"{name}, id", k): _real(f"{name}[{shown(k)}]", v) for k, v in value.items()}


_PLAIN: Mapping[str, Callable[[str, Any], object]] = {
    "temperature": _real,
    "top_k": _count,
    "top_p": _real,
    "min_p": _real,
    "repetition_penalty": _real,
    "presence_penalty": _real,
    "frequency_penalty": _real,
    "logit_bias": _biases,
    "min_tokens": _count,
    "max_tokens": _count_or_none,
    "stop_ids": _ids,
    "stop": _texts,
    "ignore_eos": _flag,
}
"""How each sampling parameter becomes plain data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sample of one prompt."""

    prompt_uid: str
    """Names the prompt; samples that share it share its prompt pages."""

    sample_index: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    attempt: int = 0
    """A later one stands in for an earlier one that is still alive."""

    prefix_ids: tuple[int, ...] = ()
    """Tokens already committed in an earlier attempt; the same noise continues after them."""

    deadline_s: float | None = None
    """Seconds from admission after which it ends with what it has; None: no deadline."""

    @property
    def key(self) -> tuple[str, int]:
        """What the caller knows the sample by."""
        return (self.prompt_uid, self.sample_index)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Enough to explain, and to reproduce, one completion."""

    seed: int
    host: str
    fingerprint: str
    """Of the numerics: instruction set, kernels, library versions, weights checksum."""

    drafter_versions: Mapping[str, int]
    rounds: int
    drafted: int
    accepted: int
    verified_rows: int
    queued_s: float
    prefill_s: float
    decode_s: float
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """How one request ended. ``tokens`` is what was committed, also after a failure."""

    prompt_uid: str
    sample_index: int
    attempt: int
    """The request's, and one more for every time it was sent on after its host let go of it. Whoever asks
    again counts from the request's."""

    tokens: Tokens
    text: str | None
    """Without special tokens and cut before a stop string that ended it; None without a tokenizer."""

    finish_reason: FinishReason
    error: str | None
    """``"PromptTooLongError: ..."`` when failed or aborted; the type's name leads."""

    provenance: Provenance | None
    """None when the request never reached an engine."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The committed ids, EOS included."""
        return self.tokens.ids
