"""The cores this process may use: fewer than the machine has, where a container or the user says so."""

import os


def usable_cores() -> frozenset[int]:
    """Return their numbers."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
