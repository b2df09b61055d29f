"""Whether two runs gave the same texts: ids equal, and every logprob equal bit for bit."""

import struct
from collections.abc import Mapping, Sequence

from rollout.proof.finding import Difference, DifferenceKind, Logprobs
from rollout.tokens import TokenRecord
from rollout.types import Completion, Request

Texts = Mapping[tuple[str, int], Completion]
"""How every request of a run ended, by its key."""


def first_difference(requests: Sequence[Request], expected: Texts, found: Texts) -> Difference | None:
    """Return the first difference in the order of ``requests``; None when there is none.

    Raises ``KeyError`` when a request never ended: that is a bug of the caller, not a difference.
    """
    for request in requests:
        difference = difference_of(request, expected[request.key], found[request.key])
        if difference is not None:
            return difference
    return None


def difference_of(request: Request, expected: Completion, found: Completion) -> Difference | None:
    """Return where ``found`` first differs from ``expected``: tokens, then their end, then the text."""
    for index in range(max(len(expected.tokens), len(found.tokens))):
        one = expected.tokens[index] if index < len(expected.tokens) else None
        other = found.tokens[index] if index < len(found.tokens) else None
        kind = _kind(one, other)
        if kind is not None:
            return _difference(request, expected, found, kind, index, one, other)
    end = len(expected.tokens)
    if (expected.finish_reason, expected.error) != (found.finish_reason, found.error):
        return _difference(request, expected, found, "finish", end, None, None)
    if expected.text != found.text:
        return _difference(request, expected, found, "text", end, None, None)
    return None


def _kind(expected: TokenRecord | None, found: TokenRecord | None) -> DifferenceKind | None:
    if expected is None or found is None:
        return "length"
    if expected.token_id != found.token_id:
        return "token"
    # Packed, because -0.0 == 0.0 and NaN != NaN.
    same = struct.pack("4d", *logprobs_of(expected)) == struct.pack("4d", *logprobs_of(found))
    return None if same else "logprobs"


def logprobs_of(token: TokenRecord) -> Logprobs:
    """Return all four logs of a token."""
    return (token.raw_logprob, token.scaled_logprob, token.target_logprob, token.kept_logmass)


def _difference(
    request: Request,
    expected: Completion,
    found: Completion,
    kind: DifferenceKind,
    index: int,
    one: TokenRecord | None,
    other: TokenRecord | None,
) -> Difference:
    return Difference(
        prompt_uid=request.prompt_uid,
        sample_index=request.sample_index,
        kind=kind,
        index=index,
        position=len(request.prompt_ids) + len(request.prefix_ids) + index,
        expected_id=None if one is None else one.token_id,
        found_id=None if other is None else other.token_id,
        expected_logprobs=None if one is None else logprobs_of(one),
        found_logprobs=None if other is None else logprobs_of(other),
        expected_finish=_finish(expected),
        found_finish=_finish(found),
    )


def _finish(completion: Completion) -> str:
    error = "" if completion.error is None else f" ({completion.error})"
    return f"{completion.finish_reason}{error} {completion.text or ''}".strip()
