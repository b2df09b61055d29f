"""Files a command leaves behind: refused before any work is done, and there whole or not at all."""

import os
import secrets
from pathlib import Path

from rollout.errors import ConfigError


def output_path(out: str | None, *, folder: str | None, name: str, setting: str) -> Path:
    """Return ``out``, else ``name`` in ``folder``; the folder it lies in is made.

    Raises ``ConfigError``, which begins with ``setting``, where nothing can be written.
    """
    if out is None and folder is None:
        raise ConfigError(f"{setting}: no file given, and the job has no folder")
    return writable(Path(out) if out is not None else Path(str(folder)) / name, setting)


def writable(path: Path, setting: str) -> Path:
    """Return ``path``, its folder made. Raises ``ConfigError`` where no file can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot make {path.parent}: {error}; name another file") from error
    if path.is_dir():
        raise ConfigError(f"{setting}: {path} is a folder; name a file in it")
    if not (_special(path) or os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{setting}: cannot write into {path.parent}; name a file elsewhere")
    return path


def _special(path: Path) -> bool:
    """Whether it is there and no file: a terminal, a pipe, the null device."""
    return path.exists() and not path.is_file()


def check_apart(path: Path, setting: str, other: Path, other_setting: str) -> None:
    """Raise ``ConfigError`` where two results would be one file: the second would replace the first."""
    if path.resolve() == other.resolve():
        raise ConfigError(f"{setting} and {other_setting} both name {path}; give one of them another name")


def write_result(path: Path, text: str, setting: str) -> None:
    """``write_whole``; raises ``ConfigError``, which begins with ``setting``, where that fails after all."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot write {path}: {error}; name a file elsewhere") from error


def write_whole(path: Path, text: str) -> None:
    """Write ``text``; whoever is stopped meanwhile leaves the file as it was, and no other beside it.

    A link is followed, and what is no file (``/dev/stdout``) is written to as it is.
    """
    path = path.resolve()
    if _special(path):
        path.write_text(text, encoding="utf-8")
        return
    # A name may take all the length that names may have.
    scratch = path.with_name(f".{path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
