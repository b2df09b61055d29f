"""How far the shallow loops of the trained policy still speak for the deepest one, on its own samples.

What a run's rounds tell of acceptance depends on who was drafted for, and how far. This does not: it is
computed from the trainer's model, for every depth and every token of the samples it is given.

Shapes: C completion tokens, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trainers_bridge.looped.model import OuroForCausalLM

LOOP_OVERLAP = "trainer/loop_overlap_"
"""Followed by a depth. ``rollout.report.drift`` draws what is charted under it."""


@torch.no_grad()
def loop_overlaps(
    model: Any,
    *,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    temperature: float,
) -> dict[str, float]:
    """Return per loop but the last the mean over completion tokens of sum(min(p, q)), as loggable values.

    p is what the policy samples from after all loops, q what it would after this one; both full vocabulary.
    It is what rejection sampling accepts of a first draft, in 0..1. Empty for a policy that has no loops.
    """
    if not isinstance(model, OuroForCausalLM):
        return {}
    device = next(model.parameters()).device
    totals = [0.0] * (model.config.total_ut_steps - 1)
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        ids_T = torch.tensor([*prompt, *completion], device=device)
        states = model.model(input_ids=ids_T[None, :-1], auxiliary=False).loop_hidden_states
        laws = [
            torch.softmax(model.lm_head(state[0, -len(completion) :]).float() / temperature, dim=-1)
            for state in states
        ]
        for loop, law_CV in enumerate(laws[:-1]):
            totals[loop] += float(torch.minimum(law_CV, laws[-1]).sum(dim=-1).double().sum())
    tokens = sum(map(len, completion_ids))
    return {f"{LOOP_OVERLAP}{loop}": total / tokens for loop, total in enumerate(totals, start=1)}
