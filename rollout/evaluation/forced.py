"""Fixed chains, and choosers whose every choice is the next token of one of them.

So each draft is right, and what a run computed can be laid beside plain decoding of the same text.

Shapes: R rows, V vocabulary, T positions.
"""

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint8, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine.chooser_call import COLUMNS, CallStruct, PortStruct
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.target import Choice, TargetRow
from rollout.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A prompt and the text that is forced after it."""

    tokens: tuple[int, ...]
    prompt_tokens: int

    @property
    def fed(self) -> tuple[int, ...]:
        """Every token that is computed: all but the last, which ends the text."""
        return self.tokens[:-1]

    @property
    def chosen_after(self) -> range:
        """Positions after which a token of the text was chosen."""
        return range(self.prompt_tokens - 1, len(self.tokens) - 1)


class ForcedChooser:
    """Implements ``Chooser``: the choice after a position is the chain's next token, whatever the logits.

    A row's seed is the number of its chain.
    """

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._chains = chains
        self._reference = TorchChooser()

    def choose(
        self, logits_RV: Tensor, rows: Sequence[TargetRow], *, stream: int = 0, logprobs: bool = True
    ) -> list[Choice]:
        """Return the tokens of the rows' chains."""
        chains = [self._chains[row.seed].tokens for row in rows]
        return self.score(logits_RV, rows, [c[row.position] for c, row in zip(chains, rows, strict=True)])

    def score(self, logits_RV: Tensor, rows: Sequence[TargetRow], tokens: Sequence[int]) -> list[Choice]:
        """Return the reference chooser's."""
        return self._reference.score(logits_RV, rows, tokens)

    def probs(self, logits_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
        """Return the reference chooser's."""
        return self._reference.probs(logits_RV, rows)


_Choosing = ctypes.CFUNCTYPE(None, POINTER(CallStruct), c_void_p)
"""``choose::Port::choose``."""


class ForcedPort:
    """Implements ``Chooser`` for compiled calls, which find it at an address as they find the real one.

    It forces as ``ForcedChooser`` does and keeps the logits of the target's choices: those that logprobs are
    wanted of. Asked from Python it refuses, for then a round was no compiled call.
    """

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._chains = chains
        self._logits: dict[tuple[int, int], Tensor] = {}
        self._error: Exception | None = None
        self._function = _Choosing(self._answer)  # the address lives as long as this does
        self.port = PortStruct(choose=ctypes.cast(self._function, c_void_p).value)

    def logits(self, chain: int, positions: range) -> Tensor:
        """Return the target's logits (T, V) after these positions. Raises ``LookupError``."""
        return torch.stack([self._logits[chain, position] for position in positions])

    def check(self) -> None:
        """Raise what went wrong in a call, which could not raise it itself."""
        if self._error is not None:
            raise self._error

    def _answer(self, call: "ctypes._Pointer[CallStruct]", _: int | None) -> None:
        try:
            self._force(call.contents)
        except Exception as error:  # noqa: BLE001 - there is no Python above this that could take it
            self._error = error

    def _force(self, call: CallStruct) -> None:
        rows, vocab = call.rows, call.vocab
        seeds = (c_int64 * rows).from_address(call.seeds)
        positions = (c_int64 * rows).from_address(call.positions)
        tokens = (c_int32 * rows).from_address(call.tokens)
        finite = (c_uint8 * rows).from_address(call.finite)
        for row in range(rows):
            finite[row] = 0
        for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            logits_V = floats_at(call.logits + row * call.row_stride * ctypes.sizeof(c_float), vocab)
            tokens[row] = self._chains[seed].tokens[position]
            finite[row] = math.isfinite(float(logits_V.sum()))
            if call.logprobs:
                self._logits[seed, position - 1] = logits_V
        if call.logprobs:
            ctypes.memset(call.logprobs, 0, rows * COLUMNS * ctypes.sizeof(c_double))

    def choose(
        self, logits_RV: Tensor, rows: Sequence[TargetRow], *, stream: int = 0, logprobs: bool = True
    ) -> list[Choice]:
        """Refuse."""
        raise _no_compiled_call()

    def score(self, logits_RV: Tensor, rows: Sequence[TargetRow], tokens: Sequence[int]) -> list[Choice]:
        """Refuse."""
        raise _no_compiled_call()

    def probs(self, logits_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
        """Refuse."""
        raise _no_compiled_call()


def floats_at(address: int, count: int) -> Tensor:
    """Return a copy of float32 numbers (count,) that a compiled call points at."""
    return torch.frombuffer((c_float * count).from_address(address), dtype=torch.float32).clone()


def _no_compiled_call() -> UnsupportedError:
    return UnsupportedError("a token was chosen in Python where compiled calls are what is evaluated")
