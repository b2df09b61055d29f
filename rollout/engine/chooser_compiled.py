"""The compiled chooser: float32 logits on CPU, every row in one call into ``native/kernels/choose.cpp``.

It keeps the same tokens and draws the same noise as ``TorchChooser``; its logprobs agree to about 1e-6,
because it exponentiates in single precision. Bits depend on neither the threads nor the other rows.

Shapes: R rows, V vocabulary.
"""

import ctypes
import math
import weakref
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafters.kernels import build
from rollout.engine.chooser_torch import check_tokens
from rollout.engine.target import Choice, LogitEdits, TargetRow, logit_edits, needs_edits

SOURCE = Path(__file__).parent / "native" / "kernels" / "choose.cpp"

_CHOOSE, _SCORE, _PROBS = 0, 1, 2
_COLUMNS = 4
_MASK_64 = (1 << 64) - 1
_MAX_TOP_K = (1 << 31) - 1

_NOT_FINITE = Choice(
    token=0, raw_logprob=0.0, scaled_logprob=0.0, target_logprob=0.0, kept_logmass=0.0, finite=False
)


class _Call(ctypes.Structure):
    """``choose::Call`` of choose.h, field by field."""

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


class CompiledChooser:
    """Implements ``Chooser`` for float32 logits on CPU.

    Raises ``KernelBuildError`` when the kernels cannot be compiled. Results are the same bits for any
    number of threads and any instruction set; ``defines`` picks another one than the machine's.
    """

    def __init__(self, *, threads: int, defines: tuple[str, ...] = ()) -> None:
        if threads < 1:
            raise ValueError(f"threads must be positive, got {threads}")
        library = build.load(SOURCE, defines=defines)
        library.taildraft_choose.argtypes = [ctypes.POINTER(_Call), ctypes.c_void_p]
        library.taildraft_choose.restype = None
        library.taildraft_choosers_new.argtypes = [ctypes.c_int32]
        library.taildraft_choosers_new.restype = ctypes.c_void_p
        library.taildraft_choosers_free.argtypes = [ctypes.c_void_p]
        library.taildraft_choosers_free.restype = None
        self._library = library
        self._choosers = library.taildraft_choosers_new(threads)
        if self._choosers is None:
            raise OSError(f"the chooser could not start {threads - 1} more threads")
        weakref.finalize(self, library.taildraft_choosers_free, self._choosers)

    def choose(
        self, logits_RV: Tensor, rows: Sequence[TargetRow], *, stream: int = 0, logprobs: bool = True
    ) -> list[Choice]:
        """Return argmax of processed logits plus noise per row; see ``Chooser``."""
        tokens = array("i", bytes(4 * len(rows)))
        return self._chosen(logits_RV, rows, tokens, mode=_CHOOSE, stream=stream, logprobs=logprobs)

    def score(self, logits_RV: Tensor, rows: Sequence[TargetRow], tokens: Sequence[int]) -> list[Choice]:
        """Return the logprobs of given tokens, one per row; a token the filters dropped has ``-inf``."""
        check_tokens(tokens, rows=len(rows), vocab_size=logits_RV.shape[1])
        return self._chosen(logits_RV, rows, array("i", tokens), mode=_SCORE, stream=0, logprobs=True)

    def probs(self, logits_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
        """Return the target distributions, float64; a row ``choose`` would call not finite is NaN."""
        out_RV = torch.empty(logits_RV.shape, dtype=torch.float64)
        finite = bytearray(len(rows))
        call, owned = _call(logits_RV, rows)
        call.probs = out_RV.data_ptr()
        call.mode = _PROBS
        self._run(call, finite)
        del owned  # the arrays the call pointed into
        for row, ok in enumerate(finite):
            if not ok:
                out_RV[row] = math.nan
        return out_RV

    def _chosen(
        self,
        logits_RV: Tensor,
        rows: Sequence[TargetRow],
        tokens: "array[int]",
        *,
        mode: int,
        stream: int,
        logprobs: bool,
    ) -> list[Choice]:
        count = len(rows)
        finite = bytearray(count)
        scores = array("d", bytes(8 * _COLUMNS * count))
        call, owned = _call(logits_RV, rows)
        call.tokens = tokens.buffer_info()[0]
        call.logprobs = scores.buffer_info()[0] if logprobs else None
        call.stream = stream
        call.mode = mode
        self._run(call, finite)
        del owned  # the arrays the call pointed into
        return [
            Choice(
                token=token,
                raw_logprob=raw,
                scaled_logprob=scaled,
                target_logprob=target,
                kept_logmass=kept,
                finite=True,
            )
            if ok
            else _NOT_FINITE
            for token, raw, scaled, target, kept, ok in zip(
                tokens, scores[0::4], scores[1::4], scores[2::4], scores[3::4], finite, strict=True
            )
        ]

    def _run(self, call: _Call, finite: bytearray) -> None:
        if not finite:
            return
        flags = (ctypes.c_uint8 * len(finite)).from_buffer(finite)
        call.finite = ctypes.addressof(flags)
        self._library.taildraft_choose(ctypes.byref(call), self._choosers)


def _call(logits_RV: Tensor, rows: Sequence[TargetRow]) -> tuple[_Call, list["array[Any]"]]:
    """Return a call without mode and outputs, and the arrays it points into, to be kept until it ran."""
    if logits_RV.dtype != torch.float32 or logits_RV.device.type != "cpu":
        raise ValueError(f"logits must be float32 on cpu, got {logits_RV.dtype} on {logits_RV.device}")
    if logits_RV.dim() != 2 or logits_RV.shape[0] != len(rows) or logits_RV.shape[1] < 1:
        raise ValueError(f"logits of shape {tuple(logits_RV.shape)} for {len(rows)} rows")
    if logits_RV.stride(1) != 1 and logits_RV.shape[1] > 1:
        raise ValueError("logits of one row must lie next to each other")
    owned: list[array[Any]] = []

    def pointer(kind: str, values: Iterable[float]) -> int:
        owned.append(array(kind, values))
        return owned[-1].buffer_info()[0]

    params = [r.params for r in rows]
    call = _Call(
        logits=logits_RV.data_ptr(),
        row_stride=logits_RV.stride(0),
        seeds=pointer("Q", [r.seed & _MASK_64 for r in rows]),
        positions=pointer("q", [r.position for r in rows]),
        temperatures=pointer("d", [p.temperature for p in params]),
        rows=len(rows),
        vocab=logits_RV.shape[1],
    )
    if any(p.has_filters for p in params):
        call.top_k = pointer("i", [min(p.top_k, _MAX_TOP_K) for p in params])
        call.top_p = pointer("d", [p.top_p for p in params])
        call.min_p = pointer("d", [p.min_p for p in params])
    edited = {i: logit_edits(r) for i, r in enumerate(rows) if needs_edits(r)}
    if edited:
        _check_ids(edited.values(), vocab_size=logits_RV.shape[1])
        lengths = [len(edited[i].ids) if i in edited else 0 for i in range(len(rows))]
        call.edit_starts = pointer("q", accumulate(lengths, initial=0))
        call.edit_ids = pointer("i", chain.from_iterable(e.ids for e in edited.values()))
        call.edit_divisors = pointer("d", chain.from_iterable(e.divisors for e in edited.values()))
        call.edit_addends = pointer("d", chain.from_iterable(e.addends for e in edited.values()))
    return call, owned


def _check_ids(edits: Iterable[LogitEdits], *, vocab_size: int) -> None:
    if any(e.ids and not (e.ids[0] >= 0 and e.ids[-1] < vocab_size) for e in edits):
        raise ValueError(f"penalties, bias or bans name ids outside the vocabulary of {vocab_size}")
