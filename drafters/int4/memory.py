"""Memory for packed weights and KV: large blocks that ask for huge pages.

Weights are cut from blocks that many linears share, because a forward walks all of them once: in pages of
4 KiB that costs a translation miss for every page, and the processor's own prefetch stops at each page's end.
"""

import contextlib
import mmap
import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
"""What is asked of the system at a time. Only what is written takes memory."""

_ALIGN_BYTES = 64

_HUGE_PAGE = getattr(mmap, "MADV_HUGEPAGE", None)


@dataclass(slots=True)
class _Chunk:
    memory: "weakref.ref[mmap.mmap]"
    """Weak: only the buffers cut from a chunk keep it."""
    used_bytes: int


_current: list[_Chunk] = []
_lock = threading.Lock()


def zeroed_bytes(count: int) -> Tensor:
    """Return ``count`` zero bytes (uint8) at an address that never changes, beside those taken before."""
    with _lock:
        chunk = _current[0] if _current else None
        memory = None if chunk is None else chunk.memory()
        if chunk is None or memory is None or chunk.used_bytes + count > len(memory):
            memory = _new_memory(max(count, CHUNK_BYTES))
            chunk = _Chunk(memory=weakref.ref(memory), used_bytes=0)
            _current[:] = [chunk]
        start = chunk.used_bytes
        chunk.used_bytes = start + -(-count // _ALIGN_BYTES) * _ALIGN_BYTES
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start)


def lazy_bytes(count: int) -> Tensor:
    """Return ``count`` zero bytes (uint8) of their own, given back to the system with the tensor.

    What is never written takes no memory: a pool may be far larger than what is used of it.
    """
    return torch.frombuffer(_new_memory(count), dtype=torch.uint8)


def _new_memory(count: int) -> mmap.mmap:
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE_PAGE is not None:
        with contextlib.suppress(OSError):  # a kernel without huge pages: ordinary ones serve, only slower
            memory.madvise(_HUGE_PAGE)
    return memory
