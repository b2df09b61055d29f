"""What a looped policy can do at each depth, on questions it never saw, and how well shallow loops draft.

Shapes: B sequences, T tokens of the longest, N scored positions, V vocabulary, D loops.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rollout.progress import Progress
from trainers_bridge.looped.batches import collate
from trainers_bridge.looped.decoding import replies_to
from trainers_bridge.looped.loss import IGNORED
from trainers_bridge.looped.model import OuroForCausalLM
from trainers_bridge.looped.tokenizer import decode, prompt_ids
from trainers_bridge.tasks.exercises import KINDS, Exercise, answered

CHUNK = 64
"""Exercises scored in one pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean and its standard error over exercises."""

    mean: float
    standard_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthReport:
    """A policy that runs ``loops`` loops, against itself at full depth."""

    loops: int
    cross_entropy: Estimate
    """Nats per token of the reference replies, each exercise's mean."""

    gain: Estimate
    """Cross entropy of one loop less, minus this one's, paired by exercise; 0 for the first loop."""

    accuracy: Estimate
    """Share of exercises it answers rightly, decoding greedily at this depth."""

    accuracy_gain: Estimate
    """Share answered rightly less the share one loop answers rightly, paired by exercise."""

    accuracy_by_kind: dict[str, float]
    agreement: float
    """Share of scored positions whose most likely token is also the full depth's."""

    sum_min: float
    """Mean over positions of sum(min(p, q)): what rejection sampling at temperature 1 accepts."""


def score_depths(
    model: OuroForCausalLM, given: Sequence[Exercise], *, decode_replies: bool = True
) -> list[DepthReport]:
    """Return a report per depth, 1 to D; without ``decode_replies`` accuracies are NaN and cost nothing."""
    chunks = [given[start : start + CHUNK] for start in range(0, len(given), CHUNK)]
    with Progress("scoring held-out replies", total=len(chunks), unit="chunks") as progress:
        parts = []
        for chunk in chunks:
            parts.append(_score_chunk(model, chunk))
            progress.advance()
    losses_DB = torch.cat([part.losses_DB for part in parts], dim=1)
    agreed_DN = torch.cat([part.agreed_DN for part in parts], dim=1)
    shared_DN = torch.cat([part.shared_DN for part in parts], dim=1)
    loops = losses_DB.shape[0]
    unknown = [math.nan] * len(given)
    reports, one_loop = [], unknown
    for index in range(loops):
        right = (
            [float(r) for r in right_answers(model, given, loops=index + 1)] if decode_replies else unknown
        )
        one_loop = right if index == 0 else one_loop
        reports.append(
            DepthReport(
                loops=index + 1,
                cross_entropy=estimate(losses_DB[index]),
                gain=estimate(losses_DB[max(0, index - 1)] - losses_DB[index]),
                accuracy=estimate(torch.tensor(right)),
                accuracy_gain=estimate(torch.tensor(right) - torch.tensor(one_loop)),
                accuracy_by_kind=_by_kind(given, right),
                agreement=float(agreed_DN[index].double().mean()),
                sum_min=float(shared_DN[index].double().mean()),
            )
        )
    return reports


def estimate(values: Tensor) -> Estimate:
    """Return mean and standard error of independent values."""
    wide = values.double()
    error = float(wide.std() / math.sqrt(wide.numel())) if wide.numel() > 1 else math.nan
    return Estimate(mean=float(wide.mean()), standard_error=error)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ChunkScores:
    losses_DB: Tensor
    agreed_DN: Tensor
    shared_DN: Tensor


@torch.no_grad()
def _score_chunk(model: OuroForCausalLM, chunk: Sequence[Exercise]) -> _ChunkScores:
    batch = collate(chunk)
    states = model.model(input_ids=batch.input_ids_BT).loop_hidden_states
    targets_BT = batch.labels_BT[:, 1:]
    scored_BT = targets_BT != IGNORED
    sequence_N = scored_BT.nonzero()[:, 0]
    logits = [model.lm_head(state[:, :-1][scored_BT]).double() for state in states]
    deepest_NV = logits[-1].softmax(-1)
    losses, agreed, shared = [], [], []
    for logits_NV in logits:
        each_N = F.cross_entropy(logits_NV, targets_BT[scored_BT], reduction="none")
        total_B = torch.zeros(len(chunk), dtype=each_N.dtype).index_add_(0, sequence_N, each_N)
        losses.append(total_B / scored_BT.sum(1))
        agreed.append(logits_NV.argmax(-1) == logits[-1].argmax(-1))
        shared.append(torch.minimum(logits_NV.softmax(-1), deepest_NV).sum(-1))
    return _ChunkScores(
        losses_DB=torch.stack(losses), agreed_DN=torch.stack(agreed), shared_DN=torch.stack(shared)
    )


def right_answers(
    model: OuroForCausalLM, given: Sequence[Exercise], *, loops: int, sampled_seed: int | None = None
) -> list[bool]:
    """Return which exercises the policy answers rightly with ``loops`` loops, greedily or in one sample each.

    ``sampled_seed`` as in ``replies_to``.
    """
    prompts = [prompt_ids(exercise.question) for exercise in given]
    longest = max(len(exercise.reply) for exercise in given) + 16
    with Progress(f"answering with {loops} loops") as progress:
        replies = replies_to(
            model,
            prompts,
            loops=loops,
            max_new_tokens=longest,
            sampled_seed=sampled_seed,
            progress=progress,
        )
    return [
        reply.ended and answered(decode(reply.token_ids)) == exercise.answer
        for reply, exercise in zip(replies, given, strict=True)
    ]


def _by_kind(given: Sequence[Exercise], right: Sequence[float]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for kind in KINDS:
        own = [r for exercise, r in zip(given, right, strict=True) if exercise.kind == kind]
        if own:
            shares[kind] = sum(own) / len(own)
    return shares
