"""What a round costs: the roofline of every part, kept true by the rounds themselves.

A forward of a part is the linears' max(bytes / bandwidth, flops / rate), plus attention's, plus
overhead(rows): see ``roofline.py``. Rows of one sequence read its keys once (bytes) but each computes its own
attention (flops). Two machine parameters, bandwidth and rate, are followed online, each by the policy's
forwards that are bound by it for the most part. A drafter that is dearer or cheaper than calibrated beside
that has a factor of its own, learnt where both speak of the same parameter. What stays wrong for one shape
goes to a residual table, so that plain and speculative rounds stay comparable. A calibration wrong by a
factor of two, in any of the three ways, is corrected within about a hundred rounds.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.reuse import NOTHING_REUSED, Reused, reused_by, shares_of
from controller.roofline import STEPS_ROWS, Part
from controller.tracking import FactorTracker, LineTracker
from controller.trust import Timing
from controller.types import (
    AR,
    POLICY,
    Assignment,
    DraftCost,
    PartShape,
    RoundFacts,
    RoundLoad,
    SequenceOutcome,
)

Floats = NDArray[np.float64]

LEAST_MAIN_FRAC = 0.2
"""A forward faster than its own overhead still tells the machine is no more than this much faster."""


SPEAKS_FRAC = 0.5
"""Share of a drafter's calibrated time that must be moving or computing for it to speak of the machine. Where
most is overhead, an overhead a little wrong would pass for a machine that became several times faster."""

NO_LANES: Mapping[str, float] = MappingProxyType({})

PAIRED_ROUNDS = 2
"""Observed rounds after which a word of the policy about the machine no longer tells a drafter's apart."""


class RoundPrediction(NamedTuple):
    """Seconds of the three parts of a round."""

    draft_s: float
    verify_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        """The whole round."""
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLine:
    """Draft cost of one drafter as a line: every pass costs ``pass_s``, every row in it ``row_s``."""

    pass_s: float
    row_s: float
    round_s: float = 0.0
    """Beside the passes, once in a round."""


STEPS_LIMIT = 0.25
"""Largest log correction of a row count by what the calibration measured there."""

LEAST_STEPS = 4
"""Row counts measured below which no steps are read off: that many are the roofline's own parameters."""


