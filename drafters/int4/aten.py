"""Linears on torch's own int4 and int8 operators: nothing to compile, but bound to their shapes.

On CPU: ``_weight_int4pack_mm_for_cpu`` (N a multiple of 16, K of the group, group 32, 64, 128 or 256) and
``_weight_int8pack_mm`` (K a multiple of 32). On CUDA: ``_weight_int4pack_mm`` (bfloat16 only, N a multiple
of 8, K of 32) and the same int8 operator. The CUDA branch follows the operators' documented layout and was
not run on hardware. A shape an operator cannot take is refused when the linear is built.

Shapes: R rows, N out features, K in features, G groups along K.
"""

import torch
from torch import Tensor

from drafters.int4.int8_rows import Int8Rows
from drafters.int4.rounding import round_to_int4
from drafters.types import DraftError, LinearWeight

GROUPS = (32, 64, 128, 256)
"""Groups torch's int4 operators take."""

_INNER_K_TILES_CPU = 1
"""The CPU operator requires this argument and ignores it."""

_CODE_OF_ZERO = 8
"""The operators compute (code - 8) * scale + zero, so zero is our minimum plus eight scales."""


_INT8_IN_FEATURES = 32
"""The int8 operator reads whole vectors along K without a tail: elsewhere it reads foreign memory."""


def _check_shape(weight: LinearWeight, group: int, device: torch.device) -> None:
    columns = 8 if device.type == "cuda" else 16
    problem = ""
    if group not in GROUPS:
        problem = f"group must be one of {GROUPS}, got {group}"
    elif weight.out_features % columns:
        problem = f"out features must be a multiple of {columns}, got {weight.out_features}"
    elif weight.in_features % group:
        problem = f"in features must be a multiple of the group {group}, got {weight.in_features}"
    if problem:
        raise DraftError(f"build refused: {weight.name} does not fit torch's int4 kernel: {problem}")


def _kernel_dtype(rows_NK: Tensor) -> torch.dtype:
    """Return what the operator computes in: bfloat16 on CUDA, on CPU the policy's dtype (not float64)."""
    if rows_NK.device.type == "cuda":
        return torch.bfloat16
    return rows_NK.dtype if rows_NK.dtype in (torch.bfloat16, torch.float16) else torch.float32


class AtenInt4Linear:
    """4-bit weights in torch's int4pack layout; scales in the policy's dtype."""

    bits = 4

    def __init__(self, weight: LinearWeight, *, group: int) -> None:
        rows_NK = weight.rows()
        _check_shape(weight, group, rows_NK.device)
        self.name = weight.name
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.group = group
        blank_NK = torch.zeros(self.out_features, self.in_features, dtype=torch.uint8, device=rows_NK.device)
        self.packed = self._pack(blank_NK)
        """Its address never changes."""
        self.scales_zeros = torch.zeros(
            self.in_features // group,
            self.out_features,
            2,
            dtype=_kernel_dtype(rows_NK),
            device=rows_NK.device,
        )
        """(G, N, 2); its address never changes."""

    def _pack(self, codes_NK: Tensor) -> Tensor:
        packed: Tensor
        try:
            if codes_NK.device.type == "cuda":
                pairs = (codes_NK[:, ::2] << 4 | codes_NK[:, 1::2]).contiguous()
                tiles = next(t for t in (8, 4, 2) if self.in_features % (16 * t) == 0)
                packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
            else:
                packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
                    codes_NK.int(), _INNER_K_TILES_CPU
                )
        except (RuntimeError, NotImplementedError) as error:
            raise DraftError(
                f"build refused: torch's int4 kernel will not take {self.name}: {error}"
            ) from error
        return packed

    @property
    def weight_bytes(self) -> int:
        """Bytes one forward reads."""
        return self.packed.nbytes + self.scales_zeros.nbytes

    def rebuild(self, weight: LinearWeight) -> None:
        """Round ``weight`` into the same buffers. Raises ``DraftError``."""
        rounded = round_to_int4(weight.rows(), self.group, name=weight.name)
        scale_NG, minimum_NG = rounded.scale_NG.float(), rounded.minimum_NG.float()
        zero_NG = minimum_NG + _CODE_OF_ZERO * scale_NG
        self.packed.copy_(self._pack(rounded.codes_NK))
        self.scales_zeros.copy_(torch.stack([scale_NG, zero_NG], dim=-1).transpose(0, 1))

    def apply(self, x_RK: Tensor) -> Tensor:
        """Return x W^T in the dtype of ``x_RK``, computed in that of the scales."""
        x = x_RK.to(self.scales_zeros.dtype).contiguous()
        operator = (
            torch.ops.aten._weight_int4pack_mm
            if x.device.type == "cuda"
            else torch.ops.aten._weight_int4pack_mm_for_cpu
        )
        y: Tensor = operator(x, self.packed, self.group, self.scales_zeros)
        return y.to(x_RK.dtype)


class AtenInt8Linear(Int8Rows):
    """8-bit weights with one scale per out feature, on torch's int8 operator."""

    def __init__(self, weight: LinearWeight) -> None:
        if weight.in_features % _INT8_IN_FEATURES:
            raise DraftError(
                f"build refused: {weight.name} does not fit torch's int8 kernel: in features must be "
                f"a multiple of {_INT8_IN_FEATURES}, got {weight.in_features}"
            )
        super().__init__(weight, scale_dtype=_kernel_dtype(weight.rows()))

    def apply(self, x_RK: Tensor) -> Tensor:
        """Return x W^T in the dtype of ``x_RK``, computed in that of the scales."""
        x = x_RK.to(self.scale_N.dtype).contiguous()
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.codes_NK, self.scale_N)
        return y.to(x_RK.dtype)
