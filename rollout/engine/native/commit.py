"""The one place where a token becomes part of a rollout.

Every kind of verification hands its tokens over one by one, so stop ids, stop strings, limits, penalties,
logprobs and counters cannot tell how a token was found. Plain rounds hand over what they chose since the last
time (``plain_batch.py``); what ends a sequence is decided by the same lines.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from controller.types import AR
from rollout.engine.native.sequence import LiveSequence
from rollout.engine.target import Choice
from rollout.tokens import Origin, Source
from rollout.types import FinishReason

_MARGIN_CHARACTERS = 4
"""Text kept before the longest match a window may hold: its first characters can read otherwise than in the
whole text, where a tokenizer drops a leading space or rewrites spaces before punctuation."""

_UNREADABLE = "\ufffd"
"""How bytes read that are no whole character."""


class Detokenizer(Protocol):
    """The part of a Hugging Face tokenizer the engine needs."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str:
        """Return the text of ``token_ids``."""
        ...


def commit_token(
    sequence: LiveSequence,
    choice: Choice,
    *,
    origin: Origin,
    drafter: str,
    policy_version: int,
    detokenizer: Detokenizer | None,
) -> FinishReason | None:
    """Append one token and return why the sequence is over, or None when it goes on."""
    token = choice.token
    sequence.tokens.append(token)
    if sequence.params.has_penalties:
        sequence.output_counts[token] += 1
    logs = choice[1:5]  # by place: the four of a choice are those of a record
    sequence.records.add(token, logs, policy_version=policy_version, origin=origin, drafter=drafter)
    return _finish_reason(sequence, token, detokenizer)


def commit_chosen(
    sequence: LiveSequence,
    ids_N: NDArray[np.int32],
    logs_N4: NDArray[np.float64],
    *,
    policy_version: int,
    detokenizer: Detokenizer | None,
) -> FinishReason | None:
    """Append tokens chosen plainly, round by round; return why the sequence is over after them, or None.

    Only the last of them may end it.
    """
    token_ids: list[int] = ids_N.tolist()
    if not token_ids:
        return None
    sequence.tokens += token_ids
    if sequence.params.has_penalties:
        sequence.output_counts.update(token_ids)
    source = Source(policy_version, "plain", AR)
    sequence.records.add_columns(ids_N.tobytes(), logs_N4.tobytes(), source)
    sequence.frontier = len(sequence.tokens) - 1
    return _finish_reason(sequence, token_ids[-1], detokenizer)


def _finish_reason(
    sequence: LiveSequence, token: int, detokenizer: Detokenizer | None
) -> FinishReason | None:
    params = sequence.params
    if params.stop and sequence.new_tokens >= params.min_tokens:
        assert detokenizer is not None, "stop strings are refused at the door without a tokenizer"
        sequence.text_end = _stop_string_start(sequence, detokenizer)
        if sequence.text_end is not None:
            return "stop"
    if token in sequence.stop_ids or token in sequence.eos_ids:
        return "stop"
    if sequence.remaining_tokens <= 0:
        return "length"
    return None


def _stop_string_start(sequence: LiveSequence, detokenizer: Detokenizer) -> int | None:
    """Return where in the text a stop string starts that the last token completed, or None.

    Decides as decoding all new tokens after each one would, but from as few of them as can tell. The settled
    text of that window must have room for any match, and must begin where a character does, because some
    tokenizers make all bytes beside a broken character unreadable.
    """
    stops = sequence.params.stop
    needed = max(map(len, stops)) + _MARGIN_CHARACTERS
    new_ids = sequence.tokens[sequence.prompt_tokens :]
    window = 2 * needed  # usually enough: few tokens carry less than a character
    while window < len(new_ids):
        settled, text = _settled(new_ids[-window:], detokenizer)
        if settled >= needed and not text.startswith(_UNREADABLE):
            if _completed(text, settled, stops) is None:
                return None
            break
        window *= 2
    settled, text = _settled(new_ids, detokenizer)
    return _completed(text, settled, stops)


def _settled(token_ids: list[int], detokenizer: Detokenizer) -> tuple[int, str]:
    """Return how many characters stood before the last token and still do, and the text with it."""
    before = detokenizer.decode(token_ids[:-1], skip_special_tokens=True)
    text = detokenizer.decode(token_ids, skip_special_tokens=True)
    # A token may also change what stood there: the half of a character before it becomes a whole one.
    pairs = enumerate(zip(before, text, strict=False))
    settled = next((at for at, (old, new) in pairs if old != new), min(len(before), len(text)))
    return settled, text


def _completed(text: str, settled: int, stops: Sequence[str]) -> int | None:
    """Return the first start of a stop string that ends beyond ``settled``, or None."""
    starts = [at for stop in stops if (at := text.find(stop, max(0, settled - len(stop) + 1))) >= 0]
    return min(starts, default=None)


def final_text(sequence: LiveSequence, detokenizer: Detokenizer | None) -> str | None:
    """Return the new tokens' text, cut before the stop string that ended it; None without a tokenizer."""
    if detokenizer is None:
        return None
    text = detokenizer.decode(sequence.tokens[sequence.prompt_tokens :], skip_special_tokens=True)
    return text[: sequence.text_end]
