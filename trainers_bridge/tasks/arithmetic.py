"""Small sums with a short explanation: easy to check, hard enough for a small policy, lengths with a tail.

The reward is a pure function of the reply. It reads no model and no clock.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainers_bridge.config import Operation, TaskConfig

SYSTEM_PROMPT = "Explain in one short sentence and end with the answer."
"""Short, because the trainer scores the prompt once per sample. "Ends with the answer" is a form that small
chat policies reach by themselves in about half of their replies, so there is something to learn from."""

EXACT_REWARD = 1.0
"""The reply has ended, its last word is the answer, and it has ``min_words`` words."""

SHORT_REWARD = 0.5
"""As above with fewer words: right, but not explained."""

MENTIONED_REWARD = 0.2
"""The answer stands somewhere else in the reply, and is not one of the operands repeated."""

FORM_REWARD = 0.1
"""The reply has ended, with a number that is wrong."""

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w]|\.\d)")
_LAST_NUMBER = re.compile(r"(?<![\w.])(-?\d+)[\s.!*)\]]*$")

_APPLY: dict[Operation, tuple[str, Callable[[int, int], int]]] = {
    "multiply": ("*", lambda a, b: a * b),
    "add": ("+", lambda a, b: a + b),
    "subtract": ("-", lambda a, b: a - b),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One sum and what it comes to."""

    text: str
    operands: tuple[int, int]
    answer: int

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt, as chat messages."""
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": self.text}]


class ArithmeticTask:
    """Questions from a seed, and the reward of replies to them."""

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        self._config = config
        self.questions: tuple[Question, ...] = tuple(_generate(config, seed))

    def rows(self) -> list[dict[str, object]]:
        """Return one plain row per question: ``prompt`` (messages) and what ``reward`` needs."""
        return [
            {"prompt": q.messages, "answer": q.answer, "operands": list(q.operands)} for q in self.questions
        ]

    def reward(self, reply: str, *, answer: int, operands: Sequence[int], ended: bool) -> float:
        """Return the reward of a reply, in [0, 1]; ``ended`` says that the policy itself ended it."""
        last = _LAST_NUMBER.search(reply) if ended else None
        if last is not None and int(last.group(1)) == answer:
            return EXACT_REWARD if len(reply.split()) >= self._config.min_words else SHORT_REWARD
        if answer not in operands and any(int(n) == answer for n in _NUMBER.findall(reply)):
            return MENTIONED_REWARD
        return FORM_REWARD if last is not None else 0.0


def _generate(config: TaskConfig, seed: int) -> list[Question]:
    rng = random.Random(f"arithmetic/{seed}")
    questions = []
    for _ in range(config.prompts):
        sign, apply = _APPLY[rng.choice(config.operations)]
        first, second = (rng.randint(config.smallest, config.largest) for _ in range(2))
        questions.append(
            Question(
                text=f"What is {first} {sign} {second}?",
                operands=(first, second),
                answer=apply(first, second),
            )
        )
    return questions
