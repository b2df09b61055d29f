"""The processor of this machine: what tells it from others that have its name or its features.

Two generations may share both, and compute and read memory at other speeds.
"""

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_FAMILY, _MODEL, _STEPPING = (
    ("cpu family", "CPU implementer"),
    ("model", "CPU part"),
    ("stepping", "CPU revision"),
)
"""What x86 and what Arm processors call it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """What the system says of the first processor. Numbers are None where it does not say."""

    name: str
    family: int | None
    model: int | None
    stepping: int | None
    features: tuple[str, ...]
    """Sorted."""

    @property
    def words(self) -> str:
        """It for people: ``AMD EPYC, family 23 model 1``."""
        told = [f"{n} {v}" for n, v in (("family", self.family), ("model", self.model)) if v is not None]
        return ", ".join([self.name, " ".join(told)] if told else [self.name])

    @property
    def identity(self) -> dict[str, object]:
        """All of it as plain data, with the architecture, for the names of what was timed on it."""
        return {"architecture": platform.machine(), **asdict(self)}


@cache
def processor() -> Processor:
    """Return this machine's processor."""
    return processor_of(_CPUINFO.read_text() if _CPUINFO.exists() else "")


def processor_of(cpuinfo: str) -> Processor:
    """Return the first processor of a text such as ``/proc/cpuinfo``."""
    lines = (line.partition(":") for line in cpuinfo.split("\n\n", 1)[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    return Processor(
        name=fields.get("model name") or platform.processor() or sys.platform,
        family=_number(fields, _FAMILY),
        model=_number(fields, _MODEL),
        stepping=_number(fields, _STEPPING),
        features=tuple(sorted((fields.get("flags") or fields.get("Features", "")).split())),
    )


def cache_bytes() -> dict[int, int]:
    """Return the size of each level of the first processor's caches for data; empty where it is not told."""
    found = {}
    for index in sorted(_CACHES.glob("index*")):
        try:
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
            if kind != "Instruction":
                found[int(level)] = int(size[:-1]) * _UNITS[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):  # a virtual machine may tell some of it only
            continue
    return found


def _number(fields: Mapping[str, str], names: Sequence[str]) -> int | None:
    for name in names:
        try:
            return int(fields[name], 0)
        except (KeyError, ValueError):
            continue
    return None
