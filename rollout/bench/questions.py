"""Whose questions are asked: those a policy's folder brings, or the thirty-two of our own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from rollout.bench.prompts import encoded, prompt_ids
from rollout.errors import ConfigError
from rollout.policy.source import Policy

PROMPTS_FILE = "prompts.txt"
"""In a policy's folder: what it was trained to answer, one question a line."""

SAMPLES = 4
"""Texts tried per prompt, each under noise of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The prompts of some rows, and whose they are."""

    source: Literal["policy", "general"]
    prompts: tuple[tuple[int, ...], ...]
    """By row."""

    @property
    def different(self) -> int:
        """Prompts, those of several rows counted once."""
        return len(set(self.prompts))


def questions_asked(
    policy: Policy, setting: Literal["auto", "policy", "general"], *, rows: int, new_tokens: int
) -> Asked:
    """Return one prompt per row, as ``bench.questions`` says; every row has noise of its own.

    Raises ``ConfigError`` where there are too few questions, or where one and ``new_tokens`` do not fit.
    """
    own = None if setting == "general" else own_questions(policy, new_tokens=new_tokens)
    if own is None:
        if setting == "policy":
            raise ConfigError(
                f"bench.questions=policy: {policy.folder} has no {PROMPTS_FILE}, or no tokenizer to read it "
                "with; write one question a line there, or ask with bench.questions=general"
            )
        return Asked(source="general", prompts=tuple(prompt_ids(policy.tokenizer, rows)))
    prompts = tuple(prompt for _, _, prompt in islice(in_turn(own), rows))
    if len(prompts) < rows:
        raise ConfigError(
            f"bench: {rows} sequences wanted, and {policy.folder / PROMPTS_FILE} has {len(own)} questions, "
            f"each asked {SAMPLES} times at most; add some, or ask with bench.questions=general"
        )
    return Asked(source="policy", prompts=prompts)


def in_turn(prompts: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield the number of a prompt, of a sample, and the prompt: every prompt once, then all again."""
    for sample in range(SAMPLES):
        for number, prompt in enumerate(prompts):
            yield number, sample, prompt


def own_questions(policy: Policy, *, new_tokens: int) -> list[tuple[int, ...]] | None:
    """Return the ids of all questions the policy's folder brings; None where it brings none to ask.

    Raises ``ConfigError`` for a file that holds no questions, or one that leaves no room for ``new_tokens``.
    """
    own = policy.folder / PROMPTS_FILE
    if policy.tokenizer is None or not own.is_file():
        return None
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"policy.source: {own} is not UTF-8 text: {error}; write it as such") from error
    positions = policy.spec.max_positions
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompts.append(encoded(policy.tokenizer, line))
        if len(prompts[-1]) + new_tokens > positions:
            raise ConfigError(
                f"policy.source: {own}, line {number}: {len(prompts[-1])} tokens and {new_tokens} new ones "
                f"do not fit the policy's {positions} positions; shorten the line or the texts"
            )
    if not prompts:
        raise ConfigError(
            f"policy.source: {own} holds no question; write one a line, or take the file away: questions of "
            "our own are asked then"
        )
    return prompts
