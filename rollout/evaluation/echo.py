"""Texts that speak for no drafter: those that repeat their prompt, and those that go round in circles.

Whatever drafts finds them easy, so acceptance and speed on them say nothing of other texts.
"""

from collections.abc import Sequence
from typing import Literal

RUN_TOKENS = 8
"""So many tokens in a row, met before, count as repeated."""

LARGEST_SHARE = 0.5
"""A text more of which is repeated speaks for nothing."""

FEWEST_RUNS = 8
"""A text with fewer runs than this is too short to judge."""

Echo = Literal["repeats its prompt", "goes in circles"]


def echo_of(prompt: Sequence[int], text: Sequence[int]) -> Echo | None:
    """Return how a text echoes, or None where it does not."""
    of_prompt, of_itself = repeated_shares(prompt, text)
    if of_prompt > LARGEST_SHARE:
        return "repeats its prompt"
    return "goes in circles" if of_itself > LARGEST_SHARE else None


def repeated_shares(prompt: Sequence[int], text: Sequence[int]) -> tuple[float, float]:
    """Return which shares of a text's runs stand in its prompt, and earlier in itself. 0 for short texts."""
    runs = _runs(text)
    if len(runs) < FEWEST_RUNS:
        return 0.0, 0.0
    asked = set(_runs(prompt))
    seen: set[tuple[int, ...]] = set()
    in_prompt = in_itself = 0
    for run in runs:
        in_prompt += run in asked
        in_itself += run in seen
        seen.add(run)
    return in_prompt / len(runs), in_itself / len(runs)


def _runs(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + RUN_TOKENS]) for at in range(len(tokens) - RUN_TOKENS + 1)]
