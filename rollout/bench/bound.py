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
        moved = totals.rounds * policy.weight_bytes + policy.kv_bytes_per_token * totals.context_tokens
        maths = policy.flops_per_row * totals.rows + policy.flops_per_context_token * totals.context_tokens
        bytes_s, flops_s = moved / peaks.read_bytes_per_s, maths / peaks.flops_per_s
        points.append(
            BatchPoint(
                batch=batch,
                rounds=totals.rounds,
                round_ms=1e3 * totals.seconds / totals.rounds,
                tokens_per_s=totals.committed / totals.seconds,
                mean_context_tokens=totals.context_tokens / totals.rows,
                bound_frac=max(bytes_s, flops_s) / totals.seconds,
                bound_by="bytes" if bytes_s >= flops_s else "flops",
            )
        )
    return points


def tail_shares(plain_by_batch: Mapping[int, Totals], *, rounds_s: float) -> dict[int, float]:
    """Return, by ``TAIL_BATCHES``, the share of all round time spent at most at that batch."""
    return {
        most: sum(t.seconds for batch, t in plain_by_batch.items() if batch <= most) / rounds_s
        for most in TAIL_BATCHES
    }
