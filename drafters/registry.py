"""Every drafter by name. Adding one: a file, a line here, a YAML, nothing else."""

import re
from collections.abc import Callable, Iterable
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


def _shallow_loop(config: DrafterConfig, depth: int) -> "Drafter":
    from drafters.shallow_loop import ShallowLoopDrafter

    return ShallowLoopDrafter(config, depth=depth)


def _wavefront(config: DrafterConfig) -> "Drafter":
    from drafters.wavefront import WavefrontDrafter

    return WavefrontDrafter(config)


BUILDERS: "dict[str, Callable[[DrafterConfig], Drafter]]" = {
    "w4": _w4,
    "history": _history,
    "wavefront": _wavefront,
}
"""Builders import what they need, so naming a drafter costs nothing."""

FAMILIES: "dict[str, Callable[[DrafterConfig, int], Drafter]]" = {"shallow_loop": _shallow_loop}
"""Drafters that come in depths, ``shallow_loop_1``, ``shallow_loop_2`` and so on: acceptance, cost and plans
are per drafter, so a depth is chosen as a drafter is. A member runs the first loops of the policy; there is
one for every depth below the policy's own."""

LOOPED_ONLY = frozenset({"shallow_loop", "wavefront"})
"""Drafters, and families, that refuse a policy whose block runs once; an engine has them off and says so."""

MOST_DEPTH = 255
"""Deepest member of a family: no policy has more than 256 loops."""

_MEMBER = re.compile(r"(?P<family>.+)_(?P<depth>[1-9][0-9]{0,2})")


def build(name: str, config: DrafterConfig) -> "Drafter":
    """Return an unbuilt drafter; ``rebuild`` makes it usable. Raises ``ValueError`` for an unknown name."""
    check_names((name,))
    family, depth = member(name)
    return FAMILIES[family](config, depth) if depth else BUILDERS[name](config)


def member(name: str) -> tuple[str, int]:
    """Return the family and depth of ``name``; itself and 0 where it is no member of a family."""
    found = _MEMBER.fullmatch(name)
    if found and found["family"] in FAMILIES and int(found["depth"]) <= MOST_DEPTH:
        return found["family"], int(found["depth"])
    return name, 0


def least_loops(name: str) -> int:
    """Return the fewest loops of a policy that can have the drafter ``name``; 1 where any can."""
    family, depth = member(name)
    return max(depth + 1, 2 if family in LOOPED_ONLY else 1)


def shallow_loops(loops: int) -> tuple[str, ...]:
    """Return the names of ``shallow_loop`` that a policy of so many loops can have, by depth."""
    return tuple(f"shallow_loop_{depth}" for depth in range(1, loops))


def names_for(loops: int) -> tuple[str, ...]:
    """Return the names of all drafters that a policy of so many loops can have, sorted."""
    alone = [name for name in BUILDERS if least_loops(name) <= loops]
    return tuple(sorted([*alone, *shallow_loops(loops)]))


def check_names(names: Iterable[str], *, path: str = "drafter.names") -> None:
    """Raise ``ValueError`` for a name that no drafter has; ``path`` is the setting that gave it."""
    for name in names:
        if name not in BUILDERS and not member(name)[1]:
            known = sorted([*BUILDERS, *(f"{family}_1 to {family}_{MOST_DEPTH}" for family in FAMILIES)])
            raise ValueError(f"{path}: unknown drafter {name!r}; known: {', '.join(known)}")
