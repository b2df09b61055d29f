"""Sequences that decode plainly, by column: a round of theirs changes numbers in arrays and makes no objects.

From round to round a sequence that decodes plainly gets a token and moves on by a position; who it is, how it
is sampled and what ends it stay. So all of that stands in columns, a row a sequence, which the compiled
forward and choice read where they stand. What was chosen is kept, round by round, and given to the sequences
together: when one ends, when somebody asks for them (``Scheduler.running``), or after a while. Until then
they are what they were some rounds ago, which nobody sees.

Only its newest token can end a sequence. A screen that misses nothing says which rows may have ended: stop
ids, the end of their room, numbers that are not finite. What it came to is decided where it is for every
token, in ``commit.py``. Sequences with penalties, bias, bans or stop strings are *watched*: they get each
token at once.
"""

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.types import PlainLoads
from rollout.engine.chooser_call import CHOOSE, COLUMNS, MASK_64, MAX_TOP_K, CallStruct, add_edits
from rollout.engine.native.commit import Detokenizer, commit_chosen
from rollout.engine.native.compiled_forward.kernels.abi import PlainStruct
from rollout.engine.native.rows import PAGE_TOKENS, RowColumns
from rollout.engine.native.sequence import LiveSequence
from rollout.engine.noise import COUPLED_STREAM
from rollout.engine.target import needs_edits
from rollout.types import FinishReason

MOST_ROUNDS = 64
"""Rounds that are kept before the sequences get their tokens: a megabyte for 400 of them."""

_NO_TOKEN = -1
"""Fills up the stop ids of a row that has fewer than others."""


