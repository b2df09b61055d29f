"""What every panel of a report is, and the colours they share."""

from dataclasses import dataclass

from controller.types import AR
from rollout.report.journal import Journal
from rollout.report.svg import QUIET, colour

MAX_POINTS = 400
"""Points a curve is thinned to: more than a screen can show, and the page stays small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One picture with its title and what it shows."""

    title: str
    body: str
    """HTML."""

    note: str
    wide: bool = False
    """Whether it takes the page's whole width: a table of many columns does."""

    empty: bool = False
    """True when the run holds nothing for it; ``note`` says what is missing."""


def no_data(title: str, missing: str) -> Panel:
    """Return the panel that says what is missing."""
    return Panel(title=title, body="", note=f"No data: {missing}", empty=True)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it must be."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def tints(journal: Journal) -> dict[str, str]:
    """Return a colour per drafter of the run, the same in every panel; plain decoding is quiet."""
    names = sorted({o.drafter for r in journal.rounds for o in r.outcomes if o.gamma})
    return {AR: QUIET, **{name: colour(i) for i, name in enumerate(names, start=1)}}
