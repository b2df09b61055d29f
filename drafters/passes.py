"""Drafting by passes of a model: each pass takes every sequence one token further.

Where the model can, one call runs all of them; else they are run one by one, and give the same tokens
(with a screened head all but a few in ten thousand).

Shapes: V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafters.types import (
    DraftChain,
    DraftError,
    DraftModel,
    DraftRequest,
    DraftStep,
    Proposal,
)


def draft_by_passes(
    name: str, model: DraftModel, requests: Sequence[DraftRequest], *, max_gamma: int, vocab_size: int
) -> Proposal:
    """Run up to ``gamma`` passes; a request with a smaller gamma sits out the later ones.

    Raises ``DraftError`` when the first pass fails; a later failure ends the drafting and is the proposal's
    ``problem``. ``name`` is the drafter's, for messages.
    """
    gammas = [min(r.gamma, max_gamma) for r in requests]
    chain = _chain(name, model, requests, gammas)
    if chain is not None:
        drafts, probs, problem = chain.tokens, None, chain.problem
    else:
        drafts, probs, problem = _stepped(name, model, requests, gammas, vocab_size)
    counts = [len(tokens) for tokens in drafts]
    return Proposal(
        tokens=drafts,
        probs=probs,
        passes=max(counts, default=0),
        rows=sum(counts),
        # A row reads the keys of all its tokens and of every draft before it, its own input included.
        context_tokens=sum(
            n * len(r.tokens) + n * (n - 1) // 2 for n, r in zip(counts, requests, strict=True)
        ),
        problem=problem,
    )


def _chain(
    name: str, model: DraftModel, requests: Sequence[DraftRequest], gammas: Sequence[int]
) -> DraftChain | None:
    """Run all passes in one go, None where they must be run one by one."""
    if not any(gammas):
        return None
    try:
        chain = model.chain(requests, gammas)
    except (RuntimeError, ValueError, ArithmeticError) as error:
        raise DraftError(f"{name}'s draft passes failed: {error}") from error
    if chain is not None and chain.problem:
        problem = f"{name}'s draft pass failed: {chain.problem}"
        if not any(chain.tokens):
            raise DraftError(problem)
        return replace(chain, problem=problem)
    return chain


def _stepped(
    name: str,
    model: DraftModel,
    requests: Sequence[DraftRequest],
    gammas: Sequence[int],
    vocab_size: int,
) -> tuple[list[list[int]], list[Tensor] | None, str]:
    """Run the passes one by one; return drafts, their distributions and what failed, if anything."""
    drafts: list[list[int]] = [[] for _ in requests]
    probs: list[list[Tensor]] = [[] for _ in requests]
    for depth in range(max(gammas, default=0)):
        live = [i for i, gamma in enumerate(gammas) if gamma > depth]
        try:
            step = _step(name, model, [requests[i] for i in live], [drafts[i] for i in live], vocab_size)
        except DraftError as error:
            if depth == 0:
                raise
            return drafts, _stacked(name, drafts, probs), str(error)
        for row, i in enumerate(live):
            drafts[i].append(step.tokens[row])
            if step.probs is not None:
                probs[i].append(step.probs[row])
    return drafts, _stacked(name, drafts, probs), ""


def _step(
    name: str,
    model: DraftModel,
    requests: Sequence[DraftRequest],
    drafts: Sequence[Sequence[int]],
    vocab_size: int,
) -> DraftStep:
    """Run one pass and refuse an answer that cannot be drafted from."""
    try:
        step = model.step(requests, drafts)
    except (RuntimeError, ValueError, ArithmeticError) as error:
        raise DraftError(f"{name}'s draft pass failed: {error}") from error
    if len(step.tokens) != len(requests):
        raise DraftError(f"{name}'s draft pass chose {len(step.tokens)} tokens for {len(requests)} rows")
    if not all(0 <= token < vocab_size for token in step.tokens):
        raise DraftError(f"{name} drafted an id outside the vocabulary: {step.tokens}")
    if step.probs is not None:
        if len(step.probs) != len(requests):
            raise DraftError(f"{name} reported {len(step.probs)} distributions for {len(requests)} rows")
        if not all(bool(torch.isfinite(p_V).all()) for p_V in step.probs):
            raise DraftError(f"{name}'s draft distribution is not finite")
    return step


def _stacked(
    name: str, drafts: Sequence[Sequence[int]], probs: Sequence[Sequence[Tensor]]
) -> list[Tensor] | None:
    """Return per request the rows its tokens were drawn from, or None when no pass reported any."""
    if not any(probs):
        return None
    if any(len(d) != len(p) for d, p in zip(drafts, probs, strict=True)):
        raise DraftError(f"{name} reported distributions for some of its drafts only")
    blank_V = next(p for p in probs if p)[0]
    return [torch.stack(list(p)) if p else blank_V.new_empty(0, blank_V.shape[0]) for p in probs]
