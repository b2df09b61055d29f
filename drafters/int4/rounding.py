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

NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 4-bit normal floats of QLoRA: what codes 0..15 stand for, as shares of a group's largest weight."""

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
    """Round to 4 bits on a line fitted per group; the last group may be short.

    The first line runs between the group's extremes; least squares through the codes it gives replaces it
    where it stays within half a step of it. An element moves by at most 0.6 of a scale, plus what bfloat16
    costs the scale (15 * 2^-8 of it) and the minimum (2^-8 of it). Raises ``DraftError``.
    """
    require_usable(weight_NK, name=name)
    weight_NK = weight_NK.detach().float()
    out_features, in_features = weight_NK.shape
    short = -in_features % group
    # A short group is filled with its own last weight, which changes neither extreme; the fit skips it.
    fill_NK = weight_NK[:, -1:].expand(out_features, short)
    grouped_NGH = torch.cat([weight_NK, fill_NK], dim=1).view(out_features, -1, group)
    lo_NG, hi_NG = grouped_NGH.amin(-1), grouped_NGH.amax(-1)
    minimum_NG = lo_NG.bfloat16().float()
    scale_NG = _usable(((hi_NG - lo_NG) / torch.full_like(lo_NG, CODES_4)).bfloat16().float())
    real_GH = torch.ones_like(grouped_NGH[0]).view(-1)
    real_GH[in_features:] = 0
    scale_NG, minimum_NG = _refitted(grouped_NGH, scale_NG, minimum_NG, real_GH.view(-1, group))
    codes_NGH = _codes(grouped_NGH, scale_NG, minimum_NG)
    return Int4Rounding(
        codes_NK=codes_NGH.to(torch.uint8).view(out_features, -1)[:, :in_features].contiguous(),
        scale_NG=scale_NG.bfloat16(),
        minimum_NG=minimum_NG.bfloat16(),
        group=group,
    )


def _usable(scale: Tensor) -> Tensor:
    """Return 0 for scales whose reciprocal would overflow."""
    return torch.where(scale >= TINY, scale, torch.zeros_like(scale))


def _codes(grouped_NGH: Tensor, scale_NG: Tensor, minimum_NG: Tensor) -> Tensor:
    usable_NG = scale_NG > 0
    inverse_NG = torch.where(usable_NG, torch.ones_like(scale_NG) / scale_NG, torch.zeros_like(scale_NG))
    steps_NGH = (grouped_NGH - minimum_NG[..., None]) * inverse_NG[..., None]
    return steps_NGH.clamp(0.0, CODES_4).round()


def _refitted(
    grouped_NGH: Tensor, scale_NG: Tensor, minimum_NG: Tensor, real_GH: Tensor
) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of the least-squares line through (code, distance from the minimum)."""
    codes_NGH = _codes(grouped_NGH, scale_NG, minimum_NG)
    q_NG, qq_NG, d_NG, qd_NG = (torch.zeros_like(scale_NG) for _ in range(4))
    # Sums run in the order of k: float addition is not associative, and codes must not depend on the device.
    for h in range(grouped_NGH.shape[-1]):
        real_G = real_GH[:, h]
        code_NG = codes_NGH[..., h] * real_G
        distance_NG = (grouped_NGH[..., h] - minimum_NG) * real_G
        q_NG = q_NG + code_NG
        qq_NG = qq_NG + code_NG * code_NG
        d_NG = d_NG + distance_NG
        qd_NG = qd_NG + code_NG * distance_NG
    n_NG = real_GH.sum(-1).expand_as(scale_NG)
    slope_NG = (n_NG * qd_NG - q_NG * d_NG) / (n_NG * qq_NG - q_NG * q_NG)
    offset_NG = (d_NG - slope_NG * q_NG) / n_NG
    new_scale_NG = slope_NG.bfloat16().float()
    new_minimum_NG = (minimum_NG + offset_NG).bfloat16().float()
    moved_NG = new_minimum_NG - minimum_NG
    top_moved_NG = (new_scale_NG - scale_NG) * CODES_4 + moved_NG
    most_NG = scale_NG * 0.5
    # Comparisons with NaN are false: a group of equal codes has no line.
    better_NG = (new_scale_NG >= TINY) & (moved_NG.abs() <= most_NG) & (top_moved_NG.abs() <= most_NG)
    return torch.where(better_NG, new_scale_NG, scale_NG), torch.where(better_NG, new_minimum_NG, minimum_NG)


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


def round_to_nf4(weight_NK: Tensor, group: int, *, name: str = "weight") -> Tensor:
    """Return the weight in 4-bit normal floats multiplied out, float32 (N, K); K is a multiple of ``group``.

    Weights go to the nearest level. Raises ``DraftError``.
    """
    require_usable(weight_NK, name=name)
    grouped_NGH = weight_NK.detach().float().reshape(len(weight_NK), -1, group)
    top_NG1 = grouped_NGH.abs().amax(-1, keepdim=True)
    levels = torch.tensor(NF4_LEVELS, device=weight_NK.device)
    shares_NGH = grouped_NGH / torch.where(top_NG1 > 0, top_NG1, torch.ones_like(top_NG1))
    codes_NGH = torch.bucketize(shares_NGH, (levels[1:] + levels[:-1]) / 2)
    rounded_NGH: Tensor = levels[codes_NGH] * top_NG1
    return rounded_NGH.view(weight_NK.shape)
