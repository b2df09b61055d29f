"""Times the choice of tokens alone, on logits the policy gave: its share of a round is a claim of its own."""

import statistics
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

import torch
from torch import Tensor

from rollout.engine.native.engine import NativeEngine
from rollout.engine.target import Chooser, TargetRow
from rollout.types import SamplingParams

REAL_ROWS = 8
"""Different rows of logits; wider calls repeat them, each row in memory of its own, under other noise."""

WAYS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {"topp_topk": {"top_p": 0.95, "top_k": 50}, "penalty": {"repetition_penalty": 1.1}}
)
"""How else users sample than at a temperature alone: what they ask for, by what it is called here."""

CALLS = 5
"""Calls timed, of which the first warms up."""


class ChoosingClock:
    """An engine's chooser and logits for it."""

    def __init__(self, chooser: Chooser, logits_RV: Tensor, *, temperature: float) -> None:
        self._chooser = chooser
        self._logits_RV = logits_RV
        self._temperature = temperature

    def seconds(self, rows: int) -> float:
        """Return the median seconds of choosing one token for each of ``rows`` rows, logprobs included."""
        return self._seconds(
            SamplingParams(temperature=self._temperature, max_tokens=1), [frozenset()] * rows
        )

    def seconds_in(self, way: str, prompts: Sequence[Sequence[int]]) -> float:
        """Return the same of a row per prompt, sampled in one of ``WAYS``; penalties are on its tokens."""
        asked = {"temperature": self._temperature, "max_tokens": 1, **WAYS[way]}
        return self._seconds(SamplingParams.from_mapping(asked), [frozenset(prompt) for prompt in prompts])

    def _seconds(self, params: SamplingParams, seen: Sequence[AbstractSet[int]]) -> float:
        logits_RV = self._logits_RV[: len(seen)]
        wanted = [
            TargetRow(seed=row, position=1, params=params, prompt_tokens=tokens)
            for row, tokens in enumerate(seen)
        ]
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
