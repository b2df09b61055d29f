"""The kernels of flash-attn, versions 2 and 3, behind one pair of calls. **Not run** on hardware.

What each wants, from its own interface (``flash_attn/flash_attn_interface.py``,
``csrc/flash_attn/flash_api.cpp``, ``hopper/flash_attn_interface.py``): float16 or bfloat16, head dimensions
that are multiples of 8 up to 256, int32 lengths and tables; version 2 from compute capability 8.0 on, version
3 on 9.x. Both align a causal mask to the last query and the last key. Pages of version 2 must be multiples of
256 tokens, those of version 3 may be of any size.

Shapes: K rows one after another, S sequences, Q rows of each, T keys of each, L keys one after another, P
pages of a table, C pages of a pool, A query heads, N KV heads, H head dimension.
"""

import importlib
import importlib.metadata
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from rollout.errors import UnsupportedError
from rollout.policy.spec import ModelSpec

MODULES = {3: "flash_attn_interface", 2: "flash_attn.flash_attn_interface"}
"""By version. flash-attn 4 also installs a package ``flash_attn``, without the second module."""

DISTRIBUTIONS = {3: "flash_attn_3", 2: "flash_attn"}

INSTALL = "pip install --no-build-isolation 'taildraft[flash]' builds version 2 where nvcc is"


class VarlenKernel(Protocol):
    """Causal attention of sequences of any lengths, one after another in memory."""

    def __call__(
        self,
        query_KAH: Tensor,
        keys_LNH: Tensor,
        values_LNH: Tensor,
        *,
        query_starts: Tensor,
        key_starts: Tensor,
        most_rows: int,
        most_keys: int,
        window: int | None,
    ) -> Tensor:
        """Return (K, A, H). Starts are int32 (S + 1,); rows are the last of their sequence's keys."""
        ...


class CacheKernel(Protocol):
    """Causal attention of equally many rows per sequence over cached keys, which it may split."""

    def __call__(
        self,
        query_SQAH: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        lengths_S: Tensor,
        table_SP: Tensor | None,
        window: int | None,
    ) -> Tensor:
        """Return (S, Q, A, H). Keys and values are (S, T, N, H), or with a table the pool's pages
        (C, page tokens, N, H); of either the first ``lengths_S`` (int32) of each sequence are read, and rows
        are the last of those."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashKernels:
    """One installed version."""

    description: str
    varlen: VarlenKernel
    cache: CacheKernel
    page_multiple: int
    """Tokens per page must be a multiple of it for ``cache`` to read pages where they are."""

    table_recordable: bool
    """Whether ``cache`` with a table may be recorded. Version 2 then reads the longest length to the host
    (``mha_fwd_kvcache`` in ``flash_api.cpp``, from 2.8.4 on at the latest)."""


def flash_refusal(spec: ModelSpec, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return why no flash kernel takes this policy on a device of this compute capability, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return (
            f"flash-attn computes in bfloat16 or float16, engine.dtype is {str(dtype).removeprefix('torch.')}"
        )
    if spec.head_dim % 8 or spec.head_dim > 256:
        return (
            f"flash-attn takes head dimensions that are multiples of 8 up to 256, this one is {spec.head_dim}"
        )
    if capability < (8, 0):
        return f"flash-attn needs compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    return None


def find_flash(capability: tuple[int, int]) -> FlashKernels:
    """Return what is installed for this device, version 3 first. Raises ``UnsupportedError`` for nothing."""
    versions = (3, 2) if capability[0] == 9 else (2,)
    problems = []
    for version in versions:
        try:
            module = importlib.import_module(MODULES[version])
        except (ImportError, OSError) as error:  # OSError: a library built for another torch
            problems.append(f"{MODULES[version]}: {error}")
        else:
            return flash3_kernels(module) if version == 3 else flash2_kernels(module)
    raise UnsupportedError(f"no flash-attn can be imported ({'; '.join(problems)}); {INSTALL}")


def flash2_kernels(module: ModuleType) -> FlashKernels:
    """Return the kernels of ``flash_attn.flash_attn_interface``."""
    return _kernels(module, 2, table="block_table", page_multiple=256, table_recordable=False)


def flash3_kernels(module: ModuleType) -> FlashKernels:
    """Return the kernels of ``flash_attn_interface``."""
    return _kernels(module, 3, table="page_table", page_multiple=1, table_recordable=True)


def _kernels(
    module: ModuleType, version: int, *, table: str, page_multiple: int, table_recordable: bool
) -> FlashKernels:
    """Return the kernels of a version that calls its table of pages ``table``."""

    def varlen(
        query_KAH: Tensor,
        keys_LNH: Tensor,
        values_LNH: Tensor,
        *,
        query_starts: Tensor,
        key_starts: Tensor,
        most_rows: int,
        most_keys: int,
        window: int | None,
    ) -> Tensor:
        result = module.flash_attn_varlen_func(
            query_KAH,
            keys_LNH,
            values_LNH,
            cu_seqlens_q=query_starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=most_rows,
            max_seqlen_k=most_keys,
            causal=True,
            window_size=_window_size(window),
        )
        # Early releases of version 3 return the sums of their softmax as well.
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    def cache(
        query_SQAH: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        lengths_S: Tensor,
        table_SP: Tensor | None,
        window: int | None,
    ) -> Tensor:
        out: Tensor = module.flash_attn_with_kvcache(
            query_SQAH,
            keys,
            values,
            cache_seqlens=lengths_S,
            causal=True,
            window_size=_window_size(window),
            **{table: table_SP},
        )
        return out

    return FlashKernels(
        description=f"flash-attn {_installed_version(DISTRIBUTIONS[version]) or version}",
        varlen=varlen,
        cache=cache,
        page_multiple=page_multiple,
        table_recordable=table_recordable,
    )


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _window_size(window: int | None) -> tuple[int, int]:
    """Return how far a row sees to the left, itself not counted, and to the right; -1 is all."""
    return (-1, -1) if window is None else (window - 1, 0)
