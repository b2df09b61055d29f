"""How far two tensors lie apart, and how far they may."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Absolute differences of two tensors of one shape; NaN in either makes both numbers NaN."""

    largest: float
    rms: float

    def within(self, limit: float) -> bool:
        """Whether no difference exceeds ``limit``."""
        return self.largest <= limit  # NaN is not


def spread(found: Tensor, expected: Tensor) -> Spread:
    """Return how far ``found`` is from ``expected``. Raises ``ValueError`` when their shapes differ."""
    if found.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(found.shape)} and {tuple(expected.shape)}")
    if not found.numel():
        return Spread(largest=0.0, rms=0.0)
    apart = (found.double() - expected.double()).abs()
    return Spread(largest=float(apart.max()), rms=math.sqrt(float(apart.square().mean())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The largest difference allowed, agreed before anything is measured."""

    states: float
    """Of hidden states, keys and values."""

    logits: float
    margin: float
    """A free text may leave plain decoding's where its choice led by no more than this."""


EXACT = Limits(states=0.0, logits=0.0, margin=0.0)
"""Row-invariant numerics: not a bit."""

LOOSE: Mapping[str, Limits] = {
    "float64": Limits(states=1e-9, logits=1e-9, margin=1e-9),
    "float32": Limits(states=4e-5, logits=1e-4, margin=1e-4),
    "bfloat16": Limits(states=0.08, logits=0.08, margin=0.25),
}
"""By what is computed in, where rows may change with their batch."""


def limits_of(numerics: str, dtype: str) -> Limits:
    """Return the limits of an engine's numerics."""
    return EXACT if numerics == "exact" else LOOSE[dtype]
