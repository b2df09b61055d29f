"""Weight updates as transactions: what must be sent, what was sent, and the one place that compares.

Nothing here touches a live policy. A ``WeightStage`` either returns a complete, checked state or
refuses the update whole and says everything that is wrong with it.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.policy.layout import GATE_BIAS, GATE_WEIGHT, fused_linears, norm_weights
from rollout.policy.manifest import TensorSpec, UpdateManifest, malformed, version_number
from rollout.policy.spec import ModelSpec

log = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor an update must carry. A tied policy has no ``lm_head.weight``."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for fused in fused_linears(spec):
        for module, size in zip(fused.modules, fused.sizes, strict=True):
            shapes[f"{module}.weight"] = (size, fused.in_features)
            if fused.bias:
                shapes[f"{module}.bias"] = (size,)
    for _, name, size in norm_weights(spec):
        shapes[name] = (size,)
    if spec.exit_gate:
        shapes |= {GATE_WEIGHT: (1, spec.hidden_size), GATE_BIAS: (1,)}
    if not spec.tie_embeddings:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def may_cast(sent: str, live: str) -> bool:
    """Whether a tensor sent in one dtype may update a policy of another: same, or float32 to bfloat16."""
    return sent == live or (sent, live) == ("float32", "bfloat16")


def checksum(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of names, dtypes, shapes and bytes; the order in which they come does not matter.

    Raises ``WeightUpdateError`` naming everything that is no named, dense tensor.
    """
    reads = sorted(_reads(tensors), key=lambda read: str(read[0]))
    # Hashing releases the interpreter lock: one thread per core halves the time of an update here.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(lambda read: _digest(read[0], read[1]()), reads))
    problems = [str(digest) for digest in digests if isinstance(digest, WeightUpdateError)]
    if problems:
        raise WeightUpdateError("; ".join(problems))
    return hashlib.sha256(b"".join(d for d in digests if isinstance(d, bytes))).hexdigest()


