"""Every drafter by name. Adding one: a file, a line here, a YAML, nothing else."""

from collections.abc import Callable

from drafters.config import DrafterConfig
from drafters.types import Drafter


def _w4(config: DrafterConfig) -> Drafter:
    from drafters.w4 import W4Drafter

    return W4Drafter(config)


def _history(config: DrafterConfig) -> Drafter:
    from drafters.history import HistoryDrafter

    return HistoryDrafter(config)


BUILDERS: dict[str, Callable[[DrafterConfig], Drafter]] = {"w4": _w4, "history": _history}
"""Builders import what they need, so naming a drafter costs nothing."""


def build(name: str, config: DrafterConfig) -> Drafter:
    """Return an unbuilt drafter; ``rebuild`` makes it usable. Raises ``ValueError`` for an unknown name."""
    builder = BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"drafter.names: unknown drafter {name!r}; known: {', '.join(sorted(BUILDERS))}")
    return builder(config)
