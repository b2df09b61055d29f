"""What speculation should bring, from what its parts cost apart, against what it brought.

A looped policy of D loops that drafts K tokens with its first d runs D (1 + a) / (d (K + 1) + D - d) times as
fast as plain decoding if every loop costs the same and nothing else costs anything; a is the mean number of
drafts kept. The prediction puts in what loops, the head and rounds cost: forwards are timed alone, at the
rows a round has, and put together by what the law says a round computes; a round's overhead is all its time
that no forward took.

    draft    K forwards of d loops over one row per sequence; the first finds the caches cold
    verify   d loops over the last draft's row of each sequence, D - d loops and the head over all K + 1
    lanes    one forward of one loop per pass, over the lanes under way; the first is cold again

Seconds throughout. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from controller.types import POLICY, PartShape
from drafters.registry import member
from rollout.bench.summary import Totals

LAW_WITHIN = 0.15
"""How far a predicted speed-up may be from the measured one."""

PASSES_WITHIN = 0.05
"""How far passes per token may be from alpha d + (1 - alpha) D."""


class Prices(Protocol):
    """What forwards cost apart from rounds."""

    def forward_s(self, part: str, rows: float) -> float:
        """Return the seconds of one forward of ``rows`` rows."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundWork:
    """What an arm's rounds without prompt rows did on average."""

    batch: float
    """Sequences per round."""

    tokens: float
    """Per sequence and round, corrected or bonus token included: 1 + a."""

    drafted: float
    """Per sequence and round."""

    passes: float
    """Draft passes per round."""

    lanes: float
    """Rows per draft pass and sequence."""

    overhead_s: float
    """Of a round beyond its forwards."""

    token_s: float
    """Measured seconds per token and sequence, of whole rounds."""

    passes_per_token: float
    """Draft passes a sequence took part in, per token it got."""

    @classmethod
    def of(cls, totals: Totals) -> "RoundWork":
        """Return the averages. Raises ``ValueError`` where no round decoded."""
        if not totals.decoded:
            raise ValueError("no round without prompt rows committed anything")
        return cls(
            batch=totals.sequences / totals.rounds,
            tokens=totals.decoded / totals.sequences,
            drafted=totals.drafted / totals.sequences,
            passes=totals.draft_passes / totals.rounds,
            lanes=totals.draft_rows * totals.rounds / max(1, totals.draft_passes * totals.sequences),
            overhead_s=(totals.seconds - totals.forward_s) / totals.rounds,
            token_s=totals.seconds / totals.decoded,
            passes_per_token=totals.sequence_passes / totals.decoded,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One arm against plain decoding: speed of rounds that decode, prompts left out."""

    arm: str
    accepted_per_round: float
    ideal: float | None
    """The law's, every loop at one price and nothing else at any; None where it has none."""

    predicted: float
    measured: float

    @property
    def error_frac(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1.0


def predict(
    arm: str,
    drafter: str,
    gamma: int,
    *,
    plain: RoundWork,
    work: RoundWork,
    shapes: Mapping[str, PartShape],
    times: Prices,
    loops: int,
) -> Prediction:
    """Return what an arm should bring over plain decoding and what it brought."""
    plain_s = times.forward_s(POLICY, plain.batch) + plain.overhead_s
    if shapes[drafter].lane_loops:
        forwards_s = _in_a_row_s(drafter, work.passes, work.batch * work.lanes, times)
    else:
        drafts = shapes[drafter].rows_per_draft_token > 0
        forwards_s = _drafted_s(drafter, work, times, drafts=drafts)
    per_token_s = (forwards_s + work.overhead_s) / (work.batch * work.tokens)
    return Prediction(
        arm=arm,
        accepted_per_round=work.tokens - 1.0,
        ideal=ideal_speedup(drafter, gamma, work, shapes[drafter], loops),
        predicted=plain_s / (plain.batch * plain.tokens) / per_token_s,
        measured=plain.token_s / work.token_s,
    )


def _drafted_s(drafter: str, work: RoundWork, times: Prices, *, drafts: bool) -> float:
    """Return the seconds of a round's forwards: drafts, then verification from what they left."""
    every = work.batch * (work.drafted + 1)
    draft_s = _in_a_row_s(drafter, work.drafted, work.batch, times) if drafts else 0.0
    if depth_of(drafter):
        fill_s = times.forward_s(fill_of(drafter), work.batch)
        return draft_s + fill_s + times.forward_s(deep_of(drafter), every)
    return draft_s + times.forward_s(POLICY, every)


def _in_a_row_s(part: str, count: float, rows: float, times: Prices) -> float:
    """Return the seconds of a round's forwards of one part, on average ``count`` of them."""
    first, after = min(1.0, count), max(0.0, count - 1.0)
    return first * times.forward_s(first_of(part), rows) + after * times.forward_s(part, rows)


def first_of(part: str) -> str:
    """Name the first of a part's forwards in a round: keys, values and weights are in no cache by then."""
    return f"{part}/first"


def fill_of(drafter: str) -> str:
    """Name the forward that takes rows without a draft's states through a shallow drafter's loops."""
    return f"{drafter}/fill"


def deep_of(drafter: str) -> str:
    """Name the forward of the loops beyond a shallow drafter's, and the head."""
    return f"{drafter}/deep"


def depth_of(drafter: str) -> int:
    """Return the loops a shallow drafter runs; 0 for every other."""
    return member(drafter)[1]


def ideal_speedup(drafter: str, gamma: int, work: RoundWork, shape: PartShape, loops: int) -> float | None:
    """Return the law's speed-up where only loops cost anything, and all the same."""
    if shape.lane_loops:
        return loops / work.passes_per_token if work.passes_per_token else None
    depth = depth_of(drafter)
    return loops * work.tokens / (depth * (gamma + 1) + loops - depth) if depth else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneLaw:
    """Passes a token takes in lanes, against what its acceptance says."""

    arm: str
    depth: int
    """Loops after which a token proposes the next."""

    alpha: float
    """Share of proposals that were the target's own choice."""

    predicted: float
    measured: float

    @property
    def error_frac(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1.0


def lane_law(arm: str, *, depth: int, loops: int, alpha: float, work: RoundWork) -> LaneLaw:
    """Return how many passes a token took in a full pipeline, and how many it should."""
    predicted = alpha * depth + (1.0 - alpha) * loops
    return LaneLaw(arm=arm, depth=depth, alpha=alpha, predicted=predicted, measured=work.passes_per_token)
