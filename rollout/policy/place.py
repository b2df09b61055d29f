"""Where a policy is: embedded, shipped, a local folder or a hub id, all as one kind of folder.

Imports nothing heavy, so that a source that is none is refused before anybody waits.
"""

import json
import logging
import re
from pathlib import Path

from rollout.config import PolicyConfig
from rollout.errors import ConfigError
from rollout.paths import shipped_policies_dir
from rollout.policy.embedded import embedded_folder

log = logging.getLogger(__name__)

EMBEDDED = "smollm2"
SHIPPED = ("looped",)
"""Policies of our own that lie in a checkout, by the name of their folder."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""All that is read of a hub snapshot; weights in other formats stay there."""

INDEX = "model.safetensors.index.json"


def check_source(config: PolicyConfig) -> None:
    """Raise ``ConfigError`` when ``policy.source`` cannot be a policy. Fetches and makes nothing."""
    source = config.source
    folder = _path(source)
    if source == EMBEDDED:
        return
    if source in SHIPPED:
        _check_shipped(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"policy.source={source!r}: the folder has no config.json")
        weight_files(folder)
    elif not HUB_ID.fullmatch(source):
        names = ", ".join(map(repr, (EMBEDDED, *SHIPPED)))
        raise ConfigError(f"policy.source={source!r} is neither {names}, a folder, nor a hub id")


def resolve(config: PolicyConfig) -> Path:
    """Return the folder of ``policy.source``. Raises ``ConfigError`` when there is none to be had."""
    check_source(config)
    if config.source == EMBEDDED:
        return embedded_folder()
    folder = _path(config.source)
    return folder if folder.is_dir() else _snapshot(config.source)


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files. Raises ``ConfigError`` when one is missing."""
    names = ["model.safetensors"]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"policy.source: {folder / INDEX} is no index of weights: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"policy.source: {folder} lacks {', '.join(missing)} (only safetensors are read)")
    return [folder / name for name in names]


def _check_shipped(source: str) -> None:
    """Raise ``ConfigError`` where the installation has no such policy: wheels bring none."""
    folder = shipped_policies_dir() / source
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"policy.source={source!r}: {folder} does not hold it. It lies in the repository, not in the "
            "installed package: install from a checkout, or give the path of its folder there"
        )


def _path(source: str) -> Path:
    if source in SHIPPED:
        return shipped_policies_dir() / source
    try:
        return Path(source).expanduser()
    except RuntimeError:  # nobody has that home
        return Path(source)


def _snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    log.info("policy: fetching %s from the hub or its cache", hub_id)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"policy.source={hub_id!r}: no such folder, and the hub answered: {error}"
        ) from error
