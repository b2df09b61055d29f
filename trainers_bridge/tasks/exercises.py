"""Short exercises with their working: sums, strings, counting and little stories, each with one right answer.

The generator writes the question, a model reply with every intermediate step, and the answer. The steps
make replies of very different lengths; the answer is what the reward checks. Questions are split into
``train`` and ``held_out`` by a hash of their text, so no question is ever on both sides.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import get_args

from trainers_bridge.config import ExerciseKind, ExerciseSplit, TaskConfig

KINDS: tuple[ExerciseKind, ...] = get_args(ExerciseKind)

HELD_OUT_ONE_IN = 8
"""One question in so many is held out: enough of every kind, and the rest stays for training."""

EXACT_REWARD = 1.0
"""The reply has ended and its last word is the answer."""

FORM_REWARD = 0.1
"""The reply has ended with "answer" and a word that is wrong."""

ANSWER = "answer"
"""The word before the answer, which is the last word of a reply."""

LETTERS = "abcdefghijkl"
"""Of words to be reversed or counted in; few, so that minutes of training meet each of them often."""

NAMES = ("ann", "ben", "eva", "kim", "max", "tom")
THINGS = ("pens", "cups", "eggs", "nuts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exercise:
    """One question, a reply that works it out, and the answer."""

    kind: ExerciseKind
    question: str
    reply: str
    """Ends with ``answer`` and the answer itself."""

    answer: str


def exercises(
    *, seed: str, split: ExerciseSplit, kinds: Sequence[ExerciseKind] = KINDS
) -> Iterator[Exercise]:
    """Yield exercises of one side without end, the kinds in turn; the same seed yields the same ones."""
    rng = random.Random(f"exercises/{seed}")
    while True:
        for kind in kinds:
            exercise = _MAKERS[kind](rng)
            while split_of(exercise.question) != split:
                exercise = _MAKERS[kind](rng)
            yield exercise


def split_of(question: str) -> ExerciseSplit:
    """Return the side a question belongs to: a function of its text alone."""
    digest = blake2b(question.encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0 else "train"


def answered(reply: str) -> str | None:
    """Return the answer a reply ends with, or None where its last words are not "answer" and one more."""
    words = reply.split()
    return words[-1] if len(words) >= 2 and words[-2] == ANSWER else None


class ExerciseTask:
    """Questions from a seed, and the reward of replies to them."""

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        source = exercises(seed=f"task/{seed}", split=config.split, kinds=config.exercises)
        self.exercises: tuple[Exercise, ...] = tuple(next(source) for _ in range(config.prompts))

    def rows(self) -> list[dict[str, object]]:
        """Return one plain row per question: ``prompt`` (messages) and what ``reward`` needs."""
        return [
            {"prompt": [{"role": "user", "content": e.question}], "answer": e.answer} for e in self.exercises
        ]

    def reward(self, reply: str, *, answer: str, ended: bool) -> float:
        """Return the reward of a reply, in [0, 1]; ``ended`` says that the policy itself ended it."""
        found = answered(reply) if ended else None
        if found is None:
            return 0.0
        return EXACT_REWARD if found == answer else FORM_REWARD


def _length(rng: random.Random, *, least: int, most: int, more: float) -> int:
    """Return ``least`` plus one more for as long as a coin of odds ``more`` says: few are long."""
    size = least
    while size < most and rng.random() < more:
        size += 1
    return size


def _sum(rng: random.Random) -> Exercise:
    """Add a list up, one running total after the other."""
    numbers = [rng.randint(2, 49) for _ in range(_length(rng, least=2, most=12, more=0.65))]
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    return Exercise(
        kind="sum",
        question=f"sum {' '.join(map(str, numbers))}",
        reply=f"{', '.join(steps)}, {ANSWER} {total}",
        answer=str(total),
    )


def _reverse(rng: random.Random) -> Exercise:
    """Spell a word backwards, letter by letter, then at once."""
    word = "".join(rng.choice(LETTERS) for _ in range(_length(rng, least=3, most=12, more=0.75)))
    back = word[::-1]
    return Exercise(
        kind="reverse",
        question=f"reverse {word}",
        reply=f"{' '.join(back)}, {ANSWER} {back}",
        answer=back,
    )


def _sort(rng: random.Random) -> Exercise:
    """Put digits in order, one by one, then at once."""
    digits = [rng.choice("0123456789") for _ in range(_length(rng, least=3, most=12, more=0.75))]
    ordered = sorted(digits)
    return Exercise(
        kind="sort",
        question=f"sort {''.join(digits)}",
        reply=f"{' '.join(ordered)}, {ANSWER} {''.join(ordered)}",
        answer="".join(ordered),
    )


def _count(rng: random.Random) -> Exercise:
    """Count a letter in a word, the count beside each letter passed."""
    alphabet = rng.sample(LETTERS, 3)
    word = [rng.choice(alphabet) for _ in range(_length(rng, least=3, most=14, more=0.8))]
    letter, seen, steps = rng.choice(alphabet), 0, []
    for each in word:
        seen += each == letter
        steps.append(f"{each}{seen}")
    return Exercise(
        kind="count",
        question=f"count {letter} in {''.join(word)}",
        reply=f"{' '.join(steps)}, {ANSWER} {seen}",
        answer=str(seen),
    )


def _remainder(rng: random.Random) -> Exercise:
    """Take a number away until no more can be taken: long where the number is small."""
    step = rng.randint(2, 12)
    start = step * _length(rng, least=2, most=24, more=0.85) + rng.randrange(step)
    passed = range(start, -1, -step)
    return Exercise(
        kind="remainder",
        question=f"from {start} down by {step}",
        reply=f"{' '.join(map(str, passed))}, {ANSWER} {passed[-1]}",
        answer=str(passed[-1]),
    )


def _story(rng: random.Random) -> Exercise:
    """Tell who has how many after some came or went; the words are chosen anew each time."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    have = rng.randint(2, 40)
    told, steps = [], []
    first = f"{name} has {have} {thing}"
    for _ in range(_length(rng, least=1, most=5, more=0.5)):
        change = rng.randint(2, 20)
        gains = change > have or rng.random() < 0.5
        after = have + change if gains else have - change
        told.append(f"{'gets' if gains else 'loses'} {change}")
        verb = rng.choice(("finds", "gains") if gains else ("drops", "sells"))
        steps.append(f"{name} {verb} {change}, so {have}{'+' if gains else '-'}{change}={after}")
        have = after
    opening = rng.choice(("let us see", "step by step"))
    return Exercise(
        kind="story",
        question=f"{first}, {', '.join(told)}. how many",
        reply=f"{opening}: {'. '.join(steps)}. {ANSWER} {have}",
        answer=str(have),
    )


_MAKERS: dict[ExerciseKind, Callable[[random.Random], Exercise]] = {
    "sum": _sum,
    "reverse": _reverse,
    "sort": _sort,
    "count": _count,
    "remainder": _remainder,
    "story": _story,
}
