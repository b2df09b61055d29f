"""Linears of 8-bit weights times 8-bit activations, on torch's integer matrix product.

A row of activations shares one scale, an out feature of weights another; sums are exact in 32 bits. Every
linear keeps 8 bits, the body too: this kernel reads twice the bytes of a 4-bit one and pays where arithmetic,
not memory, is the limit, on hardware with integer matrix instructions. Elsewhere torch multiplies in a plain
loop. The CUDA branch (17 rows at least, shapes in multiples of 8) was not run on hardware.

Shapes: R rows, N out features, K in features.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.int4.int8_rows import Int8Rows
from drafters.int4.rounding import CODES_8, TINY
from drafters.types import DraftError, LinearWeight

_CUDA_MULTIPLE = 8
_CUDA_ROWS = 32
"""Fewer rows are filled up to this many: torch refuses 16 and fewer."""


class DynamicInt8Linear(Int8Rows):
    """8-bit weights with one scale per out feature; activations are rounded row by row as they come."""

    def __init__(self, weight: LinearWeight) -> None:
        shape = (weight.out_features, weight.in_features)
        if weight.rows().device.type == "cuda" and any(size % _CUDA_MULTIPLE for size in shape):
            raise DraftError(
                f"build refused: {weight.name} does not fit torch's int8 product: on CUDA both features must "
                f"be multiples of {_CUDA_MULTIPLE}, got {shape}"
            )
        super().__init__(weight, scale_dtype=torch.float32)

    def apply(self, x_RK: Tensor) -> Tensor:
        """Return x W^T in the dtype of ``x_RK``, with x rounded to 8 bits per row.

        A row with a value that is not finite comes out as NaN, and no other row with it.
        """
        rows = x_RK.shape[0]
        if rows == 0:
            return x_RK.new_empty((0, self.out_features))
        x = x_RK.float()
        largest_R1 = x.abs().amax(-1, keepdim=True)
        codes_RK = (x * (CODES_8 / largest_R1.clamp_min(TINY))).round().to(torch.int8)
        if x.device.type == "cuda" and rows < _CUDA_ROWS:
            codes_RK = F.pad(codes_RK, (0, 0, 0, _CUDA_ROWS - rows))
        sums_RN = torch._int_mm(codes_RK, self.codes_NK.t())[:rows]
        return (sums_RN.float() * (largest_R1 / CODES_8) * self.scale_N).to(x_RK.dtype)
