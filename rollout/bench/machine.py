"""What a result was measured on: the machine, its memory and kernel speed in the same minutes, versions."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from controller.types import POLICY
from drafters.kernels.build import KernelBuildError, compiler, instruction_sets
from drafters.kernels.processor import cache_bytes, processor
from rollout.cores import usable_cores
from rollout.engine.native.engine import NativeEngine

READ_BYTES = 256 << 20
"""Of the read test: beyond any cache of a small machine, and read in tens of milliseconds."""

READ_PASSES = 4
RATE_ROWS_PER_SEQUENCE = 4
"""Rows per sequence of the forward that measures the rate: far into compute-bound at a full batch."""

FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)
"""Processor features that decide which kernels run."""


@dataclass(kw_only=True, slots=True)
class MemorySpeed:
    """Repeated short read tests, and when each was made."""

    started_s: float = field(default_factory=time.monotonic)
    bytes_per_s: list[float] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    """Seconds since the first moment of the benchmark."""

    _data_N: torch.Tensor | None = None

    def measure(self) -> float:
        """Read a large buffer with torch's threads and return the best of a few passes, bytes per second."""
        if self._data_N is None:
            self._data_N = torch.ones(READ_BYTES // 4)
        best_s = float("inf")
        for _ in range(READ_PASSES):
            started = time.perf_counter()
            self._data_N.sum()
            best_s = min(best_s, time.perf_counter() - started)
        self.bytes_per_s.append(READ_BYTES / best_s)
        self.at_s.append(time.monotonic() - self.started_s)
        return self.bytes_per_s[-1]


def kernel_rate(engine: NativeEngine, part: str = POLICY) -> float:
    """Return the operations per second of a part's own forward at many rows, best of a few."""
    sequences = engine.traits.max_batch
    rows = RATE_ROWS_PER_SEQUENCE * sequences
    best_s = min(
        engine.time_forward(part, rows=rows, context_tokens=8, sequences=sequences) for _ in range(4)
    )
    return engine.part_shapes()[part].flops_per_row * rows / best_s


def machine() -> dict[str, Any]:
    """Return what the processor and memory are. None is what the system does not tell."""
    cpu, caches = processor(), cache_bytes()
    return {
        "cpu": cpu.name,
        "processor": cpu.words,
        "cpu_family": cpu.family,
        "cpu_model": cpu.model,
        "cpu_stepping": cpu.stepping,
        "architecture": platform.machine(),
        "system": platform.system(),
        "processors": os.cpu_count(),
        "cores_usable": len(usable_cores()),
        "flags": [flag for flag in FLAGS if flag in cpu.features],
        "kernel_instruction_sets": list(instruction_sets()),
        "l2_bytes": caches.get(2),
        "l3_bytes": caches.get(3),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
    }


def free_memory_bytes() -> int:
    """Return the memory that can be had without swapping; 0 where the system does not say."""
    told = Path("/proc/meminfo")
    if told.exists():
        for line in told.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def versions() -> dict[str, str | None]:
    """Return the versions of everything that computes."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("taildraft", "torch", "transformers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["compiler"] = _compiler_version()
    return found


def commit() -> dict[str, Any] | None:
    """Return the commit of the checkout this runs from and whether it was changed; None when installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    head, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "-uno")
    return None if head is None else {"id": head, "changed": bool(status)}


def _compiler_version() -> str | None:
    try:
        command = [compiler(), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except (KernelBuildError, OSError):
        return None
    return done.stdout.splitlines()[0] if done.stdout else None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
