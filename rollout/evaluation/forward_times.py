"""Forwards timed alone, again and again, at the rows that rounds have: what the cost law is fed with.

What counts is the time a forward computes, as it tells it itself; where it does not, the time of the call.
What calls cost beside belongs to the round that makes them.

A forward finds the caches as a round's does. Arms in lockstep take turns, each over keys and values of its
own, so what an arm left there is gone by its next round. A plain round is one such forward; of drafts or
passes of lanes only the first is, which is timed as a part of its own. Those after it, the fill and the deep
loops follow on its pages.

Shapes: M rows, D hidden.
"""

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle

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
from rollout.evaluation.cost_law import deep_of, depth_of, fill_of, first_of

CALLS = 4
"""Turns of a sample, and drafts or passes of lanes in a row within one, as a round has them."""

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
        arms: int = 1,
    ) -> None:
        """``rows`` are timed, and between them cost is a line. Lanes propose after ``lane_depth`` loops; so
        many ``arms`` take turns.
        """
        self._engine, self._decoder = engine, decoder
        self._concurrency, self._context = concurrency, context_tokens
        self._rows = tuple(rows)
        # Of a sequence's lanes two come to a readout every ``lane_depth`` passes: choice and proposal.
        self._lane_heads = 2 / (lane_depth * math.ceil(decoder.spec.loops / lane_depth))
        each = pages_for(context_tokens + -(-max(rows) // concurrency))
        self._storage = decoder.new_storage(each * concurrency * arms)
        self._storage.occupy(range(self._storage.pages))
        pages = torch.arange(each * concurrency * arms, dtype=torch.int32)
        self._tables = cycle(pages.reshape(arms, concurrency, each).unbind())
        self._table_SP = next(self._tables)
        self.seconds: dict[tuple[str, int], list[float]] = {}

    def sample(self, parts: Sequence[str]) -> None:
        """Time every part at the rows it may have, a few times, parts and rows in turn; only when idle.

        Of a shallow drafter a draft and the fill have a row per sequence, the deep loops any number.
        """
        for _ in range(CALLS):
            for rows in self._rows:
                for part in parts:
                    self._table_SP = next(self._tables)
                    self._sample(part, rows)

    def _sample(self, part: str, rows: int) -> None:
        depth = depth_of(part)
        if not depth:
            with suppress(CapacityError):  # there are too few pages for so many rows
                if part == POLICY:
                    self._add(part, rows, [self._taken_s(part, rows)])
                else:
                    self._sample_in_a_row(part, rows)
            return
        if rows <= self._concurrency:
            self._sample_in_a_row(part, rows)
            self._add(fill_of(part), rows, [self._fill_s(depth, rows)])
        self._add(deep_of(part), rows, [self._deep_s(depth, rows)])

    def _sample_in_a_row(self, part: str, rows: int) -> None:
        first, *after = [self._taken_s(part, rows) for _ in range(CALLS)]
        self._add(first_of(part), rows, [first])
        self._add(part, rows, after)

    def _add(self, part: str, rows: int, seconds: Sequence[float]) -> None:
        self.seconds.setdefault((part, rows), []).extend(seconds)

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
