"""How far the rollout's logprobs lie from the trainer's own, on the samples it is about to learn from.

The trainer assumes they are the same. Rounding (the engine serves rounded weights), a missed weight push,
or another sampling law would all show here and nowhere else.

Shapes: B samples, T tokens of the longest, C completion tokens of all samples together, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Per-token comparison, trainer's logprob minus rollout's, over ``tokens`` tokens."""

    samples: int
    tokens: int
    abs_mean: float
    abs_max: float
    kl: float
    """Estimate of KL(rollout law || trainer law) per token: mean of ratio - 1 - log ratio, never negative."""

    ratio_mean: float
    """Mean of trainer's probability over rollout's; 1 in expectation when the rollout's law is what its
    logprobs say it is."""

    def gauges(self) -> dict[str, float]:
        """Return loggable values."""
        return {
            "trainer/mismatch_logprob_abs_mean": self.abs_mean,
            "trainer/mismatch_logprob_abs_max": self.abs_max,
            "trainer/mismatch_kl": self.kl,
            "trainer/mismatch_ratio_mean": self.ratio_mean,
            "trainer/mismatch_tokens": float(self.tokens),
        }


@torch.no_grad()
def trainer_logprobs(
    model: Any,
    *,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    temperature: float,
) -> list[list[float]]:
    """Return what ``model`` gives the completions' tokens: ``scaled`` logprobs, one per token.

    Samples run one by one, without padding: the reference must not depend on its neighbours.
    """
    device = next(model.parameters()).device
    rows: list[list[float]] = []
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        ids_T = torch.tensor([*prompt, *completion], device=device)
        output = model(input_ids=ids_T[None, :-1], use_cache=False, logits_to_keep=len(completion))
        logits_CV: Tensor = output.logits[0].float() / temperature
        logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
        picked_C = logprobs_CV.gather(-1, ids_T[len(prompt) :, None]).squeeze(-1)
        rows.append(picked_C.tolist())
    return rows


def compare(rollout: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]) -> Mismatch:
    """Return the comparison of two sets of logprobs of the same tokens. Raises ``ValueError`` on shapes."""
    if [len(r) for r in rollout] != [len(t) for t in trainer] or not any(map(len, rollout)):
        raise ValueError("rollout and trainer logprobs must cover the same tokens, and at least one")
    rollout_C = torch.tensor([x for r in rollout for x in r], dtype=torch.float64)
    trainer_C = torch.tensor([x for t in trainer for x in t], dtype=torch.float64)
    log_ratio_C = trainer_C - rollout_C
    ratio_C = log_ratio_C.exp()
    return Mismatch(
        samples=len(rollout),
        tokens=int(rollout_C.numel()),
        abs_mean=float(log_ratio_C.abs().mean()),
        abs_max=float(log_ratio_C.abs().max()),
        kl=float((torch.expm1(log_ratio_C) - log_ratio_C).mean()),
        ratio_mean=float(ratio_C.mean()),
    )
