"""Proves that the four packages with plain names are the ones installed together here.

A ``controller.py`` in the working directory, or another distribution that ships a package of one of these
names, would be imported in our stead without a word, in Ray workers too.
"""

import importlib
from pathlib import Path

from rollout import __dist__
from rollout.errors import ConfigError

PACKAGES = ("rollout", "drafters", "controller", "trainers_bridge")


def assert_own_packages() -> None:
    """Raise ``ConfigError``, naming both places, unless all four packages are ours and side by side."""
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        module = importlib.import_module(name)
        found = Path(module.__file__).resolve() if module.__file__ else None
        if getattr(module, "__dist__", None) != __dist__ or found is None or found.parent.parent != home:
            where = found or next(iter(getattr(module, "__path__", ["an unknown place"])))
            raise ConfigError(
                f"package {name!r} was imported from {where}, but taildraft's own is in {home / name}: "
                "remove or rename the other one, or start from another folder"
            )
