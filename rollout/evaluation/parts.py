"""The parts of an evaluation that compare: forced chains, free texts. Each yields a finding at a time."""

from collections.abc import Callable, Iterator, Sequence

from controller.types import AR
from rollout.engine.native.engine import NativeEngine
from rollout.evaluation.chains import paths_of, reuse_report
from rollout.evaluation.forced import Chain
from rollout.evaluation.generation import free_report, plain_texts
from rollout.evaluation.record import Found
from rollout.evaluation.serial import SerialReference
from rollout.evaluation.subject import Subject
from rollout.job_config import EvaluateConfig
from rollout.progress import say
from rollout.proof.budget import PricedArm, affordable_tokens
from rollout.proof.finding import Finding
from rollout.proof.requests import mixed_requests
from rollout.proof.steering import Steering, drive
from rollout.testing_native import ar_plan
from rollout.types import Request, SamplingParams

TEXTS_SHARE = 1 / 3
"""Of the time allowed, what free texts may take at most."""

Note = Callable[[str], None]
"""Shows what is being done now."""


def chain_findings(
    subject: Subject, settings: EvaluateConfig, found: Found, *, seed: int, note: Note
) -> Iterator[Finding]:
    """Compare what reused drafts leave with a serial forward of full depth, number by number.

    In the compiled calls that serve and pass by pass: a way to draft passes in both or not.
    """
    if not subject.reusing:
        say("chains: not run, for no drafter evaluated here leaves verification anything to go on from")
        return
    note("the serial forward")
    decoder = subject.weights.decoder
    given = _forced_chains(subject.arms.engine, subject.prompts, settings, seed=seed)
    if isinstance(given, str):
        yield Finding(part="chains", name="plain, the chains themselves", passed=False, detail=given)
        return
    reference = SerialReference(decoder, given)
    found.exits = reference.exits()
    if found.exits is not None:
        say(found.exits.line())
    paths = paths_of(decoder)
    if "compiled calls" not in paths:
        say("chains, compiled calls: not run, for this decoder has none")
    for way in subject.reusing:
        for gamma, path in ((gamma, path) for gamma in way.gammas for path in paths):
            name = f"{way.name}, K {gamma}, {path}"
            note(name)
            try:
                report = reuse_report(decoder, reference, subject.drafter_config, way, gamma, path)
            except LookupError as error:
                yield Finding(part="chains", name=name, passed=False, detail=str(error))
                continue
            found.chains.append(report)
            problem = report.problem(subject.limits)
            yield Finding(
                part="chains",
                name=name,
                passed=not problem,
                detail=problem or report.line(),
                compared=report.positions,
            )


def _forced_chains(
    engine: NativeEngine, prompts: Sequence[tuple[int, ...]], settings: EvaluateConfig, *, seed: int
) -> list[Chain] | str:
    """Return prompts with plain decoding's own texts, or why one of them has none."""
    engine.use_drafters(())
    params = SamplingParams(max_tokens=settings.chain_tokens, ignore_eos=True)
    requests = [
        Request(
            prompt_uid=f"chain{i}",
            sample_index=0,
            prompt_ids=prompts[i % len(prompts)],
            params=params,
            seed=seed + i,
        )
        for i in range(settings.chains)
    ]
    done = drive(engine, requests, Steering(plan=ar_plan), batch=engine.traits.max_batch).completions
    failed = [c.error for c in done.values() if c.error is not None]
    if failed:
        return failed[0]
    return [
        Chain(tokens=(*r.prompt_ids, *done[r.key].token_ids), prompt_tokens=len(r.prompt_ids))
        for r in requests
    ]


def text_findings(
    subject: Subject, settings: EvaluateConfig, found: Found, *, seed: int, left_s: float, note: Note
) -> Iterator[Finding]:
    """Compare free texts of every way to draft and gamma with plain decoding's."""
    engine, batch = subject.arms.engine, max(settings.concurrencies)
    engine.use_drafters(subject.drafter_config.names)
    note("timing forwards")
    tokens = affordable_tokens(
        engine,
        [
            PricedArm(batch=1, drafter=AR, gamma=0),
            # Lanes at another depth are priced as those of the depth that is set: lengths need no more.
            *(
                PricedArm(batch=batch, drafter=way.drafter, gamma=gamma)
                for way in subject.ways
                for gamma in way.gammas
            ),
        ],
        requests=settings.texts,
        within_s=TEXTS_SHARE * left_s,
        most=settings.max_tokens,
    )
    requests = mixed_requests(
        subject.policy, count=settings.texts, max_tokens=tokens, seed=seed, prompts=subject.prompts
    )
    note("plain, each request alone")
    plain = plain_texts(engine, requests)
    committed = sum(len(c.tokens) for c in plain.texts.values())
    yield Finding(
        part="generation",
        name="plain, each request alone: the reference",
        passed=not plain.problem,
        detail=plain.problem or f"{committed} tokens in {len(requests)} texts",
        compared=len(requests),
    )
    for way in subject.ways:
        with subject.engine_for(way) as drafting:
            for gamma in way.gammas:
                note(f"{way.name}, K {gamma}")
                report = free_report(drafting, plain, way, gamma, batch=batch, limits=subject.limits)
                found.texts.append(report)
                yield Finding(
                    part="generation",
                    name=f"{way.name}, K {gamma}, batch {batch}",
                    passed=report.passed,
                    detail=report.line(),
                    compared=report.texts,
                    difference=None if report.first is None else report.first.difference,
                )
