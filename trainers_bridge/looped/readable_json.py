"""A record as JSON that people read and compare: lists of plain values in one line, numbers of six digits."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

DIGITS = 6
"""More than anything measured here is known to."""


def readable_json(record: Mapping[str, Any]) -> str:
    """Return ``record`` as JSON text. Whole numbers stay as they are; no string may hold a list's bracket
    followed by a line's end, which none of ours does. What is no number, as the error of a single value is
    none, is null."""
    text = json.dumps(_rounded(record), indent=1)
    return re.sub(r"\[\s*\n([^\[\]{}]*?)\n\s*\]", lambda found: f"[{_in_one_line(found[1])}]", text) + "\n"


def _in_one_line(lines: str) -> str:
    return " ".join(line.strip() for line in lines.splitlines())


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
