"""Menus of kernels that were timed on this machine, kept beside its calibrations.

A name holds whatever a timing depends on: processor, kernel sources, versions, device and shapes. A
menu holds no weights, so a new policy version needs no new one. ``taildraft calibrate`` takes them anew.
"""

import json
import logging
import os
from collections.abc import Sequence
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

import torch

from drafters.int4.menu import KernelMenu, LinearShape, take_menu
from drafters.kernels import build
from drafters.kernels.processor import processor

log = logging.getLogger(__name__)

PREFIX = "kernels-"

_SOURCES = (Path(__file__).parent, Path(build.__file__).parent)


def kept_or_taken(
    shapes: Sequence[LinearShape], *, group: int, dtype: torch.dtype, device: torch.device
) -> KernelMenu:
    """Return the kept menu for linears of these shapes, or time one and keep it. Raises ``DraftError``."""
    path = _folder() / f"{PREFIX}{_key(shapes, group=group, dtype=dtype, device=device)}.json"
    try:
        return KernelMenu.from_json(path.read_text())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("%s is not usable and is taken anew: %s", path, error)
    menu = take_menu(shapes, group=group, dtype=dtype, device=device)
    scratch = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            scratch.write_text(menu.to_json() + "\n")
            scratch.replace(path)  # whole or not at all: hosts may start together
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the timings of kernels are not kept: %s", error)
    return menu


def forget_all() -> None:
    """Drop every kept menu; each is taken anew when it is next wanted."""
    for path in _folder().glob(f"{PREFIX}*.json"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("kept timings of kernels cannot be dropped and are used again: %s", error)


def _folder() -> Path:
    """Return the folder of calibrations: ``rollout.calibration.store`` keeps its own there."""
    return build.cache_dir().parent / "calibration"


def _key(shapes: Sequence[LinearShape], *, group: int, dtype: torch.dtype, device: torch.device) -> str:
    named = {
        "processor": processor().identity,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernels": build.sources_key(_SOURCES),
        "compiler": _compiler(),
        "versions": {name: _version(name) for name in ("torch", "bitsandbytes")},
        "dtype": str(dtype),
        "group": group,
        "shapes": sorted((s.out_features, s.in_features, s.bits, s.count) for s in shapes),
    }
    return blake2b(json.dumps(named, sort_keys=True).encode(), digest_size=12).hexdigest()


def _compiler() -> str:
    try:
        return build.compiler()
    except build.KernelBuildError:
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
