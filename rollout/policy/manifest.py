"""What a weight update says it will send. Light: whoever passes updates on need not load torch."""

from dataclasses import dataclass


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
