"""Memory of packed weights and KV: zero, aligned, never shared, and given back with the last buffer."""

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from drafters.int4 import memory


def test_buffers_are_zero_aligned_and_apart() -> None:
    sizes = [1, 63, 64, 65, 320, 5000]
    buffers = [memory.zeroed_bytes(size) for size in sizes]
    assert [b.numel() for b in buffers] == sizes
    assert all(b.dtype == torch.uint8 and b.data_ptr() % 64 == 0 and not b.any() for b in buffers)
    for value, buffer in enumerate(buffers, start=1):
        buffer.fill_(value)
    for value, buffer in enumerate(buffers, start=1):
        assert bool((buffer == value).all())


def test_a_buffer_larger_than_a_chunk_gets_its_own() -> None:
    small = memory.zeroed_bytes(100)
    large = memory.zeroed_bytes(memory.CHUNK_BYTES + 1)
    assert large.numel() == memory.CHUNK_BYTES + 1
    large[-1] = 1
    assert not small.any()


def test_a_chunk_goes_with_its_last_buffer() -> None:
    memory._current.clear()  # whatever earlier tests hold stays theirs
    first, second = memory.zeroed_bytes(10), memory.zeroed_bytes(10)
    chunk: weakref.ref[mmap.mmap] = memory._current[0].memory
    del first
    gc.collect()
    assert chunk() is not None
    del second
    gc.collect()
    assert chunk() is None
    assert not memory.zeroed_bytes(10).any()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_a_lazy_block_takes_memory_where_it_is_written_and_gives_it_back() -> None:
    size, written, slack = 512 << 20, 64 << 20, 24 << 20
    before = _resident_bytes()
    block = memory.lazy_bytes(size)
    assert block.numel() == size
    assert _resident_bytes() - before < slack
    block[:written] = 1
    assert written - slack < _resident_bytes() - before < written + slack
    assert not block[written::4096].any()
    del block
    gc.collect()
    assert _resident_bytes() - before < slack
