"""The requests of the equality proof: real prompts, every kind of sampling params, lengths that differ."""

import random
from collections.abc import Sequence
from dataclasses import replace

from rollout.bench.prompts import PROMPTS, encoded
from rollout.policy.source import Policy
from rollout.seeds import sample_seed
from rollout.types import Request, SamplingParams

SAMPLES_PER_PROMPT = 4
"""A group: its samples share prompt pages, and the history drafter finds siblings in it."""

COMMON_TEXTS = (" the", ",", ".", " a")
"""What bias, bans and stops are about: texts a policy writes often, so that they matter."""


def mixed_requests(
    policy: Policy,
    *,
    count: int,
    max_tokens: int,
    seed: int,
    prompts: Sequence[tuple[int, ...]] | None = None,
) -> list[Request]:
    """Return seeded requests; every kind of ``mixed_params`` occurs, siblings differ in theirs.

    ``prompts`` are used in turn; None: ``bench.prompts`` through the policy's tokenizer, or random ids.
    """
    rng = random.Random(seed)
    kinds = mixed_params(
        _common_ids(policy), max_tokens=max_tokens, stop_strings=policy.tokenizer is not None
    )
    room = policy.spec.max_positions - 2 * max_tokens
    groups = -(-count // SAMPLES_PER_PROMPT)
    given = list(prompts) * groups if prompts else _prompt_ids(policy, groups, rng)
    asked = [ids[-room:] for ids in given[:groups]]
    requests = []
    for number in range(count):
        prompt, sample = divmod(number, SAMPLES_PER_PROMPT)
        params = kinds[number % len(kinds)]
        # Spread over a factor of three, so that the batch drains from full to one.
        most = max(2, round(max_tokens * rng.uniform(0.5, 1.5)))
        uid = f"verify{prompt}"
        requests.append(
            Request(
                prompt_uid=uid,
                sample_index=sample,
                prompt_ids=asked[prompt],
                params=replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most)),
                seed=sample_seed(run_seed=seed, trainer_step=0, prompt_uid=uid, sample_index=sample),
            )
        )
    return requests


def mixed_params(common: Sequence[int], *, max_tokens: int, stop_strings: bool) -> list[SamplingParams]:
    """Return one of every kind; ``common`` are four ids the policy produces often."""
    first, second, third, fourth = common
    half = max(1, max_tokens // 2)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=1.3, min_p=0.1),
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
        SamplingParams(logit_bias={first: 2.0, second: float("-inf")}, min_tokens=half),
        SamplingParams(stop_ids=(third, fourth), top_k=20, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=0.3, ignore_eos=True, top_p=0.95),
        SamplingParams(
            temperature=0.9,
            top_k=50,
            top_p=0.97,
            repetition_penalty=1.1,
            logit_bias={first: -1.0, third: 1.0},
            stop_ids=(second,),
            min_tokens=half,
        ),
    ]
    if stop_strings:
        kinds.append(SamplingParams(stop=("e", "\n\n"), min_tokens=min(3, half)))
    return kinds


def _common_ids(policy: Policy) -> list[int]:
    if policy.tokenizer is None:
        return [t % policy.spec.vocab_size for t in (5, 7, 9, 11)]
    return [policy.tokenizer.encode(text, add_special_tokens=False)[-1] for text in COMMON_TEXTS]


def _prompt_ids(policy: Policy, count: int, rng: random.Random) -> list[tuple[int, ...]]:
    tokenizer = policy.tokenizer
    if tokenizer is None:
        vocab = policy.spec.vocab_size
        return [tuple(rng.randrange(vocab) for _ in range(rng.randrange(8, 60))) for _ in range(count)]
    return [encoded(tokenizer, PROMPTS[i % len(PROMPTS)]) for i in range(count)]
