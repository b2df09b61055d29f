"""The round's forward where rows start at different depths: every (position, loop) is computed once.

Rows of prompts, of plain decoding and of drafts without states start at their tokens; rows whose draft left
states start after its loops. The shallowest go first and meet the next deeper ones where those stand: one
pass per distinct depth, the last one, with the head, over all rows. Keys at a loop are complete before a row
reads them there: a draft wrote its own, and the passes before wrote the others'. Compiled kernels run all
these passes in one call (``compiled_forward/kernels/standing.h``).

Shapes: M rows, D hidden, R head rows, V vocabulary, N states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from torch import Tensor

from rollout.engine.native.compiled_forward.decoder import CompiledDecoder
from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.drafts.draft_states import DraftStates
from rollout.engine.native.pass_clock import PassClock
from rollout.engine.native.rows import RowBatch, int32, rows_of
from rollout.engine.native.work import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where the rows of a forward start."""

    depths: Sequence[int]
    """Loops each row has had; 0 starts at its token."""

    states_ND: Tensor
    """States by number."""

    numbers: Sequence[int]
    """The number of each row's state; those of rows that have had no loops mean nothing."""

    @property
    def spared(self) -> int:
        """Row-loops that need not be computed again."""
        return sum(self.depths)


def standing_of(work: Work, states: DraftStates) -> Standing | None:
    """Return where the rows of ``row_batch(work, ...)`` start; None when all start at their tokens."""
    if not states.any:
        return None
    depths = [0] * work.prefill_rows
    numbers = [0] * work.prefill_rows
    for sequence in work.decoding:
        fed = [sequence.tokens[-1], *work.drafts_of(sequence).tokens]
        depth, found = states.standing(sequence.key, fed, start=len(sequence.tokens) - 1)
        missing = [0] * (len(fed) - len(found))
        depths += [depth] * len(found) + missing
        numbers += found + missing
    if not any(depths):
        return None
    return Standing(depths=depths, states_ND=states.states(), numbers=numbers)


def forward_from(
    decoder: Decoder, batch: RowBatch, kv: KVStorage, standing: Standing, *, clock: PassClock
) -> Tensor:
    """Return the logits (R, V) of the batch's head rows, each row computed from where it stands.

    The bits are those of one forward of everything.
    """
    depths, numbers, states_ND = standing.depths, standing.numbers, standing.states_ND
    if isinstance(decoder, CompiledDecoder):
        whole = partial(decoder.forward_from, batch, kv, depths=depths, numbers=numbers, states_ND=states_ND)
        return clock.timed(whole).logits_RV
    hidden_MD = states_ND[int32(numbers)]
    stops = sorted(set(depths))
    for begin, end in pairwise(stops):
        rows_K = int32([row for row, depth in enumerate(depths) if depth <= begin])
        given_KD = hidden_MD[rows_K] if begin else None
        part = clock.forward(decoder, rows_of(batch, rows_K), kv, loops=range(begin, end), hidden_MD=given_KD)
        hidden_MD[rows_K] = part.hidden_MD
    last = range(stops[-1], decoder.spec.loops)
    return clock.forward(decoder, batch, kv, loops=last, hidden_MD=hidden_MD, states=False).logits_RV
