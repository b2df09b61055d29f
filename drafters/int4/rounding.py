"""Rounding of weights in plain torch: the oracle every 4-bit and 8-bit kernel is tested against.

Each step is one float32 operation and stands, in the same order, in ``quantize.cpp``, so a kernel's codes
must be equal to these, not close. Divisors are tensors because torch may turn a division by a plain number
into a product with its reciprocal, which rounds twice.

Shapes: N out features, K in features, G groups along K, H group size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.types import DraftError

TINY = 1e-30
"""A step, or a row's largest weight, under this rounds to zero: its reciprocal would overflow float32."""

LARGEST = 1e38
"""Weights beyond this are refused: the range of a group would overflow float32."""

CODES_4 = 15.0
CODES_8 = 127.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Int4Rounding:
    """A weight as code * scale + minimum, per group along K and out feature."""

    codes_NK: Tensor
    """uint8, 0..15."""

    scale_NG: Tensor
    """bfloat16, >= 0; 0 where a group is constant."""

    minimum_NG: Tensor
    """bfloat16."""

    group: int

    def dequantize(self) -> Tensor:
        """Return the weight these codes stand for, float32 (N, K)."""
        in_features = self.codes_NK.shape[1]
        scale_NK, minimum_NK = (
            t.float().repeat_interleave(self.group, dim=1)[:, :in_features]
            for t in (self.scale_NG, self.minimum_NG)
        )
        return self.codes_NK.float() * scale_NK + minimum_NK


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Rounding:
    """A weight as code * scale, one scale per out feature."""

    codes_NK: Tensor
    """int8, -127..127."""

    scale_N: Tensor
    """float32, >= 0."""

    def dequantize(self) -> Tensor:
        """Return the weight these codes stand for, float32 (N, K)."""
        return self.codes_NK.float() * self.scale_N[:, None]


def require_usable(weight_NK: Tensor, *, name: str) -> None:
    """Raise ``DraftError`` when a weight is NaN, infinite or beyond ``LARGEST``."""
    # A comparison with NaN is false, so this one condition refuses all three.
    if weight_NK.numel() and not bool((weight_NK.detach().abs() <= LARGEST).all()):
        raise DraftError(f"build refused: {name} has a weight that is not finite or exceeds {LARGEST:g}")


def round_to_int4(weight_NK: Tensor, group: int, *, name: str = "weight") -> Int4Rounding:
    """Round to 4 bits between each group's extremes; the last group may be short.

    An element moves by at most half a scale, plus what bfloat16 costs the scale (15 * 2^-9 of it) and the
    minimum (2^-9 of it; nothing when weights are bfloat16). Raises ``DraftError``.
    """
    require_usable(weight_NK, name=name)
    weight_NK = weight_NK.detach().float()
    out_features, in_features = weight_NK.shape
    short = -in_features % group
    # A short group is filled with its own last weight, which changes neither extreme.
    fill_NK = weight_NK[:, -1:].expand(out_features, short)
    grouped_NGH = torch.cat([weight_NK, fill_NK], dim=1).view(out_features, -1, group)
    lo_NG, hi_NG = grouped_NGH.amin(-1), grouped_NGH.amax(-1)
    minimum_NG = lo_NG.bfloat16()
    scale_NG = ((hi_NG - lo_NG) / torch.full_like(lo_NG, CODES_4)).bfloat16()
    usable_NG = scale_NG.float() >= TINY
    scale_NG = torch.where(usable_NG, scale_NG, torch.zeros_like(scale_NG))
    inverse_NG = torch.where(usable_NG, torch.ones_like(lo_NG) / scale_NG.float(), torch.zeros_like(lo_NG))
    steps_NGH = (grouped_NGH - minimum_NG.float()[..., None]) * inverse_NG[..., None]
    codes_NGH = steps_NGH.clamp(0.0, CODES_4).round()
    return Int4Rounding(
        codes_NK=codes_NGH.to(torch.uint8).view(out_features, -1)[:, :in_features].contiguous(),
        scale_NG=scale_NG,
        minimum_NG=minimum_NG,
        group=group,
    )


def round_to_int8_rows(weight_NK: Tensor, *, name: str = "weight") -> Int8Rounding:
    """Round to 8 bits, symmetric per out feature: an element moves by at most half a scale (up to float32
    rounding). Raises ``DraftError``.
    """
    require_usable(weight_NK, name=name)
    weight_NK = weight_NK.detach().float()
    top_N = weight_NK.abs().amax(-1)
    usable_N = top_N >= TINY
    top_N = torch.where(usable_N, top_N, torch.zeros_like(top_N))
    codes_N = torch.full_like(top_N, CODES_8)
    inverse_N = torch.where(usable_N, codes_N / top_N, torch.zeros_like(top_N))
    codes_NK = (weight_NK * inverse_N[:, None]).clamp(-CODES_8, CODES_8).round()
    return Int8Rounding(codes_NK=codes_NK.to(torch.int8), scale_N=top_N / codes_N)
