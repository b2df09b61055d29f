"""Perplexity of the policy a decoder runs, and what a change of its weights does to it.

Shapes: R rows, V vocabulary, S sequences, P pages, M rows of a forward.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine.native.decoder import Decoder
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch

log = logging.getLogger(__name__)

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
