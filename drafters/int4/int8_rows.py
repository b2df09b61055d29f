"""Weights of one linear in 8 bits with a scale per out feature, for torch's two int8 products.

Shapes: N out features, K in features.
"""

import torch

from drafters.int4.rounding import round_to_int8_rows
from drafters.types import LinearWeight


class Int8Rows:
    """Codes and scales in buffers whose addresses never change; zero until ``rebuild``."""

    bits = 8

    def __init__(self, weight: LinearWeight, *, scale_dtype: torch.dtype) -> None:
        self.name = weight.name
        self.out_features, self.in_features = weight.out_features, weight.in_features
        shape, device = (self.out_features, self.in_features), weight.rows().device
        self.codes_NK = torch.zeros(shape, dtype=torch.int8, device=device)
        self.scale_N = torch.zeros(self.out_features, dtype=scale_dtype, device=device)

    @property
    def weight_bytes(self) -> int:
        """Bytes one forward reads."""
        return self.codes_NK.nbytes + self.scale_N.nbytes

    def rebuild(self, weight: LinearWeight) -> None:
        """Round ``weight`` into the same buffers. Raises ``DraftError``."""
        rounded = round_to_int8_rows(weight.rows(), name=weight.name)
        self.codes_NK.copy_(rounded.codes_NK)
        self.scale_N.copy_(rounded.scale_N)
