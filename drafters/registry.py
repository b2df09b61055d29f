"""Every drafter by name. Adding one: a file, a line here, a YAML, nothing else."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from drafters.config import DrafterConfig

if TYPE_CHECKING:  # it imports torch, and names are checked before anything heavy is loaded
    from drafters.types import Drafter


def _w4(config: DrafterConfig) -> "Drafter":
    from drafters.w4 import W4Drafter

    return W4Drafter(config)


def _history(config: DrafterConfig) -> "Drafter":
    from drafters.history import HistoryDrafter

    return HistoryDrafter(config)


def _shallow_loop(config: DrafterConfig, *, depth: int) -> "Drafter":
    from drafters.shallow_loop import ShallowLoopDrafter

    return ShallowLoopDrafter(config, depth=depth)


def _wavefront(config: DrafterConfig) -> "Drafter":
    from drafters.wavefront import WavefrontDrafter

    return WavefrontDrafter(config)


BUILDERS: "dict[str, Callable[[DrafterConfig], Drafter]]" = {
    "w4": _w4,
    "history": _history,
    # One drafter per depth: acceptance, cost and plans are per drafter, so a depth is chosen as a drafter is.
    "shallow_loop_1": partial(_shallow_loop, depth=1),
    "shallow_loop_2": partial(_shallow_loop, depth=2),
    "shallow_loop_3": partial(_shallow_loop, depth=3),
    "wavefront": _wavefront,
}
"""Builders import what they need, so naming a drafter costs nothing."""

SHALLOW_LOOPS = ("shallow_loop_1", "shallow_loop_2", "shallow_loop_3")
"""By depth, from one loop on."""

LOOPED_ONLY = frozenset({*SHALLOW_LOOPS, "wavefront"})
"""Drafters that refuse a policy whose block runs once; an engine switches them off and says so."""


def build(name: str, config: DrafterConfig) -> "Drafter":
    """Return an unbuilt drafter; ``rebuild`` makes it usable. Raises ``ValueError`` for an unknown name."""
    check_names((name,))
    return BUILDERS[name](config)


def check_names(names: Iterable[str], *, path: str = "drafter.names") -> None:
    """Raise ``ValueError`` for a name that no drafter has; ``path`` is the setting that gave it."""
    for name in names:
        if name not in BUILDERS:
            raise ValueError(f"{path}: unknown drafter {name!r}; known: {', '.join(sorted(BUILDERS))}")
