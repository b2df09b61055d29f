"""Turns plain data into frozen settings, and back. Hydra composes, this module checks.

A settings class is a frozen dataclass of plain types: str, int, float, bool, None, ``Literal``, unions of
these, tuples, mappings, paths, and other settings classes. What does not fit is a ``ConfigError`` that
starts with the full path of the value and names what would have fitted. Nothing heavy is imported.
"""

import dataclasses
import difflib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rollout.errors import ConfigError

Settings = TypeVar("Settings")

_SCALAR_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
}


def load_config(values: Mapping[str, Any], cls: type[Settings], *, path: str = "") -> Settings:
    """Return ``cls`` filled from ``values`` (plain data or an OmegaConf node); defaults fill the rest.

    ``path`` is where the values stand in the whole, for messages. Raises ``ConfigError``.
    """
    plain = _without_omegaconf(values)
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{path or cls.__name__}: expected settings by name, got {plain!r}")
    return cast(Settings, _load_dataclass(plain, cls, path))


def to_plain(config: Any) -> Any:
    """Return settings as dicts, lists and scalars: safe for YAML, JSON and any process border."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: to_plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_plain(item) for item in config]
    return str(config) if isinstance(config, Path) else config


def setting_names(cls: type) -> tuple[str, ...]:
    """Return the names a settings class knows, in order."""
    return tuple(f.name for f in dataclasses.fields(cls))


def _without_omegaconf(values: Any) -> Any:
    # OmegaConf is imported only when a caller already holds one of its nodes.
    if type(values).__module__.partition(".")[0] != "omegaconf":
        return values
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(values, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error


def _load_dataclass(values: Mapping[Any, Any], cls: type, path: str) -> Any:
    hints = get_type_hints(cls)
    names = setting_names(cls)
    unknown = [str(key) for key in values if key not in names]
    if unknown:
        raise ConfigError(_unknown_message(unknown, names, path))
    filled = {key: _load(value, hints[key], _join(path, key)) for key, value in values.items()}
    missing = [
        _join(path, f.name)
        for f in dataclasses.fields(cls)
        if f.name not in filled
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: no value given, and there is no default")
    try:
        return cls(**filled)
    except (ValueError, ConfigError) as error:
        message = str(error)
        named = not path or message.startswith(path)
        raise ConfigError(message if named else f"{path}: {message}") from error


def _unknown_message(unknown: Sequence[str], names: Sequence[str], path: str) -> str:
    full = ", ".join(_join(path, name) for name in unknown)
    message = f"{full}: unknown setting; known here: {', '.join(names) or '(none)'}"
    close = difflib.get_close_matches(unknown[0], names, n=1)
    return f"{message}; did you mean {_join(path, close[0])}?" if close else message


def _load(value: Any, hint: Any, path: str) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin is Literal:
        return _load_literal(value, get_args(hint), path)
    if origin in (Union, types.UnionType):
        return _load_union(value, get_args(hint), path)
    if origin in (tuple, list):
        return _load_sequence(value, hint, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _load_mapping(value, get_args(hint), path)
    if dataclasses.is_dataclass(hint):
        if dataclasses.is_dataclass(value) and isinstance(value, cast(type, hint)):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected settings by name, got {value!r}")
        return _load_dataclass(value, cast(type, hint), path)
    return _load_scalar(value, hint, path)


def _load_literal(value: Any, choices: Sequence[Any], path: str) -> Any:
    for choice in choices:
        # 1 == True == 1.0 in Python; a setting of one kind is not a setting of another.
        if value == choice and type(value) is type(choice):
            return choice
    raise ConfigError(f"{path}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def _load_union(value: Any, members: Sequence[Any], path: str) -> Any:
    refused: list[ConfigError] = []
    for member in members:
        try:
            return _load(value, member, path)
        except ConfigError as error:
            refused.append(error)
    real = [m for m in members if m is not type(None)]
    if len(real) == 1:  # an optional value: the one real member explains best
        raise refused[members.index(real[0])]
    raise ConfigError(f"{path}: expected {' or '.join(_describe(m) for m in members)}, got {value!r}")


def _load_sequence(value: Any, hint: Any, path: str) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{path}: expected a list, got {value!r}")
    kind = cast(type, get_origin(hint))
    members = get_args(hint)
    if kind is list or members[-1] is Ellipsis:
        return kind(_load(item, members[0], f"{path}[{i}]") for i, item in enumerate(value))
    if len(value) != len(members):
        raise ConfigError(f"{path}: expected {len(members)} values, got {len(value)}")
    return tuple(
        _load(item, m, f"{path}[{i}]") for i, (item, m) in enumerate(zip(value, members, strict=True))
    )


def _load_mapping(value: Any, members: Sequence[Any], path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected values by name, got {value!r}")
    key_hint, value_hint = members or (Any, Any)
    return {
        _load(key, key_hint, f"{path} (name {key!r})"): _load(item, value_hint, _join(path, str(key)))
        for key, item in value.items()
    }


def _load_scalar(value: Any, hint: Any, path: str) -> Any:
    if hint in (type(None), None):
        fits = value is None
    elif hint is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        value = float(value) if fits else value
    elif hint is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif hint is Path:
        fits = isinstance(value, (str, Path))
        value = Path(value) if fits else value
    elif hint in (str, bool):
        fits = isinstance(value, hint)
    else:
        raise TypeError(f"{path}: settings of type {hint} are not supported")
    if fits:
        return value
    hint_to_quote = ""
    if hint is str and isinstance(value, (int, float)):
        hint_to_quote = "; quote it inside the shell's quotes, as in \"name='123'\""
    raise ConfigError(f"{path}: expected {_describe(hint)}, got {value!r}{hint_to_quote}")


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint in _SCALAR_NAMES:
        return _SCALAR_NAMES[hint]
    if get_origin(hint) is tuple:
        return "a list"
    return "a path" if hint is Path else getattr(hint, "__name__", str(hint))


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
