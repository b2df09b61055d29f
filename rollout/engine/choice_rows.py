"""The rows of a compiled choice in memory that is used again in every round.

A round of a small policy takes about as long as making a few hundred Python objects, so what did not change
since the last round is not written again.
"""

from array import array
from collections.abc import Sequence
from typing import Any

from rollout.engine.chooser_call import (
    CHOOSE,
    COLUMNS,
    MASK_64,
    CallStruct,
    add_edits,
    add_filters,
    choices_of,
    edited_rows,
)
from rollout.engine.noise import COUPLED_STREAM
from rollout.engine.target import Choice, TargetRow
from rollout.types import SamplingParams


class _Column:
    """Numbers of one kind that keep their address."""

    def __init__(self, kind: str, count: int) -> None:
        self.numbers: array[Any] = array(kind, [0]) * count
        self.address = self.numbers.buffer_info()[0]
        self._memory = memoryview(self.numbers)

    def put(self, numbers: "array[Any]") -> None:
        """Write them from the start on."""
        self._memory[: len(numbers)] = numbers


class ChoiceRows:
    """A call that chooses with coupled noise, with all it points into but the logits."""

    def __init__(self, *, vocab_size: int, logprobs: bool = True) -> None:
        """Without ``logprobs`` nobody asks for those, and ``choices`` cannot be."""
        self.call = CallStruct(vocab=vocab_size, mode=CHOOSE, stream=COUPLED_STREAM)
        self._tells_logprobs = logprobs
        self._params: list[SamplingParams] = []
        """Of the last call's rows."""
        self._filters: list[array[Any]] = []
        self._edits: list[array[Any]] = []
        self._edited_by_params = False
        self._grow(1)

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        self._seeds, self._positions = _Column("Q", capacity), _Column("q", capacity)
        self._temperatures, self._tokens = _Column("d", capacity), _Column("i", capacity)
        self._logprobs, self._finite = _Column("d", COLUMNS * capacity), _Column("B", capacity)
        call = self.call
        call.seeds, call.positions = self._seeds.address, self._positions.address
        call.temperatures, call.tokens = self._temperatures.address, self._tokens.address
        call.logprobs = self._logprobs.address if self._tells_logprobs else None
        call.finite = self._finite.address
        self._params = []

    def fill(self, rows: Sequence[TargetRow]) -> None:
        """Tell the call its rows. Raises ``ValueError`` for edits of ids outside the vocabulary."""
        if len(rows) > self._capacity:
            self._grow(2 * len(rows))
        call = self.call
        call.rows = len(rows)
        params = [row.params for row in rows]
        if params != self._params:
            self._take_params(params)
        self._seeds.put(array("Q", [row.seed & MASK_64 for row in rows]))
        self._positions.put(array("q", [row.position for row in rows]))
        if self._edits:
            call.edit_starts, self._edits = None, []
        if self._edited_by_params or any(row.banned for row in rows):
            self._edits = add_edits(call, edited_rows(rows))

    def _take_params(self, params: list[SamplingParams]) -> None:
        self._temperatures.put(array("d", [p.temperature for p in params]))
        self.call.top_k, self._filters = None, []
        if any(p.has_filters for p in params):
            self._filters = add_filters(self.call, params)
        self._edited_by_params = any(p.logit_bias or p.has_penalties for p in params)
        self._params = params

    def choices(self) -> list[Choice]:
        """Return what the call chose, once it ran."""
        rows: int = self.call.rows
        logprobs = self._logprobs.numbers[: COLUMNS * rows]
        return choices_of(self._tokens.numbers[:rows], logprobs, self._finite.numbers[:rows].tobytes())