class PlainBatch:
    """Rows in the order in which their sequences joined. Only the first ``size`` of an array mean anything.

    Shapes: B sequences, K rounds kept, W stop ids.
    """

    def __init__(self, *, capacity: int, page_table_SP: NDArray[np.int32]) -> None:
        self.sequences: list[LiveSequence] = []
        self.watched = False
        """Whether any sequence is."""

        self.forward = RowColumns(capacity, page_table_SP)
        """What the forward reads: last tokens, their positions, rows of the page table."""

        # Both kinds of numbers are one array each, so that a row leaves them in one go.
        self._whole = np.zeros((7, capacity), np.int64)
        self._keys, self._contexts, self._prompts, self._ends, self._held, self._seeds, self._since = (
            self._whole
        )
        self._reals = np.zeros((3, capacity))
        self._temperatures, self._top_p, self._min_p = self._reals
        self._top_k = np.zeros(capacity, np.int32)
        self._stops_BW = np.full((capacity, 1), _NO_TOKEN, np.int32)
        self._filtered = 0
        """Rows with filters."""

        self._ids_KB = np.zeros((MOST_ROUNDS, capacity), np.int32)
        self._logs_KB4 = np.zeros((MOST_ROUNDS, capacity, COLUMNS))
        self._finite, self._watched = np.ones((2, capacity), np.uint8)
        self._over = np.zeros(capacity, np.int32)
        self._rounds = 0
        """Rounds kept; row b has tokens of those from ``_since[b]`` on."""

        self._version = -1
        """The policy version of the rounds kept."""

        self.call = CallStruct(mode=CHOOSE, stream=COUPLED_STREAM)
        """The choice of every row's next token."""

        self.columns = PlainStruct()
        """What that choice moves on."""

        self._edits: list[array[Any]] = []
        self._point()

    def _point(self) -> None:
        call = self.call
        call.seeds, call.temperatures = self._seeds.ctypes.data, self._temperatures.ctypes.data
        # The next token's position is how many there are.
        call.positions, call.finite = self._contexts.ctypes.data, self._finite.ctypes.data
        self._filters = tuple(column.ctypes.data for column in (self._top_k, self._top_p, self._min_p))
        columns = self.columns
        columns.tokens, columns.positions = self.forward.addresses
        columns.contexts, columns.ends = self._contexts.ctypes.data, self._ends.ctypes.data
        columns.held, columns.over = self._held.ctypes.data, self._over.ctypes.data
        columns.watched = self._watched.ctypes.data
        self._point_stops()
        self._ids_address, self._logs_address = self._ids_KB.ctypes.data, self._logs_KB4.ctypes.data

    def _point_stops(self) -> None:
        self.columns.stops, self.columns.stops_each = self._stops_BW.ctypes.data, self._stops_BW.shape[1]

    @property
    def size(self) -> int:
        """B."""
        return len(self.sequences)

    @property
    def overdue(self) -> bool:
        """Whether no further round can be kept."""
        return self._rounds == MOST_ROUNDS

    # ---- who is in it -------------------------------------------------------------------------------

    def join(self, sequence: LiveSequence) -> None:
        """Add a row. The sequence's next token is that after its present last one."""
        row, params = self.size, sequence.params
        length = len(sequence.tokens)
        self.sequences.append(sequence)
        self.forward.put(row, token=sequence.tokens[-1], position=length - 1, table=sequence.slot)
        self._whole[:, row] = (
            sequence.key,
            length,
            sequence.prompt_tokens,
            length + sequence.remaining_tokens,
            PAGE_TOKENS * len(sequence.pages),
            0,
            self._rounds,
        )
        self._seeds.view(np.uint64)[row] = sequence.request.seed & MASK_64
        self._reals[:, row] = (params.temperature, params.top_p, params.min_p)
        self._top_k[row] = min(params.top_k, MAX_TOP_K)
        self.columns.full += length > self._held[row]
        self._put_stops(row, sequence.stop_ids | sequence.eos_ids)
        self._filtered += params.has_filters
        self._watched[row] = sequence.watched
        self.watched = self.watched or sequence.watched

    def _put_stops(self, row: int, stops: Iterable[int]) -> None:
        ids = list(stops)
        missing = len(ids) - self._stops_BW.shape[1]
        if missing > 0:
            self._stops_BW = np.pad(self._stops_BW, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
            self._point_stops()
        self._stops_BW[row] = _NO_TOKEN
        self._stops_BW[row, : len(ids)] = ids

    def leave(self, sequence: LiveSequence) -> None:
        """Give a sequence its tokens and remove its row, if it has one."""
        if sequence not in self.sequences:
            return
        row, size = self.sequences.index(sequence), self.size
        self._give(row)
        del self.sequences[row]
        rest, moved = slice(row + 1, size), slice(row, size - 1)
        self.forward.move(rest, moved)
        for columns in (self._whole, self._reals, self._ids_KB[: self._rounds]):
            columns[:, moved] = columns[:, rest]
        for rows in (self._top_k, self._stops_BW, self._finite, self._watched):
            rows[moved] = rows[rest]
        if self._rounds:
            self._logs_KB4[: self._rounds, moved] = self._logs_KB4[: self._rounds, rest]
        self._filtered -= sequence.params.has_filters
        self.watched = self.watched and bool(self._watched[: size - 1].any())

    def clear(self) -> None:
        """Remove all rows."""
        self.settle()
        self.sequences.clear()
        self.watched, self._filtered = False, 0

    # ---- pages --------------------------------------------------------------------------------------

    def full(self) -> list[LiveSequence]:
        """Return the sequences whose pages do not hold their last token."""
        if not self.columns.full:
            return []
        size = self.size
        full_B = self._contexts[:size] > self._held[:size]
        return [self.sequences[row] for row in np.flatnonzero(full_B)]

    def length(self, sequence: LiveSequence) -> int:
        """Return how many tokens a sequence has, those included that it has not got yet."""
        return int(self._contexts[self.sequences.index(sequence)])

    def holds(self, sequence: LiveSequence) -> None:
        """Hear that a sequence has other pages."""
        self._held[self.sequences.index(sequence)] = PAGE_TOKENS * len(sequence.pages)

    # ---- a round ------------------------------------------------------------------------------------

    def loads(self) -> PlainLoads:
        """Return what the controller is told of the sequences."""
        size = self.size
        contexts = self._contexts[:size]
        return PlainLoads(
            self.keys,
            self.lengths,
            _copied(contexts - self._prompts[:size]),
            _copied(self._ends[:size] - contexts),
        )

    @property
    def keys(self) -> "array[int]":
        """The sequences' keys."""
        return _copied(self._keys[: self.size])

    @property
    def lengths(self) -> "array[int]":
        """How many tokens the sequences have."""
        return _copied(self._contexts[: self.size])

    def aim(self, *, vocab_size: int) -> None:
        """Tell ``call`` where the next round's choices go, and what edits their logits.

        Raises ``ValueError`` for edits of ids outside the vocabulary.
        """
        call, at, capacity = self.call, self._rounds, self._ids_KB.shape[1]
        call.rows, call.vocab = self.size, vocab_size
        self.columns.overs = 0
        call.tokens = self._ids_address + self._ids_KB.itemsize * at * capacity
        call.logprobs = self._logs_address + self._logs_KB4.itemsize * at * capacity * COLUMNS
        call.top_k, call.top_p, call.min_p = self._filters if self._filtered else (None, None, None)
        if self._edits:
            call.edit_starts, self._edits = None, []
        if self.watched:
            targets = {
                row: s.target_row([], seed=None) for row, s in enumerate(self.sequences) if s.edits_logits
            }
            self._edits = add_edits(call, {row: t for row, t in targets.items() if needs_edits(t)})

    def advanced(self, version: int) -> list[int]:
        """Hear that weights of ``version`` chose each row's token; return the rows to look at now.

        Those are the ones that may have ended, and the watched.
        """
        assert version == self._version or not self._rounds, "rounds of two versions are kept apart"
        self._version = version
        self._rounds += 1
        rows: list[int] = self._over[: self.columns.overs].tolist()
        return rows

    def finite(self, sequence: LiveSequence) -> bool:
        """Whether the last round could choose a sequence's token."""
        return bool(self._finite[self.sequences.index(sequence)])

    def give(
        self, sequence: LiveSequence, *, detokenizer: Detokenizer | None, prompt_ended: bool = False
    ) -> FinishReason | None:
        """Give a sequence its tokens; return why it is over after the last one, or None.

        What the last round could not choose is no token, and is left out. ``prompt_ended``: it is the first
        one, chosen after the last row of a prompt.
        """
        return self._give(self.sequences.index(sequence), detokenizer, prompt_ended=prompt_ended)

    def settle(self) -> None:
        """Give all sequences their tokens."""
        if self._rounds:
            for row in range(self.size):
                self._give(row)
            self._rounds = 0
            self._since[: self.size] = 0

    def _give(
        self, row: int, detokenizer: Detokenizer | None = None, *, prompt_ended: bool = False
    ) -> FinishReason | None:
        sequence, first, rounds = self.sequences[row], int(self._since[row]), self._rounds
        if first == rounds:
            return None
        self._since[row] = rounds
        decoded = rounds - first - prompt_ended
        sequence.rounds += decoded
        sequence.verified_rows += decoded
        end = rounds if self._finite[row] else rounds - 1
        return commit_chosen(
            sequence,
            self._ids_KB[first:end, row],
            self._logs_KB4[first:end, row],
            policy_version=self._version,
            detokenizer=detokenizer,
        )


def _copied(numbers: NDArray[np.int64]) -> "array[int]":
    return array("q", numbers.tobytes())
