"""Forwards timed alone, again and again, at the rows that rounds have: what the cost law is fed with.

What counts is the time a forward computes, as it tells it itself; where it does not, the time of the call.
What calls cost beside belongs to the round that makes them.

Shapes: M rows, D hidden.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from controller.types import POLICY
from drafters.wavefront import WAVEFRONT
from rollout.engine.native.decoder import Decoder, ForwardResult
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.pages import pages_for
from rollout.engine.native.pass_clock import wait_for
from rollout.engine.native.rows import RowBatch
from rollout.errors import CapacityError
from rollout.evaluation.cost_law import deep_of, depth_of, fill_of

CALLS = 4
"""Timed in a row, so that they find the caches as a run's rounds do."""

PAUSE_S = 0.0003
"""Before each call, busy: the kernels' threads fall asleep meanwhile, as they do between a round's forwards,
and waking them is part of what a forward takes there."""


class ForwardTimes:
    """Times by part and rows, at one concurrency and context: implements ``cost_law.Prices``."""

    def __init__(
        self,
        engine: NativeEngine,
        decoder: Decoder,
        *,
        concurrency: int,
        context_tokens: int,
        rows: Sequence[int],
        lane_depth: int = 1,
    ) -> None:
        """``rows`` are timed, and between them cost is a line. Lanes propose after ``lane_depth`` loops."""
        self._engine, self._decoder = engine, decoder
        self._concurrency, self._context = concurrency, context_tokens
        self._rows = tuple(rows)
        # Of a sequence's lanes two come to a readout every ``lane_depth`` passes: choice and proposal.
        self._lane_heads = 2 / (lane_depth * math.ceil(decoder.spec.loops / lane_depth))
        each = pages_for(context_tokens + -(-max(rows) // concurrency))
        self._storage = decoder.new_storage(each * concurrency)
        self._table_SP = torch.arange(each * concurrency, dtype=torch.int32).reshape(concurrency, each)
        self.seconds: dict[tuple[str, int], list[float]] = {}

    def sample(self, parts: Sequence[str]) -> None:
        """Time every part at all rows, a few times after a call that does not count; only when idle."""
        for part in parts:
            self._sample(part, partial(self._taken_s, part))
            depth = depth_of(part)
            if depth:
                self._sample(fill_of(part), partial(self._fill_s, depth))
                self._sample(deep_of(part), partial(self._deep_s, depth))

    def _sample(self, part: str, taken_s: Callable[[int], float]) -> None:
        for rows in self._rows:
            try:
                taken_s(rows)
            except CapacityError:
                break  # more rows need more pages still
            self.seconds.setdefault((part, rows), []).extend(taken_s(rows) for _ in range(CALLS))

    def forward_s(self, part: str, rows: float) -> float:
        """Return the seconds of one forward of ``rows`` rows. Raises ``KeyError`` for a part never timed."""
        known = sorted(r for name, r in self.seconds if name == part)
        if not known:
            raise KeyError(part)
        medians = [statistics.median(self.seconds[part, r]) for r in known]
        return float(np.interp(rows, known, medians))

    def _taken_s(self, part: str, rows: int) -> float:
        decoder, batch = self._decoder, self._batch(rows)
        if part == WAVEFRONT:
            loop_M = torch.arange(rows, dtype=torch.int32) % decoder.spec.loops
            heads = max(1, round(self._lane_heads * rows))
            lanes = replace(batch, head_rows_R=batch.head_rows_R[:heads])
            states_MD = decoder.embed(batch.token_ids_M)
            _pause()
            started = time.perf_counter()
            return _computing_s(decoder.advance(states_MD, lanes, self._storage, loop_M=loop_M), started)
        depth = decoder.spec.loops if part == POLICY else depth_of(part)
        _pause()
        if depth:
            started = time.perf_counter()
            return _computing_s(decoder.forward(batch, self._storage, loops=range(depth)), started)
        sequences = min(rows, self._concurrency)
        return self._engine.time_forward(part, rows=rows, context_tokens=self._context, sequences=sequences)

    def _fill_s(self, depth: int, rows: int) -> float:
        """Return the seconds of the first loops without the head."""
        batch = replace(self._batch(rows), head_rows_R=torch.empty(0, dtype=torch.int32))
        _pause()
        started = time.perf_counter()
        return _computing_s(self._decoder.forward(batch, self._storage, loops=range(depth)), started)

    def _deep_s(self, depth: int, rows: int) -> float:
        """Return the seconds of the loops beyond, from given states, and the head."""
        batch, loops = self._batch(rows), range(depth, self._decoder.spec.loops)
        states_MD = self._decoder.embed(batch.token_ids_M)
        _pause()
        started = time.perf_counter()
        result = self._decoder.forward(batch, self._storage, loops=loops, hidden_MD=states_MD)
        return _computing_s(result, started)

    def _batch(self, rows: int) -> RowBatch:
        """Return rows spread over as many sequences as there are, each at the context's end."""
        row_M = torch.arange(rows, dtype=torch.int32)
        per_sequence = -(-rows // self._concurrency)
        return RowBatch(
            token_ids_M=row_M % self._decoder.spec.vocab_size,
            positions_M=self._context - 1 + row_M % per_sequence,
            table_M=row_M // per_sequence,
            page_table_SP=self._table_SP,
            head_rows_R=row_M,
        )


def _pause() -> None:
    until_s = time.perf_counter() + PAUSE_S
    while time.perf_counter() < until_s:
        pass


def _computing_s(result: ForwardResult, started_s: float) -> float:
    wait_for(result.logits_RV)
    taken_s = time.perf_counter() - started_s
    return taken_s if result.seconds is None else result.seconds.total_s


def timed_rows(concurrency: int, gammas: Sequence[int], *, most_lanes: int) -> tuple[int, ...]:
    """Return the rows that rounds at a concurrency have, and those as the last sequences run out."""
    most = max([*(gamma + 1 for gamma in gammas), most_lanes])
    per_sequence = {1, *(gamma + 1 for gamma in gammas), *range(1, most_lanes + 1)}
    rows = {concurrency * each for each in per_sequence} | {1, max(1, concurrency // 2), concurrency * most}
    return tuple(sorted(rows))
