"""What a check found: passed or not, on how much evidence, and the first difference if there is one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

DifferenceKind = Literal["token", "logprobs", "length", "finish", "text"]

Logprobs = tuple[float, float, float, float]
"""Raw, scaled, target, and the log of the kept mass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place where a sample's text is not that of plain decoding."""

    prompt_uid: str
    sample_index: int
    kind: DifferenceKind
    index: int
    """Among the new tokens, from 0."""

    position: int
    """Absolute, prompt included."""

    expected_id: int | None
    """What plain decoding committed there; None where it had ended."""

    found_id: int | None
    expected_logprobs: Logprobs | None
    found_logprobs: Logprobs | None
    expected_finish: str
    found_finish: str
    margin: float | None = None
    """By how much plain decoding's choice there led the next best, noise included; None where it could not
    be computed. A rounding error can only turn a choice whose margin is tiny."""

    def line(self) -> str:
        """Return it in one line."""
        where = f"{self.prompt_uid}/{self.sample_index} position {self.position} (new token {self.index})"
        if self.kind in ("finish", "text"):
            return f"{where}: {self.kind}, {self.expected_finish!r} became {self.found_finish!r}"
        lead = "" if self.margin is None else f", top-1/top-2 margin {self.margin:.3g}"
        expected = _shown(self.expected_id, self.expected_logprobs)
        found = _shown(self.found_id, self.found_logprobs)
        return f"{where}: {self.kind}, {expected} became {found}{lead}"


def _shown(token: int | None, logprobs: Logprobs | None) -> str:
    if token is None or logprobs is None:
        return "the end"
    return f"id {token} ({', '.join(f'{x:.9g}' for x in logprobs)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The outcome of one check."""

    part: str
    """Which part of the proof it belongs to."""

    name: str
    passed: bool
    detail: str
    compared: int = 0
    """Samples, branches or cells of evidence."""

    seconds: float = 0.0
    difference: Difference | None = None
    caught_by: str = ""
    """Of a planted fault: the check that told it from the right engine."""

    measures: Mapping[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Return it in one line."""
        verdict = "ok  " if self.passed else "FAIL"
        return f"{verdict} {self.part}: {self.name}: {self.detail} ({self.seconds:.1f} s)"
