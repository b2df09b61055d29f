"""From a command line to checked settings. Hydra composes the YAML; nothing else here knows Hydra.

Every override is forced in, and our own loader then refuses what it does not know. So an unknown key is
reported by its full path beside the known ones, whether a YAML happens to mention it or not.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollout.errors import ConfigError
from rollout.job_config import JobConfig
from rollout.paths import config_dir
from rollout.settings import load_config, setting_names

ALIASES = {"ray.address": "service.ray_address"}
"""Names a command line may use for another setting's full path."""


def compose_job(command: str, overrides: Sequence[str]) -> JobConfig:
    """Return the settings of ``command`` after ``overrides``. Raises ``ConfigError``, one line.

    A command's own settings need no prefix: ``taildraft bench workload=drain`` sets ``bench.workload``.
    """
    return load_config(compose_plain(command, overrides), JobConfig)


def compose_plain(command: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the composed settings as resolved plain data, not yet checked. Raises ``ConfigError``."""
    folder = config_dir()
    groups = frozenset(p.name for p in folder.iterdir() if p.is_dir())
    rewritten = [_rewrite(text, command=command, groups=groups) for text in overrides]
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3", job_name="taildraft"):
            node = compose("config", overrides=rewritten)
        plain: Any = OmegaConf.to_container(node, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error, folder)) from error
    return {str(key): value for key, value in plain.items()}


def group_choices() -> dict[str, list[str]]:
    """Return the choices of every configuration group, for help texts."""
    folder = config_dir()
    return {
        group.name: sorted(p.stem for p in group.glob("*.yaml"))
        for group in sorted(folder.iterdir())
        if group.is_dir()
    }


def _rewrite(text: str, *, command: str, groups: frozenset[str]) -> str:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = next((line for line in str(error).splitlines() if "Error parsing" not in line), "")
        raise ConfigError(
            f"{text!r} is not an override: {reason}; write name=value, with the value quoted as "
            "'name=\"...\"' when it holds spaces, commas or brackets"
        ) from error
    key = ALIASES.get(override.key_or_group, override.key_or_group)
    head, _, rest = key.partition(".")
    if override.is_delete() or override.package is not None or (key in groups and _names_choice(override)):
        return text
    if override.is_sweep_override():
        raise ConfigError(f"{key}: several values; a list is written {key}=[a,b], and sweeps are not offered")
    value = text.split("=", 1)[1]
    return f"++{_full_key(key, head, rest, command)}={value}"


def _names_choice(override: Any) -> bool:
    return isinstance(override.value(), str)


def _full_key(key: str, head: str, rest: str, command: str) -> str:
    # A command's section is a setting of the job under the command's name; `run` has none of its own.
    sections = {f.name: f for f in dataclasses.fields(JobConfig)}
    if head in sections or command not in sections:
        return key
    factory = sections[command].default_factory
    own = setting_names(factory) if isinstance(factory, type) else ()
    return f"{command}.{key}" if head in own else key


def _one_line(error: Exception, folder: Path) -> str:
    text = str(error)
    marker = "Could not find '"
    if marker in text:
        wanted = text.split(marker, 1)[1].split("'", 1)[0]
        group, _, choice = wanted.rpartition("/")
        known = sorted(p.stem for p in (folder / group).glob("*.yaml")) if group else []
        if known:
            return f"{group}: no choice {choice!r}; known: {', '.join(known)}"
    key = getattr(error, "full_key", None)
    lines = [line.strip() for line in text.splitlines() if line.strip() and "https://" not in line]
    message = lines[0] if lines else type(error).__name__
    return f"{key}: {message}" if key else message
