"""A linear that runs on the menu's kernel for its rows; layouts are packed when their rows first come.

Shapes: R rows, N out features, K in features.
"""

from torch import Tensor

from drafters.int4.linears import Bits, Kernel, RebuildableLinear, build_linear
from drafters.int4.menu import KernelMenu
from drafters.types import LinearWeight


class MenuLinear:
    """One linear of the policy in as many layouts as its rows have asked for; at first that for one row."""

    def __init__(self, weight: LinearWeight, *, bits: Bits, group: int, menu: KernelMenu) -> None:
        """Round ``weight``, which must stay the live one until ``rebuild``. Raises ``DraftError``."""
        self.name = weight.name
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.bits: int = bits
        self.group = group
        self._bits = bits
        self._menu = menu
        self._weight = weight
        self.layouts: dict[Kernel, RebuildableLinear] = {}
        """Packed so far, by kernel."""
        self._first = self._layout_for(1)

    @property
    def weight_bytes(self) -> int:
        """Bytes one forward of few rows reads."""
        return self._first.weight_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all layouts packed so far."""
        return sum(layout.weight_bytes for layout in self.layouts.values())

    def rebuild(self, weight: LinearWeight) -> None:
        """Round ``weight`` into the buffers of every layout there is. Raises ``DraftError``."""
        self._weight = weight
        for layout in self.layouts.values():
            layout.rebuild(weight)

    def apply(self, x_RK: Tensor) -> Tensor:
        """Return x W^T in the dtype of ``x_RK``. Raises ``DraftError`` where a new layout is refused."""
        return self._layout_for(x_RK.shape[0]).apply(x_RK)

    def _layout_for(self, rows: int) -> RebuildableLinear:
        kernel = self._menu.kernel_for(rows)
        layout = self.layouts.get(kernel)
        if layout is None:
            layout = build_linear(kernel, self._weight, bits=self._bits, group=self.group)
            self.layouts[kernel] = layout
        return layout
