"""A state dict as one object-store object that every host reads without a copy.

Arrays are zero-copy in Ray, torch tensors are not by default; bfloat16, which numpy does not know,
travels as its 16 bits.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.policy.weights import as_array

BUCKET_BYTES = 32 << 20
"""Staged between two rounds: a few milliseconds of work, so generation does not stall."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTensor:
    """One tensor as bytes numpy understands."""

    array: NDArray[np.generic]
    bfloat16: bool


WeightPayload = Mapping[str, PackedTensor]


def pack(state: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """Return ``state`` as arrays; tensors on the CPU are not copied.

    Raises ``WeightUpdateError`` naming a tensor that cannot be sent.
    """
    return {
        name: PackedTensor(array=as_array(name, tensor), bfloat16=tensor.dtype == torch.bfloat16)
        for name, tensor in state.items()
    }


def buckets(payload: WeightPayload) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in buckets. They are views of shared memory: read them, never write them."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, packed in payload.items():
        bucket.append((name, _tensor(packed)))
        size += packed.array.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _tensor(packed: PackedTensor) -> Tensor:
    with warnings.catch_warnings():
        # torch warns that read-only memory must not be written; nobody here does.
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(packed.array)
    return tensor.view(torch.bfloat16) if packed.bfloat16 else tensor