def _digest(name: str, tensor: Tensor) -> bytes | WeightUpdateError:
    try:
        array = as_array(name, tensor)
    except WeightUpdateError as error:
        return error
    digest = hashlib.sha256(f"{name} {dtype_name(tensor.dtype)} {tuple(tensor.shape)}\n".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


def as_array(name: str, tensor: Tensor) -> NDArray[np.generic]:
    """Return a tensor's numbers as they are sent: bfloat16 as its 16 bits, not copied where it can be seen.

    Raises ``WeightUpdateError`` for what has no numbers, or none that numpy knows.
    """
    if not isinstance(name, str):
        raise WeightUpdateError(f"{name!r} is a {type(name).__name__}, not the name of a tensor")
    if not isinstance(tensor, Tensor):
        raise WeightUpdateError(f"{name} is a {type(tensor).__name__}, not a tensor")
    try:
        flat = tensor.detach().cpu().contiguous()
        array: NDArray[np.generic] = (
            flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat
        ).numpy()
    except (RuntimeError, TypeError, ValueError) as error:
        kind = f"{dtype_name(tensor.dtype)}, {tensor.layout}, on {tensor.device}"
        raise WeightUpdateError(f"{name} ({kind}) cannot be sent: {error}") from error
    return array


def manifest(state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int) -> UpdateManifest:
    """Return the manifest of an update that will send exactly these tensors.

    Raises ``WeightUpdateError`` when the version is no integer or something among them is no named tensor.
    """
    number = version_number(version)
    pairs = list(_pairs(state))
    digest = checksum(pairs)
    specs = tuple(
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
        for name, tensor in pairs
    )
    return UpdateManifest(version=number, tensors=specs, checksum=digest)


def _pairs(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def _reads(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> Iterable[tuple[str, Callable[[], Tensor]]]:
    """Yield names, each with how to get its tensor: a mapping may read it from a file only then."""
    if isinstance(tensors, Mapping):
        return ((name, partial(tensors.__getitem__, name)) for name in tensors)
    return ((name, partial(_itself, tensor)) for name, tensor in tensors)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class WeightStage:
    """One open update. It keeps references to what it is given until ``finish``, and copies nothing."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype | str, live_version: int, manifest: UpdateManifest
    ) -> None:
        """Open an update. Raises ``WeightUpdateError`` with all that is wrong with its manifest."""
        problems = malformed(manifest)
        if problems:
            raise refusal(manifest.version, problems)
        self.manifest = manifest
        self._spec = spec
        self._live = dtype_name(dtype)
        self._expected = expected_tensors(spec)
        self._declared = {t.name: t for t in manifest.tensors}
        self._received: dict[str, Tensor] = {}
        self._problems: list[str] = []
        problems = self._manifest_problems(live_version)
        if problems:
            raise refusal(manifest.version, problems)

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take one bucket. What is wrong with it is kept for ``finish``, so that all of it is reported."""
        for name, tensor in tensors:
            declared = self._declared.get(name)
            if declared is None:
                hint = _closest(name, self._declared.keys() - self._received.keys())
                self._problems.append(f"{name} was sent but is not in the manifest{hint}")
            elif name in self._received:
                self._problems.append(f"{name} was sent twice")
            else:
                self._received[name] = tensor
                sent = (tuple(tensor.shape), dtype_name(tensor.dtype))
                if sent != (declared.shape, declared.dtype):
                    self._problems.append(
                        f"{name} was sent as {sent[1]} {sent[0]}, "
                        f"its manifest says {declared.dtype} {declared.shape}"
                    )

    def finish(self) -> dict[str, Tensor]:
        """Return the whole new state in the live dtype, without a tied head.

        Raises ``WeightUpdateError`` with everything found wrong; the stage is spent either way.
        """
        problems = [*self._problems]
        problems += [f"{name} was never sent" for name in self._declared if name not in self._received]
        if not problems and checksum(self._received) != self.manifest.checksum:
            problems.append("the checksum of the tensors received is not the manifest's")
        live = getattr(torch, self._live)
        # Checked after the cast: a large float32 value may round to infinity.
        state = {name: tensor.detach().to(live) for name, tensor in self._received.items()}
        problems += [f"{name} holds NaN or infinity" for name, t in state.items() if not is_finite(t)]
        problems += self._tie_problems(state)
        if problems:
            raise refusal(self.manifest.version, problems)
        rounded = sum(t.dtype != live for t in self._received.values())
        if rounded:
            log.info(
                "version %d: %d float32 tensors rounded to %s", self.manifest.version, rounded, self._live
            )
        return {name: state[name] for name in self._expected}

    def _manifest_problems(self, live_version: int) -> list[str]:
        problems = []
        if self.manifest.version <= live_version:
            problems.append(
                f"version {self.manifest.version} does not exceed the live version {live_version}"
            )
        if len(self._declared) != len(self.manifest.tensors):
            names = [t.name for t in self.manifest.tensors]
            problems += [
                f"{name} is listed twice" for name in sorted({n for n in names if names.count(n) > 1})
            ]
        problems += [f"{name} is missing" for name in self._expected if name not in self._declared]
        for name, tensor in self._declared.items():
            shape = self._shape(name)
            if shape is None:
                hint = _closest(name, self._expected.keys() - self._declared.keys())
                problems.append(f"{name} is not a tensor of this policy{hint}")
                continue
            if tensor.shape != shape:
                problems.append(f"{name} has shape {tensor.shape}, expected {shape}")
            if not may_cast(tensor.dtype, self._live):
                problems.append(f"{name} is {tensor.dtype} and cannot update a {self._live} policy")
        return problems

    def _shape(self, name: str) -> tuple[int, ...] | None:
        if name == HEAD and self._spec.tie_embeddings:
            return self._expected[EMBEDDING]
        return self._expected.get(name)

    def _tie_problems(self, state: Mapping[str, Tensor]) -> list[str]:
        if not self._spec.tie_embeddings or HEAD not in state or EMBEDDING not in state:
            return []
        # Compared as sent: two values that only round to the same bfloat16 are not tied.
        head, embedding = self._received[HEAD], self._received[EMBEDDING]
        if head.dtype == embedding.dtype and torch.equal(head, embedding):
            return []
        return [f"{HEAD} differs from {EMBEDDING}, and this policy ties them"]


def refusal(version: int, problems: list[str]) -> WeightUpdateError:
    """Return the error of an update refused whole."""
    return WeightUpdateError(f"update to version {version} refused whole: {'; '.join(problems)}")


def _closest(name: str, missing: Iterable[str]) -> str:
    """Return a hint, or nothing: the missing name most like this one."""
    found = get_close_matches(name, sorted(missing), n=1, cutoff=0.8)
    return f" (closest: {found[0]})" if found else ""


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    # One pass and no temporary the size of the tensor; NaN propagates through both ends.
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
