"""Proposals made right or wrong at will: every place where a draft or a lane can fall, whatever is drafted.

A ``ForcedChooser`` stands where an engine's chooser stands. The target's own choices pass through it. A
proposal, which is a choice that nobody asks the logprobs of, becomes the token of a known text, or another
one at the positions declared wrong. Passes that run in one compiled call choose through a port, which leads
here as well; so the very code that serves is forced, and goes on from the wrong tokens as it would.

Lanes that Python advances choose proposals in one call with the target's choices where the vocabulary is
small (``lane_passes.ONE_CALL_VOCAB``); set that to 0 to force them.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rollout.engine.chooser_call import MASK_64, CallStruct, PortStruct, port_of
from rollout.engine.target import Choice, Chooser, TargetRow

Alter = Callable[[CallStruct, int], None]
"""Changes what was chosen in a row of a compiled call."""

_PORT = ctypes.CFUNCTYPE(None, ctypes.POINTER(CallStruct), ctypes.c_void_p)


def cell_of(address: int, kind: "type[ctypes._SimpleCData[int]]", row: int) -> "ctypes.Array[Any]":
    """Return an array of one that is row ``row`` of the array of ``kind`` at ``address``."""
    return (kind * 1).from_address(address + row * ctypes.sizeof(kind))


def is_proposal(call: CallStruct) -> bool:
    """Whether a compiled call chooses drafts: nobody asks for their logprobs."""
    return call.logprobs is None


class AlteredPort:
    """A chooser's port behind which every row that was chosen passes ``alter``; valid while this lives."""

    def __init__(self, port: PortStruct, alter: Alter) -> None:
        choose = _PORT(port.choose)

        def chosen(call: "ctypes._Pointer[CallStruct]", choosers: int) -> None:
            choose(call, choosers)
            for row in range(call.contents.rows):
                alter(call.contents, row)

        self._callback = _PORT(chosen)
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        self.port = PortStruct(choose=address, choosers=port.choosers)


@dataclass(kw_only=True, slots=True)
class DraftScript:
    """What is proposed at which position of which text."""

    texts: Mapping[int, Sequence[int]]
    """By the request's seed: its prompt and all that plain decoding makes of it."""

    vocab_size: int
    wrong: dict[int, set[int]] = field(default_factory=dict)
    """By seed: positions at which a token is proposed that is not the text's."""

    proposals: int = 0
    """How many were replaced, or found to be right."""

    def token(self, seed: int, position: int, chosen: int) -> int:
        """Return what to propose at ``position`` instead of ``chosen``, which stands beyond a text's end."""
        text = self.texts[seed & MASK_64]
        if position >= len(text):
            return chosen
        self.proposals += 1
        wrong = position in self.wrong.get(seed & MASK_64, ())
        return (text[position] + wrong) % self.vocab_size


class ForcedChooser:
    """Implements ``Chooser`` with another one, proposals by a script. Its port is there if the other's is."""

    def __init__(self, inner: Chooser, script: DraftScript) -> None:
        self._inner = inner
        self._script = script
        port = port_of(inner)
        self._altered = None if port is None else AlteredPort(port, self._alter)
        self.port = None if self._altered is None else self._altered.port

    def choose(
        self, logits_RV: Tensor, rows: Sequence[TargetRow], *, stream: int = 0, logprobs: bool = True
    ) -> list[Choice]:
        """Return the other's choices, or the script's where they are proposals."""
        choices = self._inner.choose(logits_RV, rows, stream=stream, logprobs=logprobs)
        if logprobs:
            return choices
        return [
            choice._replace(token=self._script.token(row.seed, row.position, choice.token))
            for choice, row in zip(choices, rows, strict=True)
        ]

    def score(self, logits_RV: Tensor, rows: Sequence[TargetRow], tokens: Sequence[int]) -> list[Choice]:
        """Return the other's scores."""
        return self._inner.score(logits_RV, rows, tokens)

    def probs(self, logits_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
        """Return the other's distributions."""
        return self._inner.probs(logits_RV, rows)

    def _alter(self, call: CallStruct, row: int) -> None:
        if not is_proposal(call):
            return
        seed = cell_of(call.seeds, ctypes.c_uint64, row)[0]
        position = cell_of(call.positions, ctypes.c_int64, row)[0]
        token = cell_of(call.tokens, ctypes.c_int32, row)
        token[0] = self._script.token(seed, position, token[0])
