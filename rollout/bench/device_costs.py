"""What a policy's forwards cost on a device, and how often drafts must be right there to be worth it.

On random weights nothing can be said of speed-ups: acceptance would be made up. What is measured is cost.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drafters.int4.linears import Bits, build_linear
from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.pages import PagePool, pages_for
from rollout.engine.native.timing import time_forward
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.native.torch_forward.forward_graphs import Recorder
from rollout.engine.native.torch_forward.row_buckets import MOST_ROWS, MOST_WIDTH
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

    verify_recorded_ms: float | None
    """The same forward recorded and run again; None for one that no recording takes."""

    recorded_break_even_acceptance: float | None
    """As above where all forwards are recorded; None as above, or where one of them is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostPoint:
    """Medians at one batch and context."""

    batch: int
    context_tokens: int
    ar_ms: float
    draft_ms: float | None
    draft_over_ar: float | None
    ar_recorded_ms: float | None
    draft_recorded_ms: float | None
    ar_recorded_over_plain: float | None
    draft_recorded_over_plain: float | None
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
    """Return the decoder on torch's int4 operators, head in 8 bits. Raises ``DraftError`` or what an operator
    raises, ``NotImplementedError`` where the device has none."""
    linears = {}
    for weight in decoder.linears():
        bits: Bits = 8 if weight.name == "head" else 4
        linears[weight.name] = build_linear("aten", weight, bits=bits, group=group)
        linears[weight.name].apply(torch.zeros_like(weight.rows()[:1]))
    return decoder.with_linears(linears)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arms:
    """A policy and its drafter, run as they are and, where given, recorded."""

    plain: TorchDecoder
    recorded: TorchDecoder | None = None
    draft_plain: TorchDecoder | None = None
    draft_recorded: TorchDecoder | None = None


def arms_of(decoder: TorchDecoder, drafter: TorchDecoder | None, recorder: Recorder | None) -> Arms:
    """Return what is measured; without a recorder nothing is recorded."""
    if recorder is None:
        return Arms(plain=decoder, draft_plain=drafter)
    return Arms(
        plain=decoder,
        recorded=decoder.with_fast_paths(decoder.attention, recorder),
        draft_plain=drafter,
        draft_recorded=drafter and drafter.with_fast_paths(drafter.attention, recorder),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """What was measured, and what was not, by name."""

    points: list[CostPoint] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """With the error each raised."""


def measure(arms: Arms, grid: CostGrid, *, until_s: float) -> CostTable:
    """Return the points of a grid, measured as long as the monotonic clock is before ``until_s``."""
    most = max(grid.batches) * pages_for(max(grid.contexts) + max(grid.gammas) + 1)
    clock = _ForwardClock(storage=arms.plain.new_storage(most), pool=PagePool(most))
    table = CostTable()
    for context in grid.contexts:
        for batch in grid.batches:
            name = f"batch {batch}, context {context}"
            if time.monotonic() >= until_s:
                table.not_run.append(f"{name}: out of time")
                continue
            try:
                table.points.append(_point(arms, clock, batch, context, grid.gammas))
            except Exception as error:  # noqa: BLE001 - memory that ends here was enough for other points
                table.failed.append(f"{name}: {type(error).__name__}: {error}")
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """Medians of one forward, in seconds."""

    plain_s: float | None
    recorded_s: float | None

    @property
    def ratio(self) -> float | None:
        return _over(self.recorded_s, self.plain_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ForwardClock:
    """Times forwards over one pool."""

    storage: KVStorage
    pool: PagePool

    def pair(
        self, plain: Decoder | None, recorded: Decoder | None, *, batch: int, context: int, rows_each: int
    ) -> _Pair:
        """Return medians of a forward run as it is and recorded, taken in turns."""
        fits = rows_each <= MOST_WIDTH and rows_each * batch <= MOST_ROWS
        models = {"plain": plain, "recorded": recorded if fits else None}
        times: dict[str, list[float]] = {name: [] for name, model in models.items() if model is not None}
        for _ in range(WARM_UPS + REPEATS):
            for name, taken in times.items():
                model = models[name]
                assert model is not None
                taken.append(
                    time_forward(
                        model,
                        self.storage,
                        self.pool,
                        rows=rows_each * batch,
                        context_tokens=context,
                        sequences=batch,
                    )
                )
        medians = {name: statistics.median(taken[WARM_UPS:]) for name, taken in times.items()}
        return _Pair(plain_s=medians.get("plain"), recorded_s=medians.get("recorded"))


def _point(arms: Arms, clock: _ForwardClock, batch: int, context: int, gammas: Sequence[int]) -> CostPoint:
    ar = clock.pair(arms.plain, arms.recorded, batch=batch, context=context, rows_each=1)
    draft = clock.pair(arms.draft_plain, arms.draft_recorded, batch=batch, context=context, rows_each=1)
    assert ar.plain_s is not None
    by_gamma = []
    for gamma in gammas:
        verify = clock.pair(arms.plain, arms.recorded, batch=batch, context=context, rows_each=gamma + 1)
        assert verify.plain_s is not None
        by_gamma.append(
            VerifyCost(
                gamma=gamma,
                verify_ms=1e3 * verify.plain_s,
                verify_over_ar=verify.plain_s / ar.plain_s,
                break_even_acceptance=_needed(gamma, draft.plain_s, verify.plain_s, ar.plain_s),
                verify_recorded_ms=_ms(verify.recorded_s),
                recorded_break_even_acceptance=_needed(
                    gamma, draft.recorded_s, verify.recorded_s, ar.recorded_s
                ),
            )
        )
    return CostPoint(
        batch=batch,
        context_tokens=context,
        ar_ms=1e3 * ar.plain_s,
        draft_ms=_ms(draft.plain_s),
        draft_over_ar=_over(draft.plain_s, ar.plain_s),
        ar_recorded_ms=_ms(ar.recorded_s),
        draft_recorded_ms=_ms(draft.recorded_s),
        ar_recorded_over_plain=ar.ratio,
        draft_recorded_over_plain=draft.ratio,
        by_gamma=tuple(by_gamma),
    )


def _needed(gamma: int, draft_s: float | None, verify_s: float | None, ar_s: float | None) -> float | None:
    if draft_s is None or verify_s is None or ar_s is None:
        return None
    return break_even_acceptance(gamma, cost_over_ar=(gamma * draft_s + verify_s) / ar_s)


def _over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None else part / whole


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


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
