"""Weights that stay in their files: a state dict that reads a tensor each time it is asked for one.

Whoever packs weights needs one tensor at a time; a state dict of all of them would be a second copy of the
policy in memory while it is packed.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollout.errors import UnsupportedError


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of safetensors files by name, in files' order. What a caller drops is out of memory.

    A file that changed since is refused with ``UnsupportedError``: what was checked is what is served.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        from safetensors import safe_open

        self._states = {file: _state_of(file) for file in files}
        self._files: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                self._files.update(dict.fromkeys(opened.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        file = self._files[name]
        if _state_of(file) != self._states[file]:
            raise UnsupportedError(f"{file} was changed while the policy was read from it: start again")
        # Opened for this tensor alone: all tensors of one opening share its memory until the last is gone.
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class SelectedTensors(Mapping[str, Tensor]):
    """Some tensors of another mapping, in the order named and in one dtype, read when asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._names = dict.fromkeys(names)
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[name].to(self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _state_of(file: Path) -> tuple[int, int, int]:
    """Return what differs once a file was written or replaced."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
