"""Packed linears of the compiled kernel: 4-bit and 8-bit weights in the layout of ``linear_int4.h``.

The compiled decoder reads ``packed`` (and ``scales``) by address, so a rebuild writes into the same buffers.
Shapes: N out features, K in features, P panels of 16 out features, C blocks of 32 in features.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from drafters.int4.memory import zeroed_bytes
from drafters.kernels.build import KernelBuildError, load
from drafters.types import DraftError, LinearWeight

COLUMNS = 16
BLOCK = 32
BLOCK_BYTES_4 = 320
"""16 x 32 nibbles, then 16 scales and 16 minima in bfloat16."""

INT4_FOLDER = Path(__file__).parent
"""Where ``linear_int4.h`` is, for kernels that include it."""


def library(defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Return the rounding and linear functions of ``quantize.cpp``. Raises ``DraftError``."""
    try:
        return load(INT4_FOLDER / "quantize.cpp", defines=defines)
    except KernelBuildError as error:
        raise DraftError(f"the int4 kernel could not be built: {error}") from error


def panels_of(out_features: int) -> int:
    """Return how many panels hold ``out_features``."""
    return -(-out_features // COLUMNS)


def blocks_of(in_features: int) -> int:
    """Return how many blocks hold ``in_features``."""
    return -(-in_features // BLOCK)


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _source(weight: LinearWeight) -> tuple[str, Tensor]:
    """Return which entry point reads this weight, and the memory it reads."""
    panels = weight.panels
    if panels is None:
        rows_NK = weight.rows().detach()
        if rows_NK.device.type != "cpu":
            raise DraftError(
                f"build refused: {weight.name} is on {rows_NK.device}, the compiled kernel runs on CPU"
            )
        return "rows", rows_NK.float().contiguous()
    expected = panels_of(weight.out_features) * COLUMNS * weight.in_features
    if panels.element_size() != 2 or panels.numel() != expected or not panels.is_contiguous():
        raise DraftError(
            f"{weight.name}: panels hold {panels.numel()} values, expected {expected} of bfloat16"
        )
    return "panels", panels


class _Packed:
    """What the two widths share."""

    bits: int

    def __init__(
        self, *, name: str, out_features: int, in_features: int, defines: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.out_features = out_features
        self.in_features = in_features
        self.kernel = library(defines)

    def _quantize(self, weight: LinearWeight, *arguments: ctypes.c_void_p | int) -> None:
        layout, source = _source(weight)
        quantize = getattr(self.kernel, f"int{self.bits}_quantize_{layout}")
        refused = quantize(
            _address(source), self.out_features, self.in_features, *arguments, torch.get_num_threads()
        )
        if refused:
            raise DraftError(f"build refused: {weight.name} has a weight that is not finite or exceeds 1e38")

    def _linear(self, x_RK: Tensor, *weights: ctypes.c_void_p) -> Tensor:
        rows, in_features = x_RK.shape
        if in_features != self.in_features:
            raise ValueError(f"{self.name}: input has {in_features} features, expected {self.in_features}")
        x = x_RK.detach().float().contiguous()
        y = torch.empty(rows, self.out_features)
        linear = getattr(self.kernel, f"int{self.bits}_linear_rows")
        shape = (self.out_features, self.in_features)
        linear(*weights, *shape, _address(x), rows, _address(y), torch.get_num_threads())
        return y.to(x_RK.dtype)


class PackedInt4Linear(_Packed):
    """4-bit weights with a bfloat16 scale and minimum per group and out feature."""

    bits = 4

    def __init__(
        self, *, name: str, out_features: int, in_features: int, group: int, defines: tuple[str, ...] = ()
    ) -> None:
        super().__init__(name=name, out_features=out_features, in_features=in_features, defines=defines)
        if group < BLOCK or group % BLOCK:
            raise ValueError(f"group must be a multiple of {BLOCK}, got {group}")
        self.group = group
        blocks = panels_of(out_features) * blocks_of(in_features)
        self.packed = zeroed_bytes(blocks * BLOCK_BYTES_4)
        """The panels; its address never changes."""
        self.scales: Tensor | None = None
        """Scales stand inside the panels."""

    @property
    def weight_bytes(self) -> int:
        """Bytes one forward reads."""
        return self.packed.numel()

    def rebuild(self, weight: LinearWeight) -> None:
        """Round ``weight`` into the same buffer. Raises ``DraftError``; the buffer is then undefined."""
        self._quantize(weight, self.group, _address(self.packed))

    def apply(self, x_RK: Tensor) -> Tensor:
        """Return x W^T with x rounded to 8 bits per row and block of 32."""
        return self._linear(x_RK, _address(self.packed))

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes (N, K) uint8, and scale and minimum (N, C) bfloat16, one per block of 32."""
        panels, blocks = panels_of(self.out_features), blocks_of(self.in_features)
        parts = self.packed.view(panels, blocks, BLOCK_BYTES_4)
        nibbles = parts[..., : COLUMNS * BLOCK // 2].view(panels, blocks, 8, 8, 4)
        # panel, block, j, lane, byte -> panel, half, lane, block, j, byte: columns first, then k.
        halves = torch.stack([nibbles & 15, nibbles >> 4], dim=1).permute(0, 1, 4, 2, 3, 5)
        codes = halves.reshape(panels * COLUMNS, blocks * BLOCK)
        factors = parts[..., COLUMNS * BLOCK // 2 :].contiguous().view(torch.bfloat16)
        # panel, block, (scale | minimum), slot = 2 * lane + half -> columns, block
        factors = factors.view(panels, blocks, 2, 8, 2).permute(2, 0, 4, 3, 1)
        scale, minimum = factors.reshape(2, panels * COLUMNS, blocks)[:, : self.out_features]
        return codes[: self.out_features, : self.in_features].contiguous(), scale, minimum


class PackedInt8Linear(_Packed):
    """8-bit weights with one float32 scale per out feature: the head."""

    bits = 8

    def __init__(
        self, *, name: str, out_features: int, in_features: int, defines: tuple[str, ...] = ()
    ) -> None:
        super().__init__(name=name, out_features=out_features, in_features=in_features, defines=defines)
        panels, blocks = panels_of(out_features), blocks_of(in_features)
        self.packed = zeroed_bytes(panels * blocks * COLUMNS * BLOCK).view(torch.int8)
        """The panels; its address never changes."""
        self.scales = torch.zeros(panels * COLUMNS)
        """Per out feature, padded to whole panels; its address never changes."""

    @property
    def weight_bytes(self) -> int:
        """Bytes one forward reads."""
        return self.packed.numel() + 4 * self.scales.numel()

    def rebuild(self, weight: LinearWeight) -> None:
        """Round ``weight`` into the same buffers. Raises ``DraftError``; they are then undefined."""
        self._quantize(weight, _address(self.packed), _address(self.scales))

    def apply(self, x_RK: Tensor) -> Tensor:
        """Return x W^T with x rounded to 8 bits per row and block of 32."""
        return self._linear(x_RK, _address(self.packed), _address(self.scales))

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return codes (N, K) int8 and scale (N,) float32."""
        panels, blocks = panels_of(self.out_features), blocks_of(self.in_features)
        # panel, block, j, column, byte -> panel, column, block, j, byte
        codes = self.packed.view(panels, blocks, 8, COLUMNS, 4).permute(0, 3, 1, 2, 4)
        codes = codes.reshape(panels * COLUMNS, blocks * BLOCK)
        return codes[: self.out_features, : self.in_features].contiguous(), self.scales[: self.out_features]
