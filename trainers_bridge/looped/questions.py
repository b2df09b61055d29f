"""The questions a folder of the looped policy carries: what ``taildraft evaluate`` asks it.

They are held out like those it is scored on. Half have long replies, so that there are long texts to time.
"""

from collections.abc import Iterator
from itertools import chain, islice

from trainers_bridge.tasks.exercises import Exercise, exercises

QUESTIONS_FILE = "prompts.txt"
"""One question a line."""

COUNT = 64
LONG_CHARACTERS = 110
"""Of a long reply; a token is a character."""


def questions() -> list[str]:
    """Return the questions; always the same ones."""
    some = islice(_held_out("evaluate/any"), COUNT // 2)
    long = (e for e in _held_out("evaluate/long") if len(e.reply) >= LONG_CHARACTERS)
    return [e.question for e in chain.from_iterable(zip(some, long, strict=False))]


def _held_out(seed: str) -> Iterator[Exercise]:
    return exercises(seed=seed, split="held_out")
