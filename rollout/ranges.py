"""Refuses settings that mean nothing, however they were made. Imports nothing heavy."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from rollout.errors import ConfigError


def check_settings(section: str, config: Any, *, positive: Iterable[str] = (), **least: float) -> None:
    """Check every number, choice and switch of a settings dataclass. Raises ``ConfigError`` by full path.

    A number is finite and at least 0, unless ``least`` says another bound or ``positive`` lists it: then it
    is above 0. So a setting that nobody thought of here is never negative and never NaN. In a tuple of
    numbers each is at least 1.
    """
    above = frozenset(positive)
    for f in dataclasses.fields(config):
        path, value = f"{section}.{f.name}".lstrip("."), getattr(config, f.name)
        kinds = get_args(f.type) if type(None) in get_args(f.type) else (f.type,)
        if value is None and type(None) in kinds:
            continue
        if get_origin(f.type) is Literal and value not in get_args(f.type):
            raise ConfigError(f"{path} must be one of {', '.join(get_args(f.type))}, got {value!r}")
        if f.type is bool and not isinstance(value, bool):
            raise ConfigError(f"{path} must be true or false, got {value!r}")
        if f.type == tuple[int, ...]:
            for at, member in enumerate(value):
                check_number(f"{path}[{at}]", member, whole=True, least=1)
        elif int in kinds or float in kinds:
            whole, bound = float not in kinds, least.get(f.name, 0)
            check_number(path, value, whole=whole, least=bound, above=f.name in above)


def check_number(path: str, value: Any, *, whole: bool, least: float = 0, above: bool = False) -> None:
    """Check one number: finite, and at least, or above, a bound. Raises ``ConfigError``."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ConfigError(f"{path} must be a {'whole ' if whole else ''}number, got {value!r}")
    if not -math.inf < value < math.inf:  # math.isfinite raises for an integer that no float holds
        raise ConfigError(f"{path} must be finite, got {value!r}")
    if value < least or (above and value == least):
        raise ConfigError(f"{path} must be {'>' if above else '>='} {least}, got {value!r}")
