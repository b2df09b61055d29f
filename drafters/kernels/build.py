"""Builds a C++ kernel file on first use and caches it by what it was built from.

The cache key is the text of every source and header, the flags, the compiler and the processor's
features, so a stale library is never loaded and machines may share a cache directory.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from drafters.kernels.processor import processor

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
"""``-ffp-contract=off``: fused multiply-adds are written out, so that no row's result depends on how
the compiler happened to treat its loop. ``-march`` is added by ``build``."""

INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512vl", "avx512vnni")
"""What kernel sources ask for, as the compiler names them; without AVX2 and FMA they are plain C++."""


class KernelBuildError(Exception):
    """The kernels could not be compiled; the torch path remains. Names the compiler and its message."""


def cache_dir() -> Path:
    """Return where compiled kernels are kept (``TAILDRAFT_CACHE``, else the user's cache folder)."""
    root = os.environ.get("TAILDRAFT_CACHE")
    if root:
        return Path(root) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "taildraft" / "kernels"


@cache
def compiler() -> str:
    """Return the C++ compiler (``CXX``, else c++, g++ or clang++). Raises ``KernelBuildError``."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise KernelBuildError("no C++ compiler found: install g++ or set CXX")


@cache
def cpu_features() -> str:
    """Return the architecture and the processor's feature flags, as one line."""
    return f"{platform.machine()} {' '.join(processor().features) or platform.processor()}"


@cache
def instruction_sets() -> tuple[str, ...]:
    """Return the vector instructions kernels are built with here; empty where there is no compiler.

    The compiler is asked what it defines, as the sources do: it may know less than the processor can.
    """
    try:
        command = [compiler(), *FLAGS, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except (KernelBuildError, OSError):
        return ()
    defined = {line.split()[1] for line in done.stdout.splitlines()}
    return tuple(name for name in INSTRUCTION_SETS if f"__{name.upper()}__" in defined)


def sources_key(folders: Sequence[Path]) -> str:
    """Return what every kernel source in ``folders`` and the flags come to: other kernels, another key."""
    key = hashlib.sha256("\0".join(FLAGS).encode())
    for path in sorted(p for folder in folders for p in folder.iterdir() if p.suffix in (".cpp", ".h")):
        key.update(path.name.encode())
        key.update(path.read_bytes())
    return key.hexdigest()[:20]


def build(source: Path, *, include: Sequence[Path] = (), defines: Sequence[str] = ()) -> Path:
    """Compile ``source`` into a shared library and return its path; compiled once per content.

    ``include`` folders are searched for headers, and every header in them is part of the cache key.
    Raises ``KernelBuildError``.
    """
    folders = [source.parent, Path(__file__).parent, *include]
    headers = sorted({h for folder in folders for h in folder.glob("*.h")})
    flags = [*FLAGS, "-march=native", *(f"-D{d}" for d in defines)]
    key = hashlib.sha256()
    for path in (source, *headers):
        key.update(path.name.encode())
        key.update(path.read_bytes())
    key.update("\0".join([*flags, compiler(), cpu_features()]).encode())
    target = cache_dir() / f"{source.stem}-{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    log.info("compiling %s with %s (once)", source.name, compiler())
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        out = Path(scratch) / target.name
        command = [compiler(), *flags, *(f"-I{f}" for f in folders), str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise KernelBuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        out.replace(target)  # atomic: two processes may build at once
    return target


@cache
def load(source: Path, include: tuple[Path, ...] = (), defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Build if needed and load. Raises ``KernelBuildError``."""
    return ctypes.CDLL(str(build(source, include=include, defines=defines)))
