"""The compiled chooser's memory layout: the struct of a call, its arrays over rows, and its address.

``native/kernels/choose.h`` says what each field means.
"""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, ClassVar, Protocol, runtime_checkable

from rollout.engine.target import Chooser, LogitEdits, TargetRow, logit_edits, needs_edits

CHOOSE, SCORE, PROBS = 0, 1, 2
COLUMNS = 4
"""Logprobs per row."""

_MASK_64 = (1 << 64) - 1
_MAX_TOP_K = (1 << 31) - 1


class CallStruct(ctypes.Structure):
    """``choose::Call``."""

    _fields_: ClassVar = [
        ("logits", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("seeds", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("edit_starts", ctypes.c_void_p),
        ("edit_ids", ctypes.c_void_p),
        ("edit_divisors", ctypes.c_void_p),
        ("edit_addends", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("probs", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
        ("stream", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("mode", ctypes.c_int32),
    ]


class PortStruct(ctypes.Structure):
    """``choose::Port``: what another library needs to call a chooser. Valid while that chooser lives."""

    _fields_: ClassVar = [("choose", ctypes.c_void_p), ("choosers", ctypes.c_void_p)]


@runtime_checkable
class _Compiled(Protocol):
    """A chooser that other compiled code can call."""

    @property
    def port(self) -> PortStruct: ...


def port_of(chooser: Chooser) -> PortStruct | None:
    """Return how compiled code calls ``chooser``; None where only Python can."""
    return chooser.port if isinstance(chooser, _Compiled) else None


def call_of(rows: Sequence[TargetRow], *, vocab_size: int) -> tuple[CallStruct, "list[array[Any]]"]:
    """Return a call with all that rows say, and the arrays it points into, to be kept until it ran.

    Logits, mode, stream and outputs are missing; ``seeds`` and ``positions`` are int64, ``temperatures``
    doubles, one per row. Raises ``ValueError`` for edits of ids outside the vocabulary.
    """
    owned: list[array[Any]] = []

    def pointer(kind: str, values: Iterable[float]) -> int:
        owned.append(array(kind, values))
        return owned[-1].buffer_info()[0]

    params = [r.params for r in rows]
    call = CallStruct(
        seeds=pointer("Q", [r.seed & _MASK_64 for r in rows]),
        positions=pointer("q", [r.position for r in rows]),
        temperatures=pointer("d", [p.temperature for p in params]),
        rows=len(rows),
        vocab=vocab_size,
    )
    if any(p.has_filters for p in params):
        call.top_k = pointer("i", [min(p.top_k, _MAX_TOP_K) for p in params])
        call.top_p = pointer("d", [p.top_p for p in params])
        call.min_p = pointer("d", [p.min_p for p in params])
    edited = {i: logit_edits(r) for i, r in enumerate(rows) if needs_edits(r)}
    if edited:
        _check_ids(edited.values(), vocab_size=vocab_size)
        lengths = [len(edited[i].ids) if i in edited else 0 for i in range(len(rows))]
        call.edit_starts = pointer("q", accumulate(lengths, initial=0))
        call.edit_ids = pointer("i", chain.from_iterable(e.ids for e in edited.values()))
        call.edit_divisors = pointer("d", chain.from_iterable(e.divisors for e in edited.values()))
        call.edit_addends = pointer("d", chain.from_iterable(e.addends for e in edited.values()))
    return call, owned


def _check_ids(edits: Iterable[LogitEdits], *, vocab_size: int) -> None:
    if any(e.ids and not (e.ids[0] >= 0 and e.ids[-1] < vocab_size) for e in edits):
        raise ValueError(f"penalties, bias or bans name ids outside the vocabulary of {vocab_size}")
