"""What forwards and token choices of a round took. The clocks are read around calls, never inside them.

A compiled call that both computes and chooses tells its parts itself.

An accelerator computes while Python goes on, so a forward counts until its logits are there.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from controller.types import ForwardSeconds, PassSeconds
from rollout.engine.chooser_call import port_of
from rollout.engine.native.decoder import Decoder, ForwardResult, KVStorage
from rollout.engine.native.rows import RowBatch
from rollout.engine.target import Choice, Chooser, TargetRow

NOTHING_RUN = PassSeconds(forward_s=0.0, choose_s=0.0)
"""What no forward took."""


class PassClock:
    """Adds up seconds until they are taken. An engine has one, and its drafters' forwards run on it too."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._forward_s = self._choose_s = 0.0
        self._split: list[ForwardSeconds] = []
        self._forwards = 0

    def forward(
        self,
        decoder: Decoder,
        batch: RowBatch,
        storage: KVStorage,
        *,
        loops: range | None = None,
        hidden_MD: Tensor | None = None,
        states: bool = True,
    ) -> ForwardResult:
        """Return what ``Decoder.forward`` does, computed to its end."""
        started = time.perf_counter()
        result = decoder.forward(batch, storage, loops=loops, hidden_MD=hidden_MD, states=states)
        return self._counted(result, started)

    def advance(
        self, decoder: Decoder, hidden_MD: Tensor, batch: RowBatch, storage: KVStorage, *, loop_M: Tensor
    ) -> ForwardResult:
        """Return what ``Decoder.advance`` does, computed to its end; it counts as a forward."""
        started = time.perf_counter()
        return self._counted(decoder.advance(hidden_MD, batch, storage, loop_M=loop_M), started)

    def timed(self, forward: Callable[[], ForwardResult]) -> ForwardResult:
        """Return what ``forward`` does, computed to its end; it counts as one forward."""
        started = time.perf_counter()
        return self._counted(forward(), started)

    def _counted(self, result: ForwardResult, started_s: float) -> ForwardResult:
        """Return ``result`` once it has been computed, with its time counted."""
        wait_for(result.logits_RV)
        self._forward_s += time.perf_counter() - started_s
        self._forwards += 1
        if result.seconds is not None:
            self._split.append(result.seconds)
        return result

    def chained(self, split: ForwardSeconds, choose_s: float) -> None:
        """Count forwards that told what they spent their time on, and the choices between them."""
        self._forward_s += split.linears_s + split.attention_s + split.head_s + split.rest_s
        self._forwards += 1
        self._split.append(split)
        self._choose_s += choose_s

    def chose(self, seconds: float) -> None:
        """Count a choice of tokens."""
        self._choose_s += seconds

    def take(self) -> PassSeconds:
        """Return what was counted since the last call. The split is None unless every forward told it."""
        told = self._split if self._split and len(self._split) == self._forwards else None
        taken = PassSeconds(
            forward_s=self._forward_s,
            choose_s=self._choose_s,
            split=None if told is None else _sum(told),
        )
        self._clear()
        return taken


class TimedChooser:
    """Implements ``Chooser`` with another one, and counts on a clock what its calls take."""

    def __init__(self, chooser: Chooser, clock: PassClock) -> None:
        self._chooser = chooser
        self._clock = clock
        self.port = port_of(chooser)
        """How compiled code calls the other one, None where it cannot; such calls are not counted here."""

    def choose(
        self, logits_RV: Tensor, rows: Sequence[TargetRow], *, stream: int = 0, logprobs: bool = True
    ) -> list[Choice]:
        """See ``Chooser``."""
        started = time.perf_counter()
        choices = self._chooser.choose(logits_RV, rows, stream=stream, logprobs=logprobs)
        self._clock.chose(time.perf_counter() - started)
        return choices

    def score(self, logits_RV: Tensor, rows: Sequence[TargetRow], tokens: Sequence[int]) -> list[Choice]:
        """See ``Chooser``."""
        started = time.perf_counter()
        choices = self._chooser.score(logits_RV, rows, tokens)
        self._clock.chose(time.perf_counter() - started)
        return choices

    def probs(self, logits_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
        """See ``Chooser``."""
        started = time.perf_counter()
        probs_RV = self._chooser.probs(logits_RV, rows)
        self._clock.chose(time.perf_counter() - started)
        return probs_RV


def wait_for(tensor: Tensor) -> None:
    """Return once ``tensor`` has been computed; on a CPU it has."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _sum(parts: Sequence[ForwardSeconds]) -> ForwardSeconds:
    if len(parts) == 1:
        return parts[0]
    return ForwardSeconds(
        linears_s=sum(p.linears_s for p in parts),
        attention_s=sum(p.attention_s for p in parts),
        head_s=sum(p.head_s for p in parts),
        rest_s=sum(p.rest_s for p in parts),
    )
