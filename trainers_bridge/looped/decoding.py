"""Decoding at any depth, many prompts at once: for scoring depths, not for rollouts.

Shapes: B prompts still running, P all prompts, S tokens so far, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.progress import Progress
from trainers_bridge.looped.model import LoopCache, OuroForCausalLM
from trainers_bridge.looped.tokenizer import END_ID, PAD_ID

SMALLEST = 2.0**-54
"""In place of a uniform draw of 0, whose noise would be infinite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What followed one prompt."""

    token_ids: list[int]
    """Without the end token."""

    ended: bool


@torch.no_grad()
def replies_to(
    model: OuroForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    loops: int,
    max_new_tokens: int,
    sampled_seed: int | None = None,
    progress: Progress | None = None,
) -> list[Reply]:
    """Return a reply to each prompt after ``loops`` loops per token: of the most likely tokens, or sampled.

    With ``sampled_seed`` tokens are drawn at temperature 1. The noise of a prompt's token belongs to (seed,
    index of the prompt, position of the token), so two policies asked alike differ by what they are alone.
    """
    noise = None if sampled_seed is None else torch.Generator().manual_seed(sampled_seed)
    longest = max(map(len, prompts))
    ids_BS = torch.tensor([[PAD_ID] * (longest - len(p)) + list(p) for p in prompts])
    mask_BS = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    cache = LoopCache()
    replies: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    fresh_BT = ids_BS
    for _ in range(max_new_tokens):
        output = model(
            input_ids=fresh_BT, attention_mask=mask_BS, past_key_values=cache, loops=loops, logits_to_keep=1
        )
        logits_BV = output.logits[:, -1]
        if noise is not None:
            # Drawn for all prompts, those that have ended too: who else still runs must not matter.
            uniform_PV = torch.rand(len(prompts), logits_BV.shape[-1], generator=noise, dtype=torch.float64)
            logits_BV = logits_BV - (-uniform_PV[running].clamp(min=SMALLEST).log()).log()
        next_B = logits_BV.argmax(-1)
        rows = torch.tensor([row for row, token in enumerate(next_B.tolist()) if token != END_ID])
        running = [running[row] for row in rows.tolist()]
        if progress is not None:
            progress.advance(note=f"{len(running)} replies still running")
        if not running:
            break
        fresh_BT = next_B[rows, None]
        for index, token in zip(running, fresh_BT[:, 0].tolist(), strict=True):
            replies[index].append(token)
        if len(rows) < len(mask_BS):
            cache.keep(rows)
        mask_BS = torch.cat([mask_BS[rows], mask_BS.new_ones(len(rows), 1)], dim=1)
    unended = set(running)
    return [Reply(token_ids=ids, ended=index not in unended) for index, ids in enumerate(replies)]
