"""The one place where a token becomes part of a rollout.

Plain decoding and every kind of verification hand their tokens over one by one, so stop ids, stop
strings, limits, penalties, logprobs and counters cannot tell how a token was found.
"""

from typing import Protocol

from rollout.engine.native.sequence import LiveSequence
from rollout.engine.target import Choice
from rollout.types import FinishReason, Origin, TokenRecord

_TOKENS_PER_CHARACTER = 4
"""A character takes at most four byte-level tokens, so this many per stop character always cover it."""


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
    sequence.records.append(
        TokenRecord(
            token_id=token,
            raw_logprob=choice.raw_logprob,
            scaled_logprob=choice.scaled_logprob,
            target_logprob=choice.target_logprob,
            kept_logmass=choice.kept_logmass,
            policy_version=policy_version,
            origin=origin,
            drafter=drafter,
        )
    )
    return _finish_reason(sequence, token, detokenizer)


def _finish_reason(
    sequence: LiveSequence, token: int, detokenizer: Detokenizer | None
) -> FinishReason | None:
    if token in sequence.stop_ids or token in sequence.eos_ids:
        return "stop"
    past_minimum = sequence.new_tokens >= sequence.params.min_tokens
    if sequence.params.stop and past_minimum and _completes_stop_string(sequence, detokenizer):
        return "stop"
    if sequence.remaining_tokens <= 0:
        return "length"
    return None


def _completes_stop_string(sequence: LiveSequence, detokenizer: Detokenizer | None) -> bool:
    assert detokenizer is not None, "stop strings are refused at the door without a tokenizer"
    stops = sequence.params.stop
    window = _TOKENS_PER_CHARACTER * (max(map(len, stops)) + 1)
    recent = sequence.tokens[max(sequence.prompt_tokens, len(sequence.tokens) - window) :]
    text = detokenizer.decode(recent, skip_special_tokens=True)
    return any(stop in text for stop in stops)


def final_text(sequence: LiveSequence, detokenizer: Detokenizer | None) -> str | None:
    """Return the text of the new tokens, cut before the first stop string; None without a tokenizer."""
    if detokenizer is None:
        return None
    text = detokenizer.decode(sequence.tokens[sequence.prompt_tokens :], skip_special_tokens=True)
    cuts = [at for stop in sequence.params.stop if (at := text.find(stop)) >= 0]
    return text[: min(cuts)] if cuts else text
