"""Tables as HTML: numbers to the right and as short as a reader wants them, words to the left."""

import re
from collections.abc import Iterable, Sequence
from html import escape

_NUMBER = re.compile(r"-|[-+]?[\d.,]+(e[-+]?\d+)?%?|[\d.]+-[\d.]+|[\d.]+ of \d+")
"""What stands to the right: a number, a share, a range, a count or share of a count, and nothing."""


class Drawing(str):
    """A cell that is HTML already."""

    __slots__ = ()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, failed: str = "") -> str:
    """Return rows under their columns' names. Cells that say ``failed`` catch the eye.

    A table wider than its panel scrolls there, and the page does not.
    """
    shown = [[_shown(cell) for cell in row] for row in rows]
    words = [any(not _NUMBER.fullmatch(row[at]) for row in shown) for at in range(len(columns))]
    head = "".join(f"<th{_style(words[at])}>{escape(name)}</th>" for at, name in enumerate(columns))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_style(words[at], loud=bool(failed) and cell == failed)}>{_inside(cell)}</td>"
            for at, cell in enumerate(row)
        )
        + "</tr>"
        for row in shown
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _inside(cell: str) -> str:
    return cell if isinstance(cell, Drawing) else escape(cell)


def _style(word: bool, *, loud: bool = False) -> str:
    kinds = [name for name, wanted in (("word", word), ("loud", loud)) if wanted]
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Drawing):
        return value
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
