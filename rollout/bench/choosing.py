"""Times the choice of tokens alone, on logits the policy gave: its share of a round is a claim of its own."""

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.engine.native.engine import NativeEngine
from rollout.engine.target import Chooser, TargetRow
from rollout.types import SamplingParams

REAL_ROWS = 8
"""Different rows of logits; wider calls repeat them, each row in memory of its own, under other noise."""

CALLS = 5
"""Calls timed, of which the first warms up."""


class ChoosingClock:
    """An engine's chooser and logits for it."""

    def __init__(self, chooser: Chooser, logits_RV: Tensor, *, temperature: float) -> None:
        self._chooser = chooser
        self._logits_RV = logits_RV
        params = SamplingParams(temperature=temperature, max_tokens=1)
        self._rows = [TargetRow(seed=row, position=1, params=params) for row in range(len(logits_RV))]

    def seconds(self, rows: int) -> float:
        """Return the median seconds of choosing one token for each of ``rows`` rows, logprobs included."""
        logits_RV, wanted = self._logits_RV[:rows], self._rows[:rows]
        times = []
        for _ in range(CALLS):
            started = time.perf_counter()
            self._chooser.choose(logits_RV, wanted)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])


def logits_of(engine: NativeEngine, prompts: Sequence[Sequence[int]], *, rows: int) -> Tensor:
    """Return float32 logits (rows, V): what the idle engine's policy says after the prompts, repeated."""
    real = torch.stack([engine.logits_after(prompt).float() for prompt in prompts])
    return real[torch.arange(rows) % len(real)].contiguous()
