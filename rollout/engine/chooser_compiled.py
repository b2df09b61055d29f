"""The compiled chooser: float32 logits on CPU, every row in one call into ``choose.cpp``.

It keeps the same tokens and draws the same noise as ``TorchChooser``; its logprobs agree to about 1e-6,
because it exponentiates in single precision. Bits depend on neither the threads nor the other rows.

Shapes: R rows, V vocabulary.
"""

import ctypes
import math
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.kernels import build
from rollout.engine.chooser_call import (
    CHOOSE,
    COLUMNS,
    PROBS,
    SCORE,
    CallStruct,
    PortStruct,
    call_of,
    choices_of,
)
from rollout.engine.chooser_torch import check_tokens
from rollout.engine.target import Choice, TargetRow

SOURCE = Path(__file__).parent / "native" / "compiled_forward" / "kernels" / "choose.cpp"


class CompiledChooser:
    """Implements ``Chooser`` for float32 logits on CPU.

    Raises ``KernelBuildError`` when the kernels cannot be compiled. Results are the same bits for any
    number of threads and any instruction set; ``defines`` picks another one than the machine's.
    """

    def __init__(self, *, threads: int, defines: tuple[str, ...] = ()) -> None:
        if threads < 1:
            raise ValueError(f"threads must be positive, got {threads}")
        library = build.load(SOURCE, defines=defines)
        library.taildraft_choose.argtypes = [ctypes.POINTER(CallStruct), ctypes.c_void_p]
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

    @property
    def port(self) -> PortStruct:
        """What a compiled call needs to choose on its own, without Python between: valid while this lives."""
        function = ctypes.cast(self._library.taildraft_choose, ctypes.c_void_p)
        return PortStruct(choose=function.value, choosers=self._choosers)

    def choose(
        self, logits_RV: Tensor, rows: Sequence[TargetRow], *, stream: int = 0, logprobs: bool = True
    ) -> list[Choice]:
        """Return argmax of processed logits plus noise per row; see ``Chooser``."""
        tokens = array("i", bytes(4 * len(rows)))
        return self._chosen(logits_RV, rows, tokens, mode=CHOOSE, stream=stream, logprobs=logprobs)

    def score(self, logits_RV: Tensor, rows: Sequence[TargetRow], tokens: Sequence[int]) -> list[Choice]:
        """Return the logprobs of given tokens, one per row; a token the filters dropped has ``-inf``."""
        check_tokens(tokens, rows=len(rows), vocab_size=logits_RV.shape[1])
        return self._chosen(logits_RV, rows, array("i", tokens), mode=SCORE, stream=0, logprobs=True)

    def probs(self, logits_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
        """Return the target distributions, float64; a row ``choose`` would call not finite is NaN."""
        out_RV = torch.empty(logits_RV.shape, dtype=torch.float64)
        finite = bytearray(len(rows))
        call, owned = _call(logits_RV, rows)
        call.probs = out_RV.data_ptr()
        call.mode = PROBS
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
        scores = array("d", bytes(8 * COLUMNS * count))
        call, owned = _call(logits_RV, rows)
        call.tokens = tokens.buffer_info()[0]
        call.logprobs = scores.buffer_info()[0] if logprobs else None
        call.stream = stream
        call.mode = mode
        self._run(call, finite)
        del owned  # the arrays the call pointed into
        return choices_of(tokens, scores, finite)

    def _run(self, call: CallStruct, finite: bytearray) -> None:
        if not finite:
            return
        flags = (ctypes.c_uint8 * len(finite)).from_buffer(finite)
        call.finite = ctypes.addressof(flags)
        self._library.taildraft_choose(ctypes.byref(call), self._choosers)


def _call(logits_RV: Tensor, rows: Sequence[TargetRow]) -> tuple[CallStruct, "list[array[Any]]"]:
    """Return a call without mode and outputs, and the arrays it points into, to be kept until it ran."""
    if logits_RV.dtype != torch.float32 or logits_RV.device.type != "cpu":
        raise ValueError(f"logits must be float32 on cpu, got {logits_RV.dtype} on {logits_RV.device}")
    if logits_RV.dim() != 2 or logits_RV.shape[0] != len(rows) or logits_RV.shape[1] < 1:
        raise ValueError(f"logits of shape {tuple(logits_RV.shape)} for {len(rows)} rows")
    if logits_RV.stride(1) != 1 and logits_RV.shape[1] > 1:
        raise ValueError("logits of one row must lie next to each other")
    call, owned = call_of(rows, vocab_size=logits_RV.shape[1])
    call.logits, call.row_stride = logits_RV.data_ptr(), logits_RV.stride(0)
    return call, owned
