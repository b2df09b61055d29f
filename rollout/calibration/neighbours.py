"""What else ran on our cores: a calibration taken beside other work is wrong without looking so."""

import os
import resource
import time
from pathlib import Path

from rollout.cores import usable_cores

STAT = Path("/proc/stat")

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

LEAST_S = 0.5
"""Shorter spans say nothing: the system counts in hundredths of a second."""


class Neighbours:
    """Counts from its creation on. Time that a hypervisor gave to others counts too."""

    def __init__(self) -> None:
        self._busy_s, self._own_s, self._at_s = _busy_s(), _own_s(), time.monotonic()

    def share(self) -> float | None:
        """Return the share of our cores' time that others took; None where that cannot be told."""
        busy_s, span_s = _busy_s(), time.monotonic() - self._at_s
        if busy_s is None or self._busy_s is None or span_s < LEAST_S:
            return None
        others_s = (busy_s - self._busy_s) - (_own_s() - self._own_s)
        return min(1.0, max(0.0, others_s / (span_s * len(usable_cores()))))


def _own_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _busy_s() -> float | None:
    """Return seconds our cores were not idle, since boot; None without /proc."""
    try:
        lines = STAT.read_text().splitlines()
    except OSError:
        return None
    ours = {f"cpu{core}" for core in usable_cores()}
    ticks, found = 0, 0
    for name, *numbers in (line.split() for line in lines if line):
        if name in ours:
            # user nice system idle iowait irq softirq steal; guests are counted within user.
            user, nice, system, _, _, irq, softirq, steal = (int(n) for n in numbers[:8])
            ticks += user + nice + system + irq + softirq + steal
            found += 1
    return ticks / TICKS_PER_S if found == len(ours) else None
