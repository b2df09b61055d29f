"""Linears of 4-bit normal floats, by bitsandbytes (extra ``bnb``); the head is kept in 8 bits on torch.

Codes stand for sixteen quantiles of a normal distribution, scaled by each group's largest weight. On a CPU
bitsandbytes unpacks the whole weight for every product, unless the weight is repacked, which it does in place
for processors with AVX512-BF16 alone: not used here, since a rebuild could then no longer write into the same
buffers. So it is for CUDA, where it was not run on hardware; on a CPU it is right, and slow.

Shapes: R rows, N out features, K in features.
"""

from typing import Any

import torch
from torch import Tensor

from drafters.int4.rounding import require_usable
from drafters.types import DraftError, LinearWeight

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _functions(name: str) -> Any:
    """Return bitsandbytes' functions. Raises ``DraftError`` where the package cannot be had."""
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        raise DraftError(
            f"build refused: {name} needs bitsandbytes (pip install 'taildraft[bnb]'): {error}"
        ) from error
    return bitsandbytes


class Nf4Linear:
    """4-bit normal floats with one float32 scale per group of weights."""

    bits = 4

    def __init__(self, weight: LinearWeight, *, group: int) -> None:
        self._bitsandbytes = _functions(weight.name)
        rows_NK = weight.rows()
        if weight.in_features % group:
            raise DraftError(
                f"build refused: {weight.name} does not fit bitsandbytes' kernel: in features must be a "
                f"multiple of the group {group}, got {weight.in_features}"
            )
        self.name = weight.name
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.group = group
        self._dtype = rows_NK.dtype if rows_NK.dtype in _DTYPES else torch.float32
        self.packed, self._state = self._quantized(torch.zeros_like(rows_NK))
        self.scales: Tensor = self._state.absmax
        """Per group; like ``packed`` its address never changes."""

    def _quantized(self, rows_NK: Tensor) -> tuple[Tensor, Any]:
        try:
            packed, state = self._bitsandbytes.functional.quantize_4bit(
                rows_NK.to(self._dtype).contiguous(), blocksize=self.group, quant_type="nf4"
            )
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise DraftError(f"build refused: bitsandbytes will not take {self.name}: {error}") from error
        return packed, state

    @property
    def weight_bytes(self) -> int:
        """Bytes one forward reads."""
        return self.packed.nbytes + self.scales.nbytes

    def rebuild(self, weight: LinearWeight) -> None:
        """Round ``weight`` into the same buffers. Raises ``DraftError``."""
        rows_NK = weight.rows().detach()
        require_usable(rows_NK, name=weight.name)
        packed, state = self._quantized(rows_NK)
        self.packed.copy_(packed)
        self.scales.copy_(state.absmax)

    @torch.no_grad()
    def apply(self, x_RK: Tensor) -> Tensor:
        """Return x W^T in the dtype of ``x_RK``, computed in that of the weight."""
        x = x_RK.to(self._dtype).contiguous()
        y: Tensor = self._bitsandbytes.matmul_4bit(x, self.packed, quant_state=self._state)
        return y.to(x_RK.dtype)
