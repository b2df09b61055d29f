"""Coupled verification under drafts whose fate is known: right so far and then wrong, all right, never right.

Every arm must give plain decoding's text bit for bit, and keep exactly the drafts that were planted right.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from drafters.testing import ScriptedDrafter
from drafters.types import DraftRequest
from rollout.config import EngineConfig
from rollout.engine.native.compiled_forward.decoder import compiled_unavailable
from rollout.proof.compare import Texts, first_difference
from rollout.proof.finding import Finding
from rollout.proof.steering import Steering, drive
from rollout.proof.tiny_checks import PARAMS, plain_texts
from rollout.testing import EOS_ID, TinyPolicy, tiny_policy
from rollout.testing_native import fixed_plan, requests_for, tiny_engine
from rollout.types import Request

GAMMA = 6

Script = Callable[[DraftRequest], list[int]]


def ordering_findings() -> Iterator[Finding]:
    """Yield one finding per ordering."""
    policy = tiny_policy(seed=4)
    requests = requests_for(vocab=policy.spec.vocab_size, prompts=2 * len(PARAMS), params=PARAMS, seed=11)
    expected = plain_texts(policy, requests).completions
    known = {r.prompt_uid: expected[r.key].token_ids for r in requests}
    for right in range(GAMMA + 1):
        script = planted(known, right=right, vocab=policy.spec.vocab_size)
        name = "all right" if right == GAMMA else f"right {right}, then wrong"
        yield _finding(policy, requests, expected, name, script, right=right)
    for name, script in _strange_scripts(known, requests, policy.spec.vocab_size).items():
        yield _finding(policy, requests, expected, name, script, right=None)


def planted(known: Mapping[str, Sequence[int]], *, right: int, vocab: int) -> Script:
    """Return a script that drafts the known text, with every draft from number ``right`` on another token."""

    def script(request: DraftRequest) -> list[int]:
        following = _following(known, request)
        return [t if i < right else (t + 1 + i) % vocab for i, t in enumerate(following)]

    return script


def _following(known: Mapping[str, Sequence[int]], request: DraftRequest) -> list[int]:
    done = len(request.tokens) - request.prompt_tokens
    return list(known[request.prompt_uid][done : done + request.gamma])


def _strange_scripts(
    known: Mapping[str, Sequence[int]], requests: Sequence[Request], vocab: int
) -> dict[str, Script]:
    banned = {
        r.prompt_uid: [t for t, b in r.params.logit_bias.items() if b == float("-inf")] or [EOS_ID]
        for r in requests
    }

    def past_the_end(request: DraftRequest) -> list[int]:
        following = _following(known, request)
        return following + [EOS_ID] * (request.gamma - len(following))

    return {
        "banned tokens": lambda r: banned[r.prompt_uid] * r.gamma,
        "right, then a banned token": lambda r: [*_following(known, r)[:2], *banned[r.prompt_uid]],
        "nothing at all": lambda r: [],
        "one token over and over": lambda r: [r.tokens[-1]] * r.gamma,
        "past the end of the text": past_the_end,
        "outside the vocabulary": lambda r: [*_following(known, r)[:1], vocab + 7],
    }


def _finding(
    policy: TinyPolicy,
    requests: Sequence[Request],
    expected: Texts,
    name: str,
    script: Script,
    *,
    right: int | None,
) -> Finding:
    drafter = ScriptedDrafter(script)
    engine = tiny_engine(
        policy,
        [drafter],
        compiled=compiled_unavailable() is None,
        config=EngineConfig(max_batch=8, max_context_tokens=128),
    )
    kept: list[tuple[int, int]] = []
    steering = Steering(
        plan=fixed_plan(drafter.name, GAMMA),
        observe=lambda facts: kept.extend(
            (o.accepted, min(o.gamma, GAMMA if right is None else right))
            for o in facts.outcomes
            if not o.censored
        ),
    )
    with _unsound_drafts_expected():
        found = drive(engine, requests, steering, batch=8)
    difference = first_difference(requests, expected, found.completions)
    wrong = [pair for pair in kept if right is not None and pair[0] != pair[1]]
    detail = f"{len(requests)} identical, {found.accepted} of {found.drafted} drafts accepted"
    if difference is not None:
        detail = difference.line()
    elif wrong:
        detail = f"{len(wrong)} rounds kept other drafts than were right: {wrong[0][0]} for {wrong[0][1]}"
    return Finding(
        part="coupled",
        name=f"drafts {name}",
        passed=difference is None and not wrong,
        detail=detail,
        compared=len(requests),
        difference=difference,
    )


@contextmanager
def _unsound_drafts_expected() -> Iterator[None]:
    # The engine warns of every unsound draft; here they are planted, and an alarm would only frighten.
    logger = logging.getLogger("rollout.engine.native.drafts.drafting")
    level = logger.level
    logger.setLevel(logging.ERROR + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
