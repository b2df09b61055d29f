"""From a Hugging Face config to what the native engine computes: the spec and the rotary tables.

What a config asks for and the engine does not compute is refused here by name, never approximated.
No weights here, and transformers is not imported: a config is only read.

Shapes: P positions, H half of the head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeTables:
    """Rotary angles by position. Dimension h of a head is rotated with dimension h + head_dim / 2."""

    cos_PH: Tensor
    sin_PH: Tensor


def default_inverse_frequencies(*, head_dim: int, theta: float) -> Tensor:
    """Return theta^(-2h / head_dim), float32, shape H."""
    exponents_H = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return 1.0 / (theta**exponents_H)


def tables_of(
    inverse_frequencies_H: Tensor, *, positions: int, dtype: torch.dtype = torch.float32
) -> RopeTables:
    """Return the tables of positions 0..positions-1.

    Angles, sines and cosines are float32 whatever ``dtype`` is, as in transformers: a float64 table
    holds the same numbers, so that a float64 forward agrees with transformers' far below 1e-9.
    """
    positions_P = torch.arange(positions, dtype=torch.float32)
    angles_PH = positions_P[:, None] * inverse_frequencies_H.to(torch.float32)[None, :]
    return RopeTables(cos_PH=angles_PH.cos().to(dtype), sin_PH=angles_PH.sin().to(dtype))
