"""What a request must be before it may run. Each refusal concerns that item alone."""

from collections import Counter

from rollout.engine.native.pages import pages_for
from rollout.engine.native.sequence import LiveSequence
from rollout.errors import (
    CapacityError,
    DuplicateRequestError,
    EmptyPromptError,
    PromptTooLongError,
    SamplingParamsError,
    TokenRangeError,
)
from rollout.policy.spec import ModelSpec
from rollout.types import Request


def admit_request(
    request: Request,
    *,
    key: int,
    spec: ModelSpec,
    context_limit: int,
    pool_pages: int,
    live: LiveSequence | None,
    has_tokenizer: bool,
    now_s: float,
) -> LiveSequence:
    """Return the sequence of a valid request. Raises a ``RequestError`` that names what is wrong.

    The context limit is the caller's: what drafts need on top of it is nobody's business but ours.
    """
    prompt = request.prompt_ids
    params = request.params
    if live is not None:
        raise DuplicateRequestError(f"request {request.key} already runs (attempt {live.request.attempt})")
    if not prompt:
        raise EmptyPromptError(f"request {request.key} has an empty prompt")
    outside = [t for t in (*prompt, *request.prefix_ids) if not 0 <= t < spec.vocab_size]
    if outside:
        raise TokenRangeError(f"ids {outside[:5]} are outside the vocabulary 0..{spec.vocab_size - 1}")
    room = context_limit - len(prompt)
    if room < 1:
        raise PromptTooLongError(f"a prompt of {len(prompt)} leaves no room in a context of {context_limit}")
    if params.stop and not has_tokenizer:
        raise SamplingParamsError("stop strings need a policy with a tokenizer")
    named = [*params.logit_bias, *params.stop_ids]
    if any(not 0 <= t < spec.vocab_size for t in named):
        raise TokenRangeError("logit_bias or stop_ids name ids outside the vocabulary")
    max_new = room if params.max_tokens is None else min(room, params.max_tokens)
    if len(request.prefix_ids) >= max_new:
        raise SamplingParamsError(f"the prefix already has the {max_new} tokens that were allowed")
    if pages_for(len(prompt) + max_new) > pool_pages:
        raise CapacityError(f"{len(prompt) + max_new} tokens do not fit a KV pool of {pool_pages} pages")
    return LiveSequence(
        key=key,
        request=request,
        tokens=[*prompt, *request.prefix_ids],
        stop_ids=frozenset(params.stop_ids),
        eos_ids=frozenset() if params.ignore_eos else frozenset(spec.eos_ids),
        max_new_tokens=max_new,
        added_s=now_s,
        output_counts=Counter(request.prefix_ids if params.has_penalties else ()),
        prompt_set=frozenset(prompt) if params.repetition_penalty != 1.0 else frozenset(),
    )
