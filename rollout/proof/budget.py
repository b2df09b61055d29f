"""How long the proof's texts may be, so that all its arms fit the time there is.

A few forwards are timed and every arm is priced from them, each by what its rounds compute. The price needs
to be right within a factor of two only: it decides lengths, never a verdict.

Seconds throughout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controller.pipeline import Pipeline
from controller.types import AR, POLICY, PartShape
from rollout.engine.native.engine import NativeEngine
from rollout.errors import CapacityError, UnsupportedError

TIMED_ROWS = (1, 8, 32, 128)
LONG_S = 0.5
"""Repeats of a forward end when together they took so long, and after one that did alone no wider one is
timed: from there on, as in policies of billions of weights, a row costs what the rows before it did."""

CONTEXT_TOKENS = 48
ASSUMED_ACCEPTANCE = 0.75
"""Of a draft token. On the low side: arms that accept more only end sooner."""

DRAIN_FRAC = 0.6
"""Mean share of a full batch that still runs while texts of different lengths end."""

SLACK = 1.2
"""Of forwards in a round over those timed alone."""

SEQUENCE_S = 0.0001
"""Choosing and committing, per sequence and round: what matters where forwards are short."""

LANE_S = 0.0001
"""Of a sequence and pass in lanes: a third of the proof's requests edit their logits, and their passes run
one by one."""

PROMPT_ROWS = 8
"""Of a request whose full prompt pages are shared: the rest of the last page, on average."""

LEAST_TOKENS = 6
"""Shorter texts would not cross a draft of eight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedArm:
    """What an arm's time depends on."""

    batch: int
    drafter: str
    """``AR`` for plain decoding."""

    gamma: int


def affordable_tokens(
    engine: NativeEngine, arms: Sequence[PricedArm], *, requests: int, within_s: float, most: int
) -> int:
    """Return the mean new tokens per request, ``most`` at most, with which all arms end in time."""
    parts = {POLICY, *(a.drafter for a in arms if a.gamma)}
    prices = ArmPrices(
        shapes=engine.part_shapes(), times={part: _forward_times(engine, part) for part in parts}
    )
    prompts_s = len(arms) * prices.forward_s(POLICY, requests * PROMPT_ROWS)
    per_token_s = requests * sum(map(prices.token_s, arms))
    return max(LEAST_TOKENS, min(most, int((within_s - prompts_s) / per_token_s)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmPrices:
    """What arms cost, from forwards timed alone."""

    shapes: Mapping[str, PartShape]
    times: Mapping[str, Mapping[int, float]]
    """Of one forward, by part and rows; of lanes one pass. None for a part that runs no forward."""

    def token_s(self, arm: PricedArm) -> float:
        """Return the seconds one token of one request costs in an arm."""
        running = max(1.0, arm.batch * (DRAIN_FRAC if arm.batch > 1 else 1.0))
        if arm.drafter == AR or not arm.gamma:
            return SLACK * self.forward_s(POLICY, running) / running + SEQUENCE_S
        if self.shapes[arm.drafter].lane_loops:
            return self._lane_token_s(arm, running)
        survival = ASSUMED_ACCEPTANCE ** np.arange(arm.gamma + 1)
        round_s = SLACK * (self._drafts_s(arm, running) + self._verify_s(arm, running))
        return float((round_s + running * SEQUENCE_S) / (running * survival.sum()))

    def _drafts_s(self, arm: PricedArm, running: float) -> float:
        return arm.gamma * self.forward_s(arm.drafter, running)

    def _verify_s(self, arm: PricedArm, running: float) -> float:
        """Return the seconds of the round's forward: what drafts have computed is left to their last rows."""
        reused = self.shapes[arm.drafter].reuse_frac
        every_s = self.forward_s(POLICY, running * (arm.gamma + 1))
        return (1 - reused) * every_s + reused * self.forward_s(POLICY, running)

    def _lane_token_s(self, arm: PricedArm, running: float) -> float:
        """Return the price of a token in lanes: passes compute it, the fewer the more lanes there are."""
        pipeline = Pipeline(shape=self.shapes[arm.drafter])
        most = arm.gamma + 1
        lanes = min(float(most), pipeline.mean_lanes(ASSUMED_ACCEPTANCE))
        # With fewer lanes than a full pipeline has, a right proposal enters later than it could.
        after = max(pipeline.depth, pipeline.loops / most)
        passes = ASSUMED_ACCEPTANCE * after + (1 - ASSUMED_ACCEPTANCE) * pipeline.loops
        pass_s = SLACK * self.forward_s(arm.drafter, running * lanes) + running * LANE_S
        return passes * pass_s / running + SEQUENCE_S

    def forward_s(self, part: str, rows: float) -> float:
        """Return the seconds of one forward; 0 for a part that runs none."""
        times = self.times[part]
        if not times:
            return 0.0
        known = sorted(times)
        inside = float(np.interp(rows, known, [times[r] for r in known]))
        return inside * max(1.0, rows / known[-1])


def _forward_times(engine: NativeEngine, part: str) -> dict[int, float]:
    """Return seconds by rows; empty for a part that runs no forward."""
    times: dict[int, float] = {}
    for rows in TIMED_ROWS:
        sequences = min(rows, engine.traits.max_batch)
        taken: list[float] = []
        try:
            while len(taken) < 3 and sum(taken) < LONG_S:
                taken.append(
                    engine.time_forward(part, rows=rows, context_tokens=CONTEXT_TOKENS, sequences=sequences)
                )
        except (CapacityError, UnsupportedError):
            break
        times[rows] = sorted(taken)[(len(taken) - 1) // 2]
        if times[rows] >= LONG_S:
            break
    return times