class CostModel:
    """Seconds of rounds on one machine. Owned by one controller; nothing else changes it."""

    def __init__(
        self, shapes: Mapping[str, PartShape], calibration: Calibration, config: ControllerConfig
    ) -> None:
        """Raises ``ValueError`` when a part that runs a model has no calibration."""
        if POLICY not in shapes:
            raise ValueError(f"no shape of {POLICY!r}")
        quantile, window = config.cost_quantile, config.cost_window_rounds
        self._parts: dict[str, Part] = {}
        self._free: dict[str, LineTracker] = {}
        for name, shape in shapes.items():
            if name != POLICY and shape.rows_per_draft_token == 0:
                self._free[name] = LineTracker(base_s=0.0, per_row_s=0.0)
            elif name not in calibration.parts:
                raise ValueError(f"calibration {calibration.key!r} has no part {name!r}; calibrate again")
            else:
                self._parts[name] = Part(shape, calibration.parts[name], quantile=quantile, window=window)
        self._reuse = {AR: 0.0, **{name: shape.reuse_frac for name, shape in shapes.items()}}
        self._reuses = any(self._reuse.values())
        self._bandwidth = FactorTracker(quantile=quantile, window=window)
        self._rate = FactorTracker(quantile=quantile, window=window)
        self._other = LineTracker(base_s=calibration.other.base_s, per_row_s=calibration.other.s_per_row)
        self._drafts = calibration.drafts
        self._observed = 0
        self._said: dict[int, deque[tuple[int, float]]] = {0: deque(maxlen=3), 1: deque(maxlen=3)}
        """By parameter, bandwidth and rate: what the policy's latest forwards say, and when."""
        self._machine = calibration.parts[POLICY]
        self._pipelines = {name: shape for name, shape in shapes.items() if shape.lane_loops}
        """Parts that take tokens through the loops of a policy."""
        self._take_steps(calibration.timings)

    def _take_steps(self, timings: Sequence[Timing]) -> None:
        """Learn the steps of the policy's cost over rows from what single forwards took.

        Their mean stays the roofline's: it was fitted to the same forwards.
        """
        wide = [t for t in timings if t.part == POLICY and t.rows == t.sequences]
        shortest = min((t.context_tokens for t in wide), default=0)
        error_of: dict[int, float] = {}
        for t in wide:
            if t.context_tokens == shortest and 1 <= t.rows <= STEPS_ROWS:
                context = float(t.context_tokens * t.rows)
                roofline_s = self.forward_s(
                    POLICY, rows=t.rows, sequences=t.rows, read_tokens=context, context_tokens=context
                )
                error_of[t.rows] = math.log(math.sqrt(t.fastest_s * t.median_s) / roofline_s)
        if len(error_of) < LEAST_STEPS:
            return
        rows = sorted(error_of)
        errors = np.asarray([error_of[r] for r in rows])
        errors = np.clip(errors - errors.mean(), -STEPS_LIMIT, STEPS_LIMIT)
        every = np.arange(1, STEPS_ROWS + 1)
        self._parts[POLICY].steps_R[1:] = np.exp(np.interp(np.log(every), np.log(rows), errors))

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Of the policy's forwards, as last tracked."""
        return self._machine.bandwidth_bytes_per_s / self._bandwidth.slowdown

    @property
    def flops_per_s(self) -> float:
        """Of the policy's forwards, as last tracked."""
        return self._machine.flops_per_s / self._rate.slowdown

    def own_slowdown(self, drafter: str) -> float:
        """How much slower a drafter that runs a model is than calibrated, beside the machine."""
        return self._parts[drafter].own.slowdown

    def runs_model(self, drafter: str) -> bool:
        """Whether drafting with it costs forwards."""
        return drafter in self._parts

    def reuse_frac(self, drafter: str) -> float:
        """Return the share of the policy's forward that a row it drafted from leaves done."""
        return self._reuse[drafter]

    def forward_s(
        self, name: str, *, rows: int, sequences: int, read_tokens: float, context_tokens: float
    ) -> float:
        """Return seconds of one forward.

        ``read_tokens`` is the context of its sequences, each counted once; ``context_tokens`` counts it
        once per row. Raises ``KeyError`` for a part that runs no model.
        """
        part, bandwidth, rate = self._parts[name], self._bandwidth.slowdown, self._rate.slowdown
        main_s = sum(
            [max(m * bandwidth, c * rate) for m, c in part.stages(rows, read_tokens, context_tokens)]
        )
        raw_s = main_s * part.own.slowdown + part.overhead_s(rows)
        return raw_s * part.step(rows) * part.residuals.factor(rows, sequences)

    def verify_s(
        self,
        *,
        rows: int,
        sequences: int,
        read_tokens: float,
        context_tokens: float,
        reused: Mapping[float, Reused] = NOTHING_REUSED,
    ) -> float:
        """Return seconds of the policy's forward, less what drafts have done of it, by share done."""
        return sum(
            share.frac
            * self.forward_s(
                POLICY,
                rows=share.rows,
                sequences=sequences,
                read_tokens=read_tokens,
                context_tokens=share.context_tokens,
            )
            for share in shares_of(rows, context_tokens, reused)
        )

    def reusing_curve_s(
        self,
        rows_N: NDArray[np.intp],
        context_N: Floats,
        *,
        reused_N: NDArray[np.intp],
        reused_context_N: Floats,
        reuse_frac: float,
        sequences: int,
        read_tokens: float,
    ) -> Floats:
        """Return ``verify_curve_s`` where drafts left one share done for ``reused_N`` of the rows."""
        whole_N = self.verify_curve_s(rows_N, context_N, sequences=sequences, read_tokens=read_tokens)
        if not reuse_frac:
            return whole_N
        fewer_N = self.verify_curve_s(
            rows_N - reused_N, context_N - reused_context_N, sequences=sequences, read_tokens=read_tokens
        )
        return np.asarray(reuse_frac * fewer_N + (1.0 - reuse_frac) * whole_N)

    def verify_curve_s(
        self, rows_N: NDArray[np.intp], context_N: Floats, *, sequences: int, read_tokens: float
    ) -> Floats:
        """Return seconds of policy forwards that differ in rows and context only."""
        part = self._parts[POLICY]
        bandwidth, rate = self._bandwidth.slowdown, self._rate.slowdown
        linears_s_N = np.maximum(rows_N * (part.row_s * rate), part.weight_s * bandwidth)
        attention_s_N = np.maximum(context_N * (part.context_s * rate), part.read_s * read_tokens * bandwidth)
        raw_N = linears_s_N + attention_s_N + (rows_N * part.per_row_s + part.base_s)
        steps_N = part.steps_R.take(rows_N, mode="clip")
        return np.asarray(raw_N * steps_N * part.residuals.factors(rows_N, sequences))

    def least_row_s(self, *, rows: int, read_tokens: float, context_tokens: float) -> float:
        """Return what one more policy row costs at least, before residuals: 0 flops of linears, or of
        attention, while memory-bound. Its context is taken to be the batch's mean."""
        part, bandwidth, rate = self._parts[POLICY], self._bandwidth.slowdown, self._rate.slowdown
        more = part.stages(1.0, 0.0, context_tokens / rows)
        now = part.stages(rows, read_tokens, context_tokens)
        bound_s = sum(
            [grows[1] for grows, (m, c) in zip(more, now, strict=True) if c * rate >= m * bandwidth]
        )
        return part.per_row_s + bound_s * rate

    def plain_s(self, sequences: int, *, read_tokens: float) -> float:
        """Return seconds of a round in which every sequence decodes plainly."""
        verify_s = self.forward_s(
            POLICY, rows=sequences, sequences=sequences, read_tokens=read_tokens, context_tokens=read_tokens
        )
        base_s, per_row_s = self.other_line_s(speculates=False)
        return verify_s + base_s + per_row_s * sequences

    def draft_line(self, drafter: str, *, sequences: int, mean_context_tokens: float) -> DraftLine:
        """Return the chord of a pass's cost between one row and ``sequences`` rows."""
        if drafter in self._free:
            return DraftLine(pass_s=0.0, row_s=0.0)
        one, many = (
            self.forward_s(
                drafter,
                rows=n,
                sequences=n,
                read_tokens=n * mean_context_tokens,
                context_tokens=n * mean_context_tokens,
            )
            for n in (1, sequences)
        )
        row_s = max(0.0, (many - one) / (sequences - 1)) if sequences > 1 else 0.0
        # A part that is compute-bound from the first rows has a chord steeper than its first row.
        round_s = self._draft_round_s(drafter, sequences)
        return DraftLine(pass_s=max(0.0, one - row_s), row_s=row_s, round_s=round_s)

    def _draft_round_s(self, drafter: str, sequences: int) -> float:
        """Return what a round's drafting costs beside its passes."""
        line = self._drafts.get(drafter)
        return 0.0 if line is None else line.base_s + line.s_per_row * sequences

    def free_draft_s(self, drafter: str, sequences: int) -> float:
        """Return seconds of asking a drafter that runs no model for ``sequences`` sequences."""
        return self._free[drafter].predict(sequences, flagged=False) if sequences else 0.0

    def other_line_s(self, *, speculates: bool) -> tuple[float, float]:
        """Return base and per-row seconds of a round outside the forwards."""
        extra = self._other.flagged_s if speculates else 0.0
        return self._other.base_s + extra, self._other.per_row_s

    def lanes_s(self, name: str, *, lanes: float, sequences: int, read_tokens: float, passes: float) -> float:
        """Return seconds of so many passes of a pipeline, with so many lanes per sequence on average."""
        return passes * self.forward_s(
            name,
            rows=max(1, round(lanes * sequences)),
            sequences=sequences,
            read_tokens=read_tokens,
            context_tokens=lanes * read_tokens,
        )

    def predict_round(
        self,
        load: RoundLoad,
        assignments: Mapping[int, Assignment],
        *,
        lanes: Mapping[str, float] = NO_LANES,
    ) -> RoundPrediction:
        """Return what the round would take. Missing assignments decode plainly.

        ``lanes`` holds the mean lanes per sequence of pipelines; full ones are assumed of those not named.
        A prompt row is priced as any other, a little too high: most end before their last layer is through.
        """
        rows, forwarded, read, context = load.prefill_tokens, 0, 0.0, 0.0
        by_drafter: dict[str, list[tuple[int, int]]] = {}
        if not assignments:
            forwarded, read = len(load.sequences), float(load.context_tokens)
            rows, context = rows + forwarded, read
        for s in load.sequences if assignments else ():
            a = assignments.get(s.key)
            gamma = a.gamma if a is not None else 0
            if a is not None and gamma:
                by_drafter.setdefault(a.drafter, []).append((gamma, s.context_tokens))
                if a.drafter in self._pipelines:
                    continue
            forwarded += 1
            rows += gamma + 1
            read += s.context_tokens
            context += (gamma + 1) * s.context_tokens
        alone = not rows
        draft_s = sum([self._drafter_s(name, asked, lanes, alone) for name, asked in by_drafter.items()])
        # Pipelines are among these as well; they leave nothing done of a forward they are no part of.
        drafts = [(name, g, c) for name, asked in by_drafter.items() for g, c in asked]
        verify_s = 0.0
        if rows:
            verify_s = self.verify_s(
                rows=rows,
                sequences=max(1, forwarded),
                read_tokens=read,
                context_tokens=context,
                reused=reused_by(drafts, self.reuse_frac) if self._reuses else NOTHING_REUSED,
            )
        base, per_row = self.other_line_s(speculates=bool(by_drafter))
        return RoundPrediction(draft_s, verify_s, base + per_row * rows)

    def _drafter_s(
        self, drafter: str, asked: list[tuple[int, int]], lanes: Mapping[str, float], alone: bool
    ) -> float:
        if drafter in self._pipelines:
            return self.lanes_s(
                drafter,
                lanes=lanes.get(drafter, self._pipelines[drafter].most_lanes),
                sequences=len(asked),
                read_tokens=float(sum(context for _, context in asked)),
                passes=self._pipelines[drafter].passes_of(len(asked), alone=alone),
            )
        if drafter in self._free:
            return self.free_draft_s(drafter, len(asked))
        total = self._draft_round_s(drafter, len(asked))
        for level in range(1, max(g for g, _ in asked) + 1):
            alive = [c for g, c in asked if g >= level]
            read = float(sum(alive))
            total += self.forward_s(
                drafter, rows=len(alive), sequences=len(alive), read_tokens=read, context_tokens=read
            )
        return total

    def observe(self, facts: RoundFacts) -> None:
        """Learn from one round. Rounds with prompt rows are left out: their context is not told apart."""
        if facts.prefill_rows or not facts.outcomes or not _sane(facts):
            return
        self._observed += 1
        heard = [False, False]
        forwarded = facts.outcomes
        if self._pipelines:
            forwarded = tuple(o for o in forwarded if o.drafter not in self._pipelines)
        if facts.verify_rows:
            read = float(sum([o.context_tokens for o in forwarded]))
            self._observe_forward(
                POLICY,
                shape=(facts.verify_rows, len(forwarded)),
                tokens=(read, float(facts.context_tokens)),
                seconds=facts.verify_s * self._whole_over_rest(facts, forwarded, read),
                heard=heard,
            )
        drafts_s = 0.0
        for draft in facts.drafts:
            drafts_s += draft.seconds
            self._observe_draft(draft, facts, heard)
        other_s = facts.total_s - facts.verify_s - drafts_s
        if other_s >= 0.0:
            self._other.observe(facts.verify_rows, other_s, flagged=facts.speculated)
        for tracker, was_heard in zip((self._bandwidth, self._rate), heard, strict=True):
            if not was_heard:
                tracker.idle()

    def _whole_over_rest(
        self, facts: RoundFacts, forwarded: Sequence[SequenceOutcome], read_tokens: float
    ) -> float:
        """Return how much longer the round's policy forward would have taken had drafts left nothing done.

        All shares are taken to have been as much slower than predicted as their sum was: to blame one of
        them for what is in all would overshoot, the more the smaller it is.
        """
        if not self._reuses:
            return 1.0
        drafts = [(o.drafter, o.gamma, o.context_tokens) for o in forwarded]
        reused = reused_by(drafts, self.reuse_frac)
        if not reused:
            return 1.0

        def predicted_s(done: Mapping[float, Reused]) -> float:
            return self.verify_s(
                rows=facts.verify_rows,
                sequences=len(forwarded),
                read_tokens=read_tokens,
                context_tokens=float(facts.context_tokens),
                reused=done,
            )

        return predicted_s(NOTHING_REUSED) / predicted_s(reused)

    def _observe_draft(self, draft: DraftCost, facts: RoundFacts, heard: list[bool]) -> None:
        if draft.drafter in self._free:
            asked = sum(o.drafter == draft.drafter and o.gamma > 0 for o in facts.outcomes) + draft.failures
            self._free[draft.drafter].observe(asked, draft.seconds, flagged=False)
        elif draft.drafter in self._parts and draft.passes > 0 and draft.rows > 0 and not draft.failures:
            rows, context = draft.rows / draft.passes, draft.context_tokens / draft.passes
            count, sequences, read = max(1, round(rows)), max(1, round(rows)), context
            drafting = sum([o.drafter == draft.drafter for o in facts.outcomes])
            if draft.drafter in self._pipelines:
                sequences = drafting
                read = context * sequences / rows
            passes_s = draft.seconds - self._draft_round_s(draft.drafter, drafting)
            self._observe_forward(
                draft.drafter,
                shape=(count, sequences),
                tokens=(read, context),
                seconds=max(passes_s, LEAST_MAIN_FRAC * draft.seconds) / draft.passes,
                heard=heard,
                rows=rows,
            )

    def _observe_forward(
        self,
        name: str,
        *,
        shape: tuple[int, int],
        tokens: tuple[float, float],
        seconds: float,
        heard: list[bool],
        rows: float | None = None,
    ) -> None:
        """Correct the parameter that bounds most of this forward, then the residual of its shape."""
        part = self._parts[name]
        rows = float(shape[0]) if rows is None else rows
        bounding = part.bounding(rows, *tokens, self._bandwidth.slowdown, self._rate.slowdown)
        seconds /= part.step(rows)
        if seconds <= 0.0 or bounding.slow_s <= 0.0:
            return
        overhead_s = part.overhead_s(rows)
        main_s = max(seconds / part.residuals.own(*shape) - overhead_s, LEAST_MAIN_FRAC * seconds)
        which, bound_s, rest_s = bounding.which, bounding.bound_s, bounding.rest_s
        tracker = (self._bandwidth, self._rate)[which]
        said = self._said_lately(which) if name != POLICY else []
        if name != POLICY and not said and bound_s < SPEAKS_FRAC * (bound_s + rest_s + overhead_s):
            said = [tracker.slowdown]
        factor = part.own if said else tracker
        # A stalled forward of the policy must not make a drafter look fast, nor the fastest of several slow.
        slowdown = (
            main_s / (bound_s * statistics.median_low(said) + rest_s)
            if said
            else max(main_s / part.own.slowdown - rest_s, LEAST_MAIN_FRAC * bound_s) / bound_s
        )
        # While the machine changes, its parameters are behind, and shapes must not take the blame. Asked
        # before this forward is heard: a fast one unsettles a low quantile sooner than a slow one, and shapes
        # would be told of the slow ones only.
        settled = tracker.settled and factor.settled
        factor.observe(slowdown)
        if name == POLICY and bounding.clear:
            self._said[which].append((self._observed, slowdown))
        heard[which] = True
        if settled:
            main_s = (
                part.bounding(rows, *tokens, self._bandwidth.slowdown, self._rate.slowdown).slow_s
                * part.own.slowdown
            )
            part.residuals.observe(*shape, math.log(seconds / (main_s + overhead_s)), bound=which)
            part.share_common(factor, None if said else which)

    def _said_lately(self, which: int) -> list[float]:
        """Return what the policy has just said of a parameter: what a drafter says beside it is its own.

        Where the policy has not, the drafter speaks for the machine.
        """
        return [slow for at, slow in self._said[which] if self._observed - at <= PAIRED_ROUNDS]


def _sane(facts: RoundFacts) -> bool:
    times = (facts.total_s, facts.verify_s, facts.draft_s, *(d.seconds for d in facts.drafts))
    computed = facts.verify_rows > 0 or any(d.rows > 0 for d in facts.drafts)
    return all(math.isfinite(t) and t >= 0.0 for t in times) and computed and facts.batch > 0
