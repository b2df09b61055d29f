"""What a machine can do with a model: a sweep to run, a robust fit of it, and its JSON.

The sweep itself is run by whoever owns the engine. A part's forward of R rows over its sequences is

    max(weight bytes / bandwidth, flops of linears / rate)
    + context_factor * max(KV bytes / bandwidth, flops of attention / rate)
    + overhead + overhead_per_row * R

where keys and values are read once per sequence and every row computes its own attention. The policy's
bandwidth and rate are the machine's; a drafter's differ by its kernels and are fitted on their own.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from controller.trust import Quality, Timing
from controller.types import POLICY, PartShape

Floats = NDArray[np.float64]

OTHER = "other"
"""Part name of samples that time a round minus its forwards: plan, choose, commit."""

CALIBRATION_FORMAT = 3
"""Raised when the meaning of a stored field changes; an older file is then refused, not guessed at."""

BANDWIDTH_RANGE = (1e7, 1e14)
"""Bytes per second, from a starved container to well beyond one accelerator."""

RATE_RANGE = (1e7, 1e16)
"""Floating-point operations per second, same reach."""

CONTEXT_RANGE = (0.1, 20.0)
"""Attention moves strided memory and computes small products, so it costs a multiple of its bytes."""

OVERHEAD_RANGE = (1e-7, 1.0)
"""Seconds of one call: a hundred nanoseconds to a second."""

ROW_OVERHEAD_RANGE = (1e-9, 0.1)
"""Seconds of one row beside its flops."""

PRIOR_WEIGHT = 0.02
"""Pull of every log parameter to its start. Far below one sample's weight, it only decides what the
samples leave open, such as the rate of a part that was never bound by it."""

HUBER_LOG = 0.1
"""Log residual past which a sample counts linearly: 10% is model error, more is a stall."""

TINY_LOG = 1e-300
"""Keeps a residual of exactly 0 from being divided by."""

MOST_STEPS, MOST_REFUSALS = 160, 8
"""Of a fit: steps in all, and steps in a row that gain nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """One forward to time."""

    part: str
    rows: int
    sequences: int
    """Sequences that share the rows equally; ``rows`` is a multiple of it."""

    context_tokens: int
    """Context of each sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One timed forward; for part ``OTHER`` the rest of a round with ``rows`` verified rows."""

    part: str
    rows: int
    sequences: int
    context_tokens: int
    """Context of each sequence, not their sum."""

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFit:
    """Fitted parameters of one part."""

    bandwidth_bytes_per_s: float
    flops_per_s: float
    context_factor: float
    """Multiplies KV bytes and attention flops."""

    overhead_s: float
    overhead_s_per_row: float
    samples: int
    mape_frac: float
    """Mean absolute error of the fit over its own samples, relative."""

    worst_frac: float
    """Largest of those errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherFit:
    """Seconds of a round outside the forwards."""

    base_s: float = 0.0
    s_per_row: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """All parts of one model on one machine."""

    key: str
    """Names machine and model; the caller builds it and asks for it when loading."""

    parts: Mapping[str, PartFit]
    other: OtherFit = field(default_factory=OtherFit)
    drafts: Mapping[str, OtherFit] = field(default_factory=dict)
    """Of drafters that run a model: what a round's drafting costs beside its passes, by sequences that draft.
    It is the same for a long draft as for a short one."""

    quality: Quality = field(default_factory=Quality)
    """``unknown`` in files older than this field."""

    taken_utc: str = ""
    """When it was measured; empty in files older than this field."""

    timings: tuple[Timing, ...] = ()
    """What single forwards took, in short: some are taken again to see whether it still holds."""

    def to_json(self) -> str:
        """Return the whole record as JSON text; ``from_json`` gives back an equal record."""
        return json.dumps({"format": CALIBRATION_FORMAT, **asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, key: str | None = None) -> "Calibration":
        """Return the stored record. Raises ``ValueError`` on another format or another ``key``."""
        try:
            data = json.loads(text)
            found, stored = data.pop("format"), data["key"]
            if found != CALIBRATION_FORMAT:  # before its fields are read: an older one has others
                raise ValueError(f"calibration format {found}, expected {CALIBRATION_FORMAT}")
            record = cls(
                key=stored,
                parts={name: PartFit(**fit) for name, fit in data["parts"].items()},
                other=OtherFit(**data["other"]),
                drafts={name: OtherFit(**line) for name, line in data["drafts"].items()},
                quality=Quality(**data.get("quality", {})),
                taken_utc=data.get("taken_utc", ""),
                timings=tuple(Timing(**timing) for timing in data.get("timings", ())),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a calibration: {error}") from error
        if key is not None and stored != key:
            raise ValueError(f"calibration is for {stored!r}, not {key!r}")
        return record

    def report(self) -> dict[str, float]:
        """Return the error of the fit per part, ``calibration/mape_frac/PART`` and the worst sample."""
        out: dict[str, float] = {}
        for name, fit in self.parts.items():
            out[f"calibration/mape_frac/{name}"] = fit.mape_frac
            out[f"calibration/worst_frac/{name}"] = fit.worst_frac
        return out


def sweep_plan(
    shapes: Mapping[str, PartShape], max_batch: int, *, max_context_tokens: int = 512, max_gamma: int = 8
) -> list[SweepPoint]:
    """Return the forwards to time: half octaves of rows, both kinds of rows, two contexts.

    At five repetitions of at most 250 ms for the largest it stays within 20 s on two slow cores.
    Drafters that run no model are left out: there is nothing to time.
    """
    if max_batch < 1 or max_context_tokens < 8:
        raise ValueError(f"nothing to sweep: max_batch {max_batch}, max_context_tokens {max_context_tokens}")
    short, long = max(1, max_context_tokens // 8), max_context_tokens
    batches = [1 << i for i in range(max_batch.bit_length()) if 1 << i <= max_batch]
    points: list[SweepPoint] = []
    for name, shape in shapes.items():
        if name != POLICY and shape.rows_per_draft_token == 0:
            continue
        between = [b + b // 2 for b in batches if b >= 2 and b + b // 2 <= max_batch]
        wide = [(b, b) for b in sorted(batches + between)]
        if name == POLICY:
            # Verification: few sequences with many rows each, up to where it is surely compute-bound.
            wide += [(s * r, s) for s in batches if s <= 8 for r in sorted({2, 4, max_gamma} - {1})]
        if shape.most_lanes > 1:
            wide += [(b * shape.most_lanes, b) for b in batches]
        for rows, sequences in wide:
            both = rows in (sequences, sequences * shape.most_lanes) and sequences in (1, 4, 16)
            contexts = (short, long) if both else (short,)
            points += [
                SweepPoint(part=name, rows=rows, sequences=sequences, context_tokens=c) for c in contexts
            ]
    return points


def fit(samples: Sequence[Sample], shapes: Mapping[str, PartShape], *, key: str = "") -> Calibration:
    """Return the calibration that explains ``samples`` best.

    Robust least squares of log seconds per part, within the ranges above. Raises ``ValueError`` for a part
    without a shape, fewer than four samples of a part, a time that is not positive, or no policy samples.
    """
    for s in samples:
        if not (math.isfinite(s.seconds) and s.seconds > 0 and s.rows > 0 and s.sequences > 0):
            raise ValueError(f"not a usable sample: {s}")
    by_part: dict[str, list[Sample]] = {}
    for s in samples:
        by_part.setdefault(s.part, []).append(s)
    other = fit_other(by_part.pop(OTHER, []))
    if POLICY not in by_part:
        raise ValueError(f"no samples of {POLICY!r}: nothing would price plain decoding")
    unknown = sorted(set(by_part) - set(shapes))
    if unknown:
        raise ValueError(f"samples of parts without a shape: {', '.join(unknown)}")
    policy = _fit_part(by_part[POLICY], shapes[POLICY], prior=None)
    parts = {POLICY: policy}
    for name, rows in by_part.items():
        if name != POLICY:
            parts[name] = _fit_part(rows, shapes[name], prior=policy)
    return Calibration(key=key, parts=parts, other=other)


def _terms(samples: Sequence[Sample], shape: PartShape) -> tuple[Floats, Floats]:
    """Return per sample (weight bytes, KV bytes, row flops, attention flops, rows) and the seconds."""
    columns = [
        (
            shape.weight_bytes,
            shape.kv_bytes_per_token * s.context_tokens * s.sequences,
            shape.flops_per_row * s.rows,
            shape.flops_per_context_token * s.context_tokens * s.rows,
            s.rows,
        )
        for s in samples
    ]
    return np.asarray(columns, dtype=np.float64), np.asarray([s.seconds for s in samples], dtype=np.float64)


def _predict(log_params_S5: Floats, terms_N5: Floats) -> tuple[Floats, Floats]:
    """Return per set of log parameters the seconds (S, N) and how their logarithms change (S, N, 5)."""
    bandwidth, rate, context, base, per_row = np.exp(log_params_S5).T[:, :, None]
    weight_bytes, kv_bytes, row_flops, attention_flops, rows = terms_N5.T[:, None, :]
    weights_s, rows_s = weight_bytes / bandwidth, row_flops / rate
    read_s, attend_s = context * kv_bytes / bandwidth, context * attention_flops / rate
    linears_s, attention_s = np.maximum(weights_s, rows_s), np.maximum(read_s, attend_s)
    overhead_s = per_row * rows
    seconds = linears_s + attention_s + base + overhead_s
    linears_move, attention_moves = weights_s >= rows_s, read_s >= attend_s
    slopes = [
        -np.where(linears_move, weights_s, 0.0) - np.where(attention_moves, read_s, 0.0),
        -np.where(linears_move, 0.0, rows_s) - np.where(attention_moves, 0.0, attend_s),
        attention_s,
        np.broadcast_to(base, seconds.shape),
        overhead_s,
    ]
    return seconds, np.stack(slopes, axis=-1) / seconds[:, :, None]


def _fit_part(samples: Sequence[Sample], shape: PartShape, *, prior: PartFit | None) -> PartFit:
    if len(samples) < 4:
        raise ValueError(f"{shape.name}: {len(samples)} samples cannot fix five parameters")
    terms, seconds = _terms(samples, shape)
    low, high = np.log(
        np.asarray([BANDWIDTH_RANGE, RATE_RANGE, CONTEXT_RANGE, OVERHEAD_RANGE, ROW_OVERHEAD_RANGE]).T
    )
    starts = np.clip(_starts(terms, seconds, prior), low, high)
    found = _levenberg_marquardt(terms, seconds, starts, low, high)
    error = np.abs(_predict(found[None], terms)[0][0] / seconds - 1.0)
    bandwidth, rate, context, base, per_row = (float(v) for v in np.exp(found))
    return PartFit(
        bandwidth_bytes_per_s=bandwidth,
        flops_per_s=rate,
        context_factor=context,
        overhead_s=base,
        overhead_s_per_row=per_row,
        samples=len(samples),
        mape_frac=float(error.mean()),
        worst_frac=float(error.max()),
    )


def _starts(terms_N5: Floats, seconds_N: Floats, prior: PartFit | None) -> Floats:
    """Return log parameters to start from: the fastest forward sets the bandwidth, the densest the rate."""
    fastest, densest = float(seconds_N.min()), int(np.argmax(terms_N5[:, 2] / seconds_N))
    moved = float(max(1.0, terms_N5[:, 0].min()))
    rate = float(max(1.0, terms_N5[densest, 2] / seconds_N[densest]))
    if prior is not None:
        rate = max(rate, prior.flops_per_s)
    starts = []
    for share in (0.95, 0.7, 0.4):
        for context in (1.0, 3.0):
            guess = [moved / (share * fastest), rate, context, 0.5 * (1 - share) * fastest, fastest * 1e-3]
            starts.append(guess)
    return np.asarray(np.log(np.asarray(starts)), dtype=np.float64)


def _levenberg_marquardt(
    terms_N5: Floats, seconds_N: Floats, starts_S5: Floats, low: Floats, high: Floats
) -> Floats:
    """Return the log parameters with the least Huber sum of log residuals, from all starts at once.

    A start has settled when a step gains next to nothing, or when ``MOST_REFUSALS`` shorter and shorter ones
    in a row gain nothing.
    """
    pull = (PRIOR_WEIGHT * HUBER_LOG) ** 2
    log_seconds = np.log(seconds_N)

    def judged(params: Floats, starts: Floats) -> tuple[Floats, Floats, Floats]:
        """Return per set its cost, the gradient of that, and the Gauss-Newton curvature."""
        predicted, slopes = _predict(params, terms_N5)
        residual = np.log(predicted) - log_seconds
        size, away = np.abs(residual), params - starts
        clipped = np.minimum(size, HUBER_LOG)
        cost = (clipped * (size - 0.5 * clipped)).sum(axis=1) + 0.5 * pull * (away * away).sum(axis=1)
        weighted = slopes * (clipped / np.maximum(size, TINY_LOG))[:, :, None]
        gradient = (weighted * residual[:, :, None]).sum(axis=1) + pull * away
        return cost, gradient, weighted.transpose(0, 2, 1) @ slopes + pull * np.eye(5)

    params = starts_S5.copy()
    cost, gradient, curvature = judged(params, starts_S5)
    damping, refused = np.full(len(params), 1e-2), np.zeros(len(params), dtype=int)
    active = np.arange(len(params))
    for _ in range(MOST_STEPS):
        lifted = curvature[active].copy()
        lifted[:, range(5), range(5)] *= 1.0 + damping[active, None]
        step = np.linalg.solve(lifted, gradient[active, :, None])[:, :, 0]
        trial = np.clip(params[active] - step, low, high)
        trial_cost, trial_gradient, trial_curvature = judged(trial, starts_S5[active])
        gain = cost[active] - trial_cost
        good = gain > 0
        taken, kept = active[good], active[~good]
        params[taken], cost[taken] = trial[good], trial_cost[good]
        gradient[taken], curvature[taken] = trial_gradient[good], trial_curvature[good]
        damping[taken], refused[taken] = np.maximum(1e-9, damping[taken] / 6.0), 0
        damping[kept], refused[kept] = damping[kept] * 4.0, refused[kept] + 1
        settled = good & (gain < 1e-10 * (1.0 + trial_cost))
        active = active[~settled & (refused[active] < MOST_REFUSALS)]
        if not len(active):
            break
    return np.asarray(params[int(np.argmin(cost))])


def fit_other(samples: Sequence[Sample]) -> OtherFit:
    """Return a line through the medians per row count, both parts at least 0."""
    by_rows: dict[int, list[float]] = {}
    for s in samples:
        by_rows.setdefault(s.rows, []).append(s.seconds)
    if not by_rows:
        return OtherFit()
    rows = np.asarray(sorted(by_rows), dtype=np.float64)
    seconds = np.asarray([float(np.median(by_rows[int(r)])) for r in rows])
    if len(rows) == 1:
        return OtherFit(base_s=float(seconds[0]))
    slope, base = np.polyfit(rows, seconds, 1)
    if slope < 0:
        return OtherFit(base_s=float(np.median(seconds)))
    if base < 0:
        return OtherFit(s_per_row=float((seconds * rows).sum() / (rows * rows).sum()))
    return OtherFit(base_s=float(base), s_per_row=float(slope))
