"""How near plain decoding is to the best the machine allows, and where a drain spends its time. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from controller.types import PartShape
from rollout.bench.summary import Totals

TAIL_BATCHES = (2, 4, 8)
"""Batches up to which the share of a drain's time is reported: where speculation can pay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """What the machine sustained in the same minutes."""

    read_bytes_per_s: float
    flops_per_s: float
    """Of the policy's own kernel at many rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBounds:
    """The least seconds of one kind of work: moving and computing may overlap whole."""

    bytes_s: float
    flops_s: float

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.bytes_s, self.flops_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The least seconds some forwards can take on a machine.

    Layer by layer, linears wait for attention and attention for linears, and no cache holds what one of them
    could fetch while the other computes. So their times add up: at large batches linears are bound by
    arithmetic and attention, which does few operations with every byte, still by memory. Each sequence is
    taken to have pages of its own; samples of one prompt share the reading of its pages.
    """

    linears: PhaseBounds
    attention: PhaseBounds

    @property
    def bytes_s(self) -> float:
        """Seconds of moving everything."""
        return self.linears.bytes_s + self.attention.bytes_s

    @property
    def flops_s(self) -> float:
        """Seconds of computing everything."""
        return self.linears.flops_s + self.attention.flops_s

    @property
    def seconds(self) -> float:
        """One after the other."""
        return self.linears.seconds + self.attention.seconds

    @property
    def bound_by(self) -> Literal["bytes", "flops"]:
        """What limits most of it."""
        moving_s = sum(p.seconds for p in (self.linears, self.attention) if p.bytes_s >= p.flops_s)
        return "bytes" if moving_s >= self.seconds / 2 else "flops"

    def at(self, peaks: Peaks, *, computed_at: Peaks) -> "Bounds":
        """Return the bounds of the same work at other peaks than it was computed at."""
        return Bounds(
            linears=_moved(self.linears, peaks, computed_at),
            attention=_moved(self.attention, peaks, computed_at),
        )


def _moved(phase: PhaseBounds, peaks: Peaks, computed_at: Peaks) -> PhaseBounds:
    return PhaseBounds(
        bytes_s=phase.bytes_s * computed_at.read_bytes_per_s / peaks.read_bytes_per_s,
        flops_s=phase.flops_s * computed_at.flops_per_s / peaks.flops_per_s,
    )


def bounds(
    shape: PartShape,
    peaks: Peaks,
    *,
    rows: float,
    read_tokens: float,
    context_tokens: float,
    forwards: int = 1,
) -> Bounds:
    """Return the bounds of ``forwards`` forwards of a part, from sums over them.

    Weights are read once a forward. ``read_tokens`` is the context read: rows of one sequence share it.
    ``context_tokens`` counts it once per row: each row computes its own attention.
    """
    return Bounds(
        linears=PhaseBounds(
            bytes_s=forwards * shape.weight_bytes / peaks.read_bytes_per_s,
            flops_s=shape.flops_per_row * rows / peaks.flops_per_s,
        ),
        attention=PhaseBounds(
            bytes_s=shape.kv_bytes_per_token * read_tokens / peaks.read_bytes_per_s,
            flops_s=shape.flops_per_context_token * context_tokens / peaks.flops_per_s,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPoint:
    """Plain decoding at one batch."""

    batch: int
    rounds: int
    round_ms: float
    tokens_per_s: float
    mean_context_tokens: float
    bound_frac: float
    """Least possible time over measured time: 1 is perfect."""

    bound_by: Literal["bytes", "flops"]


def saturation(plain_by_batch: Mapping[int, Totals], policy: PartShape, peaks: Peaks) -> list[BatchPoint]:
    """Return one point per batch, by batch. Weights are read once a round, every context once."""
    points = []
    for batch, totals in sorted(plain_by_batch.items()):
        least = bounds(
            policy,
            peaks,
            rows=totals.rows,
            read_tokens=totals.context_tokens,
            context_tokens=totals.context_tokens,
            forwards=totals.rounds,
        )
        points.append(
            BatchPoint(
                batch=batch,
                rounds=totals.rounds,
                round_ms=1e3 * totals.seconds / totals.rounds,
                tokens_per_s=totals.committed / totals.seconds,
                mean_context_tokens=totals.context_tokens / totals.rows,
                bound_frac=least.seconds / totals.seconds,
                bound_by=least.bound_by,
            )
        )
    return points


def tail_shares(plain_by_batch: Mapping[int, Totals], *, rounds_s: float) -> dict[int, float]:
    """Return, by ``TAIL_BATCHES``, the share of all round time spent at most at that batch."""
    return {
        most: sum(t.seconds for batch, t in plain_by_batch.items() if batch <= most) / rounds_s
        for most in TAIL_BATCHES
    }
