"""Checks of the production round that take a second each: on tiny real policies, and on enumerated ones.

They are what planted faults must be caught by, so each returns a ``Finding`` and builds all it needs anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from drafters.config import DrafterConfig
from drafters.registry import build as build_drafter
from drafters.registry import names_for
from rollout.config import EngineConfig
from rollout.engine.native.compiled_forward.decoder import compiled_unavailable
from rollout.engine.native.engine import NativeEngine
from rollout.policy.weights import manifest
from rollout.proof.compare import first_difference
from rollout.proof.finding import Finding
from rollout.proof.margin import with_margin
from rollout.proof.round_law import CASES, RoundCase, check_round_law
from rollout.proof.steering import Drive, Steering, drive
from rollout.testing import TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_native import (
    MIXED_PARAMS,
    ar_plan,
    fixed_plan,
    random_plan,
    requests_for,
    tiny_engine,
)
from rollout.types import Request, SamplingParams

Check = Callable[[], Finding]

PARAMS = (
    *MIXED_PARAMS,
    SamplingParams(max_tokens=24, stop=("e", "0"), ignore_eos=True),
    SamplingParams(max_tokens=24, stop_ids=tuple(range(10, 40)), min_tokens=7),
)
"""Every kind of the engine's tests, a stop string in a text that no id ends, and a stop that is likely as
soon as it is allowed."""

PLAIN = Steering(plan=ar_plan)


def drafters_for(policy: TinyPolicy) -> list[str]:
    """Return every registered drafter that can be built from the policy."""
    return list(names_for(policy.spec.loops))


def engine_for(policy: TinyPolicy, *, drafters: bool = True, max_batch: int = 12) -> NativeEngine:
    """Return an engine with every drafter there is for it: compiled where that can be, else in float64."""
    compiled = compiled_unavailable() is None
    config = DrafterConfig(w4_kernel="auto" if compiled else "torch")
    return tiny_engine(
        policy,
        [build_drafter(name, config) for name in drafters_for(policy)] if drafters else (),
        compiled=compiled,
        config=EngineConfig(max_batch=max_batch, max_context_tokens=128),
    )


def plain_texts(policy: TinyPolicy, requests: Sequence[Request]) -> Drive:
    """Decode each request alone, without drafts: the definition of its text."""
    return drive(engine_for(policy, drafters=False, max_batch=1), requests, PLAIN, batch=1)


def check_equality() -> Finding:
    """Plain decoding alone against every drafter, and a mixture that changes by round, in a batch."""
    return _equality("tiny policy", tiny_policy(family="smollm2"))


def check_looped_equality() -> Finding:
    """The same on a looped policy: reused drafts of several depths, and lanes, in one round."""
    return _equality("tiny looped policy", tiny_looped_policy())


def _equality(subject: str, policy: TinyPolicy) -> Finding:
    requests = requests_for(vocab=policy.spec.vocab_size, prompts=6, samples=2, params=PARAMS, seed=3)
    expected = plain_texts(policy, requests)
    names = drafters_for(policy)
    plans = {f"{name} gamma 4": fixed_plan(name, 4) for name in names}
    plans["random drafter and gamma"] = random_plan(names, max_gamma=8, seed=5)
    drafted = 0
    for name, plan in plans.items():
        found = drive(engine_for(policy), requests, Steering(plan=plan), batch=12)
        drafted += found.accepted
        difference = first_difference(requests, expected.completions, found.completions)
        if difference is not None:
            request = next(r for r in requests if r.key == (difference.prompt_uid, difference.sample_index))
            ids = expected.completions[request.key].token_ids
            difference = with_margin(difference, engine_for(policy, drafters=False), request, ids)
            return Finding(
                part="equality",
                name=subject,
                passed=False,
                detail=f"{name}: {difference.line()}",
                difference=difference,
            )
    return Finding(
        part="equality",
        name=subject,
        passed=drafted > 0,
        detail=f"{len(plans)} arms identical, {drafted} drafts accepted",
        compared=len(plans) * len(requests),
    )


def check_update() -> Finding:
    """An engine that took new weights against one that never had others: same prompts, same noise."""
    old, new = tiny_policy(seed=1), tiny_policy(seed=2)
    long_prompts = requests_for(
        vocab=old.spec.vocab_size, prompts=8, samples=2, params=PARAMS, seed=8, longest_prompt=60
    )
    requests = [r for r in long_prompts if len(r.prompt_ids) > 20]
    engine = engine_for(old)
    steering = Steering(plan=fixed_plan("w4", 3))
    before = drive(engine, requests, steering, batch=12)
    engine.begin_update(manifest(new.state, 1), in_flight="drain")
    engine.stage(new.state.items())
    engine.commit_update()
    after = drive(engine, requests, steering, batch=12)
    expected = plain_texts(new, requests)
    difference = first_difference(requests, expected.completions, after.completions)
    moved = first_difference(requests, expected.completions, before.completions) is not None
    return Finding(
        part="equality",
        name="after a weight update",
        passed=difference is None and moved,
        detail=f"{len(requests)} identical" if difference is None else difference.line(),
        compared=len(requests),
        difference=difference,
    )


def check_recompute() -> Finding:
    """Weights that change in mid-text, recomputed, against plain decoding of the rest under the new ones."""
    old, new = tiny_policy(seed=1), tiny_policy(seed=2)
    requests = requests_for(
        vocab=old.spec.vocab_size, prompts=4, params=(SamplingParams(max_tokens=24, ignore_eos=True),), seed=9
    )
    engine = engine_for(old)
    plan = fixed_plan("w4", 3)
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.run_round(plan(engine.load()))
    engine.begin_update(manifest(new.state, 1), in_flight="recompute")
    engine.stage(new.state.items())
    engine.settle_running()
    engine.commit_update()
    done = drive(engine, (), Steering(plan=plan), batch=12).completions
    for request in requests:
        whole = done[request.key]
        cut = sum(t.policy_version == 0 for t in whole.tokens)
        resumed = replace(request, prefix_ids=whole.token_ids[:cut])
        rest = replace(whole, tokens=whole.tokens[cut:])
        expected = plain_texts(new, [resumed]).completions
        difference = first_difference([resumed], expected, {request.key: rest})
        if difference is not None or not 0 < cut < len(whole.tokens):
            detail = f"the update came after token {cut}" if difference is None else difference.line()
            return Finding(
                part="equality",
                name="weights change in mid-text",
                passed=False,
                detail=detail,
                difference=difference,
            )
    return Finding(
        part="equality",
        name="weights change in mid-text",
        passed=True,
        detail=f"{len(requests)} identical from the update on",
        compared=len(requests),
    )


def law_check(rule: Literal["token", "block"], params: str = "plain") -> Check:
    """Return the check that enumerates one production round of gamma 2."""

    def check() -> Finding:
        found = check_round_law(RoundCase(rule=rule, gamma=2, vocab_size=4, params=CASES[params], seed=7))
        return Finding(
            part="law",
            name=f"{rule}, {params}",
            passed=found.passed,
            detail=f"total variation {found.tv:.2g} from plain decoding over {found.branches} branches",
            compared=found.branches,
        )

    return check
