"""Where things are: cache, configuration, shipped policies. Nothing else knows these places."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder of everything that can be made again (``TAILDRAFT_CACHE``, else the user's cache).

    It holds the embedded policy, compiled kernels and calibrations, and may be deleted at any time.
    """
    chosen = os.environ.get("TAILDRAFT_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "taildraft"


def config_dir() -> Path:
    """Return the folder of the YAML files: inside the installed package, else in the checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/config.yaml beside {here}: the installation is incomplete")


def shipped_policies_dir() -> Path:
    """Return the folder of the policies that come with a checkout. A wheel brings none: it may be absent."""
    return Path(__file__).resolve().parent.parent / "policies"
