"""Moving a policy off the 4-bit grid its weights lie on, and saying what that did to it.

Weights that were once rounded to 4 bits make a 4-bit drafter look better than it is on trained
weights. Here each weight of a linear moves by up to a quarter of its group's own 4-bit step.

Shapes: N out features, K in features, C groups per row, G weights per group.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from rollout.engine.native.decoder import Decoder
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch

log = logging.getLogger(__name__)

MOVE_STEPS = 0.25
"""Half the largest move that keeps a weight nearest to its own grid point: plainly off the grid, and
still close to the policy it was."""

LEVELS = 15
"""Steps between the least and the greatest of sixteen values."""

CHUNK_ROWS = 64
"""Rows whose logits are held at once while measuring perplexity."""

SAMPLE_TEXT = (
    "The river had been low all summer, and the boats lay on the mud where the children could climb "
    "into them. When the first rain came, it came at night. By morning the smallest boat had drifted "
    "as far as the bridge, with a grey cat asleep in it, and half the village stood on the bank to "
    "argue about whose cat it was. To add seven and five, count on from seven: eight, nine, ten, "
    "eleven, twelve. If a shop sells three apples for a coin, then four coins buy twelve apples."
)
"""Plain prose and a little arithmetic of our own, for a perplexity to report."""


def offgrid(state: Mapping[str, Tensor], *, group: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """Return ``state`` with every linear's weights moved; norms, biases and other tensors are shared.

    The head moves as well; where it is tied, its one tensor (the embedding) moves once. The noise of a
    tensor depends on ``seed`` and its name alone.
    """
    head = "lm_head.weight" if "lm_head.weight" in state else "model.embed_tokens.weight"
    return {
        name: _moved(tensor, group=group, key=f"offgrid/{seed}/{name}")
        if name == head or name.endswith("_proj.weight")
        else tensor
        for name, tensor in state.items()
    }


def _moved(weight_NK: Tensor, *, group: int, key: str) -> Tensor:
    rows, columns = weight_NK.shape
    whole = columns - columns % group
    wide_NK = weight_NK.detach().to("cpu", torch.float32)
    # Philox is counter-based and drawn here by one thread: no dependence on how many there are.
    digest = blake2b(key.encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "big")))
    noise_NK = torch.from_numpy(generator.random((rows, columns), dtype=np.float32)).mul_(2).sub_(1)
    step_NK = torch.empty_like(wide_NK)
    for start, stop, size in ((0, whole, group), (whole, columns, columns - whole)):
        if start == stop:
            continue
        groups_NCG = wide_NK[:, start:stop].reshape(rows, -1, size)
        step_NC1 = (groups_NCG.amax(-1, keepdim=True) - groups_NCG.amin(-1, keepdim=True)) / LEVELS
        step_NK[:, start:stop] = step_NC1.expand(-1, -1, size).reshape(rows, -1)
    # Not in place: a float32 weight is its own wide form, and the caller's.
    return (wide_NK + noise_NK.mul_(step_NK).mul_(MOVE_STEPS)).to(weight_NK.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityChange:
    """Perplexity of one policy before and after a change, on the same tokens."""

    before: float
    after: float
    tokens: int
    """Predicted tokens; a text's first is not."""

    @property
    def ratio(self) -> float:
        """After over before; 1 is no change."""
        return self.after / self.before


def perplexity(decoder: Decoder, texts: Sequence[Sequence[int]]) -> float:
    """Return the perplexity of the loaded policy over ``texts``, each text's first token left out."""
    total, count = 0.0, 0
    for tokens in texts:
        if len(tokens) < 2:
            raise ValueError("a text of fewer than two tokens predicts nothing")
        pages = -(-len(tokens) // PAGE_TOKENS)
        kv = decoder.new_storage(pages)
        inputs, targets = tokens[:-1], torch.tensor(tokens[1:])
        for start in range(0, len(inputs), CHUNK_ROWS):
            chunk = inputs[start : start + CHUNK_ROWS]
            logits_RV = decoder.forward(_rows(chunk, start, pages), kv).logits_RV
            logprobs_RV = logits_RV.cpu().double().log_softmax(-1)
            chosen_R1 = logprobs_RV.gather(1, targets[start : start + len(chunk), None])
            total -= float(chosen_R1.sum())
        count += len(inputs)
    return math.exp(total / count)


def _rows(tokens: Sequence[int], start: int, pages: int) -> RowBatch:
    rows = len(tokens)
    return RowBatch(
        token_ids_M=torch.tensor(tokens, dtype=torch.int32),
        positions_M=torch.arange(start, start + rows, dtype=torch.int32),
        table_M=torch.zeros(rows, dtype=torch.int32),
        page_table_SP=torch.arange(pages, dtype=torch.int32)[None],
        head_rows_R=torch.arange(rows, dtype=torch.int32),
    )


def perplexity_change(
    decoder: Decoder,
    *,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    texts: Sequence[Sequence[int]],
) -> PerplexityChange:
    """Return and log what replacing ``before`` by ``after`` does; ``after`` stays loaded in ``decoder``."""
    values = []
    for state in (before, after):
        decoder.load(state)
        values.append(perplexity(decoder, texts))
    change = PerplexityChange(before=values[0], after=values[1], tokens=sum(len(t) - 1 for t in texts))
    log.info(
        "perplexity %.3f -> %.3f (x%.4f) over %d tokens",
        change.before,
        change.after,
        change.ratio,
        change.tokens,
    )
    return change
