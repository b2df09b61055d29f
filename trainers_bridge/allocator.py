"""Keeps freed memory in the process: a training step on the CPU frees and takes back gigabytes.

A step's logits alone are hundreds of megabytes (samples x tokens x vocabulary x 4 bytes). glibc gives blocks
of that size back to the system when they are freed, so every step pays for mapping and clearing them again.
"""

import ctypes
import logging
import platform

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
"""Parameter numbers of glibc's ``mallopt``."""

KEEP_BYTES = 2**31 - 1
"""Free memory at the top of the heap that is kept: the most ``mallopt`` takes, an int."""


def keep_freed_memory() -> bool:
    """Tell the C library to reuse freed memory; return whether it could be told (glibc only)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, KEEP_BYTES))
    told = all(libc.mallopt(number, value) == 1 for number, value in settings)
    log.info("allocator: freed memory is %s", "kept" if told else "not kept")
    return told
