"""The kernels behind one interface: every linear can be rebuilt in place from the live policy.

``compiled``: packed, read by the compiled decoder and, through a call of its own, by others; CPU only.
``aten``: torch's int4 operators. ``int8``: torch's integer product, 8 bits in every linear. ``nf4``:
bitsandbytes. ``torch``: the rounded weight multiplied out again, slow and right everywhere: the oracle. No
kernel replaces another here (``menu.py`` chooses); what one cannot do is a ``DraftError`` that names the
linear.

Shapes: R rows, N out features, K in features.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.int4.rounding import Int4Rounding, Int8Rounding, round_to_int4, round_to_int8_rows
from drafters.types import LinearWeight, QuantizedLinear

Kernel = Literal["compiled", "aten", "int8", "nf4", "torch"]
Bits = Literal[4, 8]


class RebuildableLinear(QuantizedLinear, Protocol):
    """A drafter's linear that follows the policy into the same memory."""

    def rebuild(self, weight: LinearWeight) -> None:
        """Round ``weight`` into this linear's buffers, whose addresses stay. Raises ``DraftError``."""
        ...


class TorchLinear:
    """The oracle: a weight rounded to ``bits`` and multiplied out, in float32, or float64 like the policy."""

    def __init__(self, weight: LinearWeight, *, bits: Bits, group: int) -> None:
        rows_NK = weight.rows()
        self.name = weight.name
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.bits: int = bits
        self.group = group
        dtype = torch.float64 if rows_NK.dtype == torch.float64 else torch.float32
        self.weight_NK = torch.zeros(rows_NK.shape, dtype=dtype, device=rows_NK.device)
        """Its address never changes."""

    @property
    def weight_bytes(self) -> int:
        """Bytes one forward reads: this kernel saves none."""
        return self.weight_NK.nbytes

    def rebuild(self, weight: LinearWeight) -> None:
        """Round ``weight`` into the same buffer. Raises ``DraftError``."""
        rows_NK = weight.rows()
        rounded: Int4Rounding | Int8Rounding
        if self.bits == 4:
            rounded = round_to_int4(rows_NK, self.group, name=weight.name)
        else:
            rounded = round_to_int8_rows(rows_NK, name=weight.name)
        self.weight_NK.copy_(rounded.dequantize())

    def apply(self, x_RK: Tensor) -> Tensor:
        """Return x W^T in the dtype of ``x_RK``."""
        return F.linear(x_RK.to(self.weight_NK.dtype), self.weight_NK).to(x_RK.dtype)


def _compiled(weight: LinearWeight, bits: Bits, group: int) -> RebuildableLinear:
    from drafters.int4.packed import PackedInt4Linear, PackedInt8Linear

    name, out_features, in_features = weight.name, weight.out_features, weight.in_features
    if bits == 4:
        return PackedInt4Linear(name=name, out_features=out_features, in_features=in_features, group=group)
    return PackedInt8Linear(name=name, out_features=out_features, in_features=in_features)


def _aten(weight: LinearWeight, bits: Bits, group: int) -> RebuildableLinear:
    from drafters.int4.aten import AtenInt4Linear, AtenInt8Linear

    return AtenInt4Linear(weight, group=group) if bits == 4 else AtenInt8Linear(weight)


def _int8(weight: LinearWeight, bits: Bits, group: int) -> RebuildableLinear:
    from drafters.int4.dynamic_int8 import DynamicInt8Linear

    return DynamicInt8Linear(weight)


def _nf4(weight: LinearWeight, bits: Bits, group: int) -> RebuildableLinear:
    from drafters.int4.aten import AtenInt8Linear
    from drafters.int4.nf4 import Nf4Linear

    return Nf4Linear(weight, group=group) if bits == 4 else AtenInt8Linear(weight)


def _torch(weight: LinearWeight, bits: Bits, group: int) -> RebuildableLinear:
    return TorchLinear(weight, bits=bits, group=group)


KERNELS: dict[Kernel, Callable[[LinearWeight, Bits, int], RebuildableLinear]] = {
    "compiled": _compiled,
    "aten": _aten,
    "int8": _int8,
    "nf4": _nf4,
    "torch": _torch,
}
"""Every kernel there is, and of two that take as long the first is preferred."""


def build_linear(kernel: Kernel, weight: LinearWeight, *, bits: Bits, group: int) -> RebuildableLinear:
    """Return a linear of the shape of ``weight`` with persistent buffers, already rounded from it.

    ``bits`` are the fewest it may keep: ``int8`` keeps 8. Raises ``DraftError`` when the kernel cannot take
    this shape, or the weight is not finite.
    """
    linear = KERNELS[kernel](weight, bits, group)
    linear.rebuild(weight)
    return linear
