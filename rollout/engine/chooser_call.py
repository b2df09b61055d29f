"""The compiled chooser's memory layout: the struct of a call, its arrays over rows, its results, its address.

``native/compiled_forward/kernels/choose.h`` says what each field means.
"""

import ctypes
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import Any, ClassVar, Protocol, runtime_checkable

from rollout.engine.target import Choice, Chooser, LogitEdits, TargetRow, logit_edits, needs_edits
from rollout.types import SamplingParams

CHOOSE, SCORE, PROBS = 0, 1, 2
COLUMNS = 4
"""Logprobs per row."""

NOT_FINITE = Choice(
    token=0, raw_logprob=0.0, scaled_logprob=0.0, target_logprob=0.0, kept_logmass=0.0, finite=False
)
"""Stands where a row's distribution cannot be formed."""

MASK_64 = (1 << 64) - 1
"""Seeds are taken modulo 2 ** 64."""

MAX_TOP_K = (1 << 31) - 1


class SecondStruct(ctypes.Structure):
    """``choose::Second``."""

    _fields_: ClassVar = [
        ("look", ctypes.c_void_p),
        ("self", ctypes.c_void_p),
        ("tokens", ctypes.c_int32),
    ]


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
        ("second", SecondStruct),
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


def choices_of(tokens: Sequence[int], logprobs: Sequence[float], finite: bytes | bytearray) -> list[Choice]:
    """Return what a call chose: ``logprobs`` hold ``COLUMNS`` numbers a row, ``finite`` a flag."""
    columns = [logprobs[column::COLUMNS] for column in range(COLUMNS)]
    choices = list(map(Choice, tokens, *columns, repeat(True)))
    if 0 in finite:
        return [choice if ok else NOT_FINITE for choice, ok in zip(choices, finite, strict=True)]
    return choices


def call_of(rows: Sequence[TargetRow], *, vocab_size: int) -> tuple[CallStruct, "list[array[Any]]"]:
    """Return a call with all that rows say, and the arrays it points into, to be kept until it ran.

    Logits, mode, stream and outputs are missing; ``seeds`` and ``positions`` are int64, ``temperatures``
    doubles, one per row. Raises ``ValueError`` for edits of ids outside the vocabulary.
    """
    params = [r.params for r in rows]
    owned: list[array[Any]] = [
        array("Q", [r.seed & MASK_64 for r in rows]),
        array("q", [r.position for r in rows]),
        array("d", [p.temperature for p in params]),
    ]
    seeds, positions, temperatures = (column.buffer_info()[0] for column in owned)
    call = CallStruct(
        seeds=seeds, positions=positions, temperatures=temperatures, rows=len(rows), vocab=vocab_size
    )
    if any(p.has_filters for p in params):
        owned += add_filters(call, params)
    owned += add_edits(call, edited_rows(rows))
    return call, owned


def add_filters(call: CallStruct, params: Sequence[SamplingParams]) -> "list[array[Any]]":
    """Add every row's filters, and return the arrays the call now points into."""
    top_k = array("i", [min(p.top_k, MAX_TOP_K) for p in params])
    top_p, min_p = array("d", [p.top_p for p in params]), array("d", [p.min_p for p in params])
    call.top_k, call.top_p, call.min_p = (column.buffer_info()[0] for column in (top_k, top_p, min_p))
    return [top_k, top_p, min_p]


def edited_rows(rows: Iterable[TargetRow]) -> dict[int, TargetRow]:
    """Return the rows that have penalties, bias or bans, by their number."""
    return {i: row for i, row in enumerate(rows) if needs_edits(row)}


def add_edits(call: CallStruct, rows: Mapping[int, TargetRow]) -> "list[array[Any]]":
    """Add edits of some of the call's rows, by number, ascending; return the arrays it now points into.

    Raises ``ValueError`` for ids outside the vocabulary.
    """
    if not rows:
        return []
    edited = {i: logit_edits(row) for i, row in rows.items()}
    _check_ids(edited.values(), vocab_size=call.vocab)
    lengths = [len(edited[i].ids) if i in edited else 0 for i in range(call.rows)]
    starts = array("q", accumulate(lengths, initial=0))
    ids = array("i", chain.from_iterable(e.ids for e in edited.values()))
    divisors = array("d", chain.from_iterable(e.divisors for e in edited.values()))
    addends = array("d", chain.from_iterable(e.addends for e in edited.values()))
    call.edit_starts, call.edit_ids = starts.buffer_info()[0], ids.buffer_info()[0]
    call.edit_divisors, call.edit_addends = divisors.buffer_info()[0], addends.buffer_info()[0]
    return [starts, ids, divisors, addends]


def _check_ids(edits: Iterable[LogitEdits], *, vocab_size: int) -> None:
    if any(e.ids and not (e.ids[0] >= 0 and e.ids[-1] < vocab_size) for e in edits):
        raise ValueError(f"penalties, bias or bans name ids outside the vocabulary of {vocab_size}")
