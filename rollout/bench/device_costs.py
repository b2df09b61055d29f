"""What a policy's forwards cost on a device, and how often drafts must be right there to be worth it.

On random weights nothing can be said of speed-ups: acceptance would be made up. What is measured is cost.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafters.int4.linears import Bits, build_linear
from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.pages import PagePool, pages_for
from rollout.engine.native.timing import time_forward
from rollout.engine.native.torch_decoder import TorchDecoder
from rollout.policy.families import default_inverse_frequencies, tables_of
from rollout.policy.spec import ModelSpec

WARM_UPS = 2
REPEATS = 5
WEIGHT_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class CostGrid:
    """Where costs are measured."""

    batches: Sequence[int] = (1, 4, 16, 64)
    contexts: Sequence[int] = (128, 2048)
    gammas: Sequence[int] = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyCost:
    """One gamma at one batch and context."""

    gamma: int
    verify_ms: float
    """One forward of ``gamma + 1`` rows per sequence."""

    verify_over_ar: float
    break_even_acceptance: float | None
    """The chance, the same for every draft, at which drafting and plain decoding commit tokens equally fast;
    None when not even drafts that are always right would pay, or no draft pass could be timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostPoint:
    """Medians at one batch and context."""

    batch: int
    context_tokens: int
    ar_ms: float
    draft_ms: float | None
    draft_over_ar: float | None
    by_gamma: tuple[VerifyCost, ...]


def random_decoder(spec: ModelSpec, *, device: str, dtype: torch.dtype, positions: int) -> TorchDecoder:
    """Return a decoder of seeded random weights, made where they live."""
    inverse_H = default_inverse_frequencies(head_dim=spec.head_dim, theta=1e4)
    tables = tables_of(inverse_H, positions=positions)
    decoder = TorchDecoder(
        spec, cos_PH=tables.cos_PH, sin_PH=tables.sin_PH, dtype=dtype, device=device, exact=False
    )
    weights = decoder.weights
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for weight in (weights.embedding_VD, *weights.linears.values()):
            weight.normal_(std=WEIGHT_STD, generator=generator)
        for norm in weights.norms.values():
            norm.fill_(1.0)
    return decoder


def quantized(decoder: TorchDecoder, *, group: int) -> TorchDecoder:
    """Return the decoder on torch's int4 operators, head in 8 bits. Raises ``DraftError`` or ``RuntimeError``
    where the device has none."""
    linears = {}
    for weight in decoder.linears():
        bits: Bits = 8 if weight.name == "head" else 4
        linears[weight.name] = build_linear("aten", weight, bits=bits, group=group)
        linears[weight.name].apply(torch.zeros_like(weight.rows()[:1]))
    return decoder.with_linears(linears)


def measure(
    decoder: Decoder, drafter: Decoder | None, grid: CostGrid, *, until_s: float
) -> tuple[list[CostPoint], list[str]]:
    """Return the points measured before ``until_s`` of the monotonic clock, and which were not."""
    most = max(grid.batches) * pages_for(max(grid.contexts) + max(grid.gammas) + 1)
    storage, pool = decoder.new_storage(most), PagePool(most)
    points: list[CostPoint] = []
    left_out: list[str] = []
    for context in grid.contexts:
        for batch in grid.batches:
            if time.monotonic() >= until_s:
                left_out.append(f"batch {batch}, context {context}: out of time")
            else:
                points.append(_point(decoder, drafter, storage, pool, batch, context, grid.gammas))
    return points, left_out


def _point(
    decoder: Decoder,
    drafter: Decoder | None,
    storage: KVStorage,
    pool: PagePool,
    batch: int,
    context: int,
    gammas: Sequence[int],
) -> CostPoint:
    def median_s(model: Decoder, rows_each: int) -> float:
        rows = rows_each * batch
        times = [
            time_forward(model, storage, pool, rows=rows, context_tokens=context, sequences=batch)
            for _ in range(WARM_UPS + REPEATS)
        ]
        return statistics.median(times[WARM_UPS:])

    ar_s = median_s(decoder, 1)
    draft_s = None if drafter is None else median_s(drafter, 1)
    by_gamma = []
    for gamma in gammas:
        verify_s = median_s(decoder, gamma + 1)
        needed = None
        if draft_s is not None:
            needed = break_even_acceptance(gamma, cost_over_ar=(gamma * draft_s + verify_s) / ar_s)
        by_gamma.append(
            VerifyCost(
                gamma=gamma,
                verify_ms=1e3 * verify_s,
                verify_over_ar=verify_s / ar_s,
                break_even_acceptance=needed,
            )
        )
    return CostPoint(
        batch=batch,
        context_tokens=context,
        ar_ms=1e3 * ar_s,
        draft_ms=None if draft_s is None else 1e3 * draft_s,
        draft_over_ar=None if draft_s is None else draft_s / ar_s,
        by_gamma=tuple(by_gamma),
    )


def break_even_acceptance(gamma: int, *, cost_over_ar: float) -> float | None:
    """Return the acceptance a at which 1 + a + ... + a^gamma tokens are worth ``cost_over_ar`` plain rounds.

    0 when a round costs no more than a plain one; None when it costs more than ``gamma + 1`` of them.
    """
    if cost_over_ar > gamma + 1:
        return None
    low, high = 0.0, 1.0
    if cost_over_ar <= 1:
        return low
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**i for i in range(gamma + 1)) < cost_over_ar:
            low = middle
        else:
            high = middle
    return high
