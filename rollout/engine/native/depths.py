"""The round's forward where rows start at different depths: every (position, loop) is computed once.

Rows of prompts, of plain decoding and of drafts without states start at their tokens; rows whose draft left
states start after its loops. The shallowest go first and meet the next deeper ones where those stand: one
pass per distinct depth, the last one, with the head, over all rows. Keys at a loop are complete before a row
reads them there: a draft wrote its own, and the passes before wrote the others'.

Shapes: M rows, D hidden, R head rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.draft_states import DraftStates
from rollout.engine.native.pass_clock import PassClock
from rollout.engine.native.rows import RowBatch, rows_of
from rollout.engine.native.work import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where the rows of a forward start."""

    depth_M: Tensor
    """Loops each row has had, int64; 0 starts at its token."""

    hidden_MD: Tensor
    """The states of the rows that have had any; other rows hold nothing."""

    @property
    def spared(self) -> int:
        """Row-loops that need not be computed again."""
        return int(self.depth_M.sum())


def standing_of(work: Work, states: DraftStates) -> Standing | None:
    """Return where the rows of ``row_batch(work, ...)`` start; None when all start at their tokens."""
    rows: list[int] = []
    numbers: list[int] = []
    depths: list[int] = []
    row = work.prefill_rows
    for sequence in work.decoding if states.any else ():
        fed = [sequence.tokens[-1], *work.drafts_of(sequence).tokens]
        depth, found = states.standing(sequence.key, fed, start=len(sequence.tokens) - 1)
        rows += range(row, row + len(found))
        depths += [depth] * len(found)
        numbers += found
        row += len(fed)
    if not rows:
        return None
    known_ND = states.states()
    total = work.prefill_rows + work.verify_rows
    depth_M = torch.zeros(total, dtype=torch.int64)
    depth_M[rows] = torch.tensor(depths)
    hidden_MD = known_ND.new_zeros(total, known_ND.shape[1])
    hidden_MD[rows] = known_ND[numbers]
    return Standing(depth_M=depth_M, hidden_MD=hidden_MD)


def forward_from(
    decoder: Decoder, batch: RowBatch, kv: KVStorage, standing: Standing, *, clock: PassClock
) -> Tensor:
    """Return the logits (R, V) of the batch's head rows, each row computed from where it stands.

    The bits are those of one forward of everything. ``standing.hidden_MD`` is used up.
    """
    hidden_MD, depth_M = standing.hidden_MD, standing.depth_M
    depths: Sequence[int] = sorted(set(depth_M.tolist()))
    for begin, end in pairwise(depths):
        rows_K = (depth_M <= begin).nonzero()[:, 0]
        given_KD = hidden_MD[rows_K] if begin else None
        part = clock.forward(decoder, rows_of(batch, rows_K), kv, loops=range(begin, end), hidden_MD=given_KD)
        hidden_MD[rows_K] = part.hidden_MD
    last = range(depths[-1], decoder.spec.loops)
    given_MD = hidden_MD if last.start else None
    return clock.forward(decoder, batch, kv, loops=last, hidden_MD=given_MD).logits_RV
