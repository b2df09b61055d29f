"""What a weight update says it will send. Light: whoever passes updates on need not load torch."""

import operator
from dataclasses import dataclass

from rollout.errors import WeightUpdateError


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a weight update, by its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """``"bfloat16"``, ``"float32"``, ... A float32 tensor may update a bfloat16 policy: it is rounded to
    nearest even. Any other difference is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateManifest:
    """What a weight update says it will send."""

    version: int
    """Must exceed the live version."""

    tensors: tuple[TensorSpec, ...]
    checksum: str
    """``rollout.policy.weights.checksum`` over all tensors as sent, in name order."""


def version_number(version: object) -> int:
    """Return a version as the integer it is. Raises ``WeightUpdateError`` for anything else, True too."""
    refused = WeightUpdateError(f"version {version!r} is a {type(version).__name__}, not an integer")
    if isinstance(version, bool):
        raise refused
    try:
        return operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        raise refused from None


def malformed(manifest: UpdateManifest) -> list[str]:
    """Return what is not of the type it should be: a manifest crosses processes, where nobody checked it."""
    problems = []
    if type(manifest.version) is not int:
        problems.append(f"version {manifest.version!r} is not an integer")
    if not isinstance(manifest.checksum, str):
        problems.append(f"checksum {manifest.checksum!r} is not text")
    for tensor in manifest.tensors:
        shape = tensor.shape
        if not (isinstance(tensor.name, str) and isinstance(tensor.dtype, str)):
            problems.append(f"{tensor.name!r} of dtype {tensor.dtype!r} is not named in text")
        elif not (isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)):
            problems.append(f"{tensor.name} has {shape!r} as its shape")
    return problems
