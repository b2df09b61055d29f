"""Buffers that a decoder fills again in every forward: rounds of small policies are short, memory is dear."""

import torch
from torch import Tensor


class RowBuffer:
    """float32 rows of one width that grow as needed; the same memory is handed out every time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._views: dict[int, Tensor] = {}
        """By number of rows, all of the present memory: making a view takes longer than finding it."""

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return self._memory.nbytes

    def rows(self, rows: int, width: int) -> Tensor:
        """Return (rows, width) of unspecified content, valid until the next call; ``width`` is always one."""
        view = self._views.get(rows)
        if view is None:
            if self._memory.numel() < rows * width:
                self._memory = torch.empty(rows * width)
                self._views.clear()
            view = self._views[rows] = self._memory[: rows * width].view(rows, width)
        return view
