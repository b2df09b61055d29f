"""What the sweep asks, and which of its questions have texts that speed may be measured on.

A row of the sweep gets exactly the tokens its cell says. So a question is taken only where plain decoding's
own text is that long: what a policy writes after its own end of text is no text. And it is taken only where
that text is no echo. Both are counted.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from rollout.bench.arms import Work
from rollout.bench.prompts import PROMPTS, encoded
from rollout.bench.questions import in_turn, own_questions
from rollout.engine.native.engine import NativeEngine
from rollout.errors import ConfigError
from rollout.evaluation.echo import Echo, echo_of
from rollout.policy.source import Policy
from rollout.proof.steering import Steering, drive
from rollout.testing_native import ar_plan

RANDOM_PROMPTS = 32
"""Where there is no tokenizer to ask with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt, the name its noise follows from, and plain decoding's text of it."""

    name: str
    prompt: tuple[int, ...]
    text: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Excluded:
    """A text that echoes."""

    name: str
    how: Echo
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What may be asked."""

    considered: int
    echoes: tuple[Excluded, ...]
    by_length: dict[int, tuple[Question, ...]]
    """Questions whose texts have at least so many tokens, and do not echo in them."""

    too_short: dict[int, int]
    """Texts considered that end before so many tokens."""


def prompts_of(policy: Policy, *, new_tokens: int) -> list[tuple[int, ...]]:
    """Return the ids of all prompts: of the policy's folder, else ``bench.prompts``, else random.

    Each leaves room for ``new_tokens``. Raises ``ConfigError`` for a file of the folder that holds no
    questions, or one too long; others are left out where they are too long, and one must be left.
    """
    own = own_questions(policy, new_tokens=new_tokens)
    if own is not None:
        return own
    room = policy.spec.max_positions - new_tokens
    if policy.tokenizer is None:
        rng, vocab = random.Random(0), policy.spec.vocab_size
        given = [
            tuple(rng.randrange(vocab) for _ in range(rng.randrange(8, 40))) for _ in range(RANDOM_PROMPTS)
        ]
    else:
        given = [encoded(policy.tokenizer, text) for text in PROMPTS]
    fitting = [prompt for prompt in given if len(prompt) <= room]
    if not fitting:
        raise ConfigError(
            f"evaluate.lengths, max_tokens, chain_tokens: {new_tokens} new tokens and the shortest prompt, "
            f"of {min(map(len, given))}, do not fit the policy's {room + new_tokens} positions; ask for fewer"
        )
    return fitting


def select_questions(
    engine: NativeEngine,
    prompts: Sequence[tuple[int, ...]],
    *,
    lengths: Sequence[int],
    wanted: int,
    temperature: float,
    seed: int,
) -> Selection:
    """Decode plainly until ``wanted`` questions of every length are found, or all were tried.

    The engine must be idle. Prompts that leave no room for the longest text are not asked.
    """
    longest, limit = max(lengths), engine.traits.max_context_tokens
    fitting = [prompt for prompt in prompts if len(prompt) + longest <= limit]
    candidates = ((f"evaluate/{number}/{sample}", prompt) for number, sample, prompt in in_turn(fitting))
    by_length: dict[int, list[Question]] = {length: [] for length in lengths}
    too_short = dict.fromkeys(lengths, 0)
    echoes: list[Excluded] = []
    considered = 0
    while min(len(found) for found in by_length.values()) < wanted:
        asked = list(islice(candidates, engine.traits.max_batch))
        if not asked:
            break
        for question in _answered(engine, asked, longest=longest, temperature=temperature, seed=seed):
            considered += 1
            for length in lengths:
                if len(question.text) < length:
                    too_short[length] += 1
                elif (how := echo_of(question.prompt, question.text[:length])) is None:
                    by_length[length].append(question)
                else:
                    echoes.append(Excluded(name=question.name, how=how, tokens=length))
    return Selection(
        considered=considered,
        echoes=tuple(echoes),
        by_length={length: tuple(found[:wanted]) for length, found in by_length.items()},
        too_short=too_short,
    )


def _answered(
    engine: NativeEngine,
    asked: Sequence[tuple[str, tuple[int, ...]]],
    *,
    longest: int,
    temperature: float,
    seed: int,
) -> list[Question]:
    names, prompts = zip(*asked, strict=True)
    work = Work(
        prompts=prompts,
        max_tokens=(longest,) * len(asked),
        ignore_eos=False,
        temperature=temperature,
        run_seed=seed,
        names=names,
    )
    requests = work.requests(run="questions")
    done = drive(engine, requests, Steering(plan=ar_plan), batch=len(requests)).completions
    return [
        Question(name=name, prompt=prompt, text=done[request.key].token_ids)
        for (name, prompt), request in zip(asked, requests, strict=True)
    ]
