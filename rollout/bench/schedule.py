"""The measuring loop: repetitions over all open cells in turn, until every ratio is settled or time is up."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

Note = Callable[[str], None]
"""Hears what is being run, once per run."""

Ending = Literal["settled", "max_pairs", "max_minutes"]
"""Why no more pairs were run."""


class Repeated(Protocol):
    """Something that is measured again and again until it is known well enough."""

    @property
    def prefix(self) -> str:
        """Its name, unique."""

    @property
    def open(self) -> bool:
        """Whether another repetition would help."""

    @property
    def settled(self) -> bool:
        """Whether all it claims is known well enough."""

    def prepare(self, note: Note) -> None:
        """Do what comes before the first repetition."""

    def repeat(self, note: Note) -> None:
        """Make one repetition."""


def measure(
    cells: Sequence[Repeated],
    *,
    limit_s: float,
    clock: Callable[[], float],
    note: Note,
    before_repetition: Callable[[], object],
    after_repetition: Callable[[], object],
) -> Ending:
    """Prepare every cell, then repeat them in turn. Returns why it ended.

    ``limit_s`` (0: none) counts from the call. A repetition starts only if one as long as the cell's last
    would still fit, so cells cut off by time have about as many pairs as the others.
    """
    started_s = clock()
    for cell in cells:
        cell.prepare(note)
    lasted_s: dict[str, float] = {}
    while True:
        ran = cut = False
        for cell in cells:
            if not cell.open:
                continue
            before_s = clock()
            if limit_s and before_s - started_s + lasted_s.get(cell.prefix, 0.0) > limit_s:
                cut = True
                continue
            before_repetition()
            cell.repeat(note)
            lasted_s[cell.prefix] = clock() - before_s
            ran = True
            after_repetition()
        if not ran:
            if cut:
                return "max_minutes"
            return "settled" if all(cell.settled for cell in cells) else "max_pairs"
