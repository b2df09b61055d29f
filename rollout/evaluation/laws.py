"""Sampling laws on vocabularies so small that every short text can be counted.

``coupled``: the production engine draws many short texts with drafts, and their joint counts must fit the law
that plain decoding's own logits give: those of all seeds together, and those of each. Chi-square with k
degrees of freedom is held to a limit that a right sampler exceeds with probability below e^-14, for every k
(``proof.noise_law``). Of s seeds, s > 1, a finding makes s + 1 such comparisons: it blames a right sampler
with probability below (s + 1) e^-14, and n findings do with probability below n times that. A text that the
filters forbid must never occur. ``block`` and ``token``: every branch of a production round is enumerated.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from drafters.config import DrafterConfig
from drafters.registry import build as build_drafter
from drafters.registry import least_loops
from rollout.config import EngineConfig
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.law_check import Law, Prefix, ar_law
from rollout.engine.native.compiled_forward.decoder import compiled_unavailable
from rollout.engine.native.engine import NativeEngine
from rollout.engine.target import TargetRow
from rollout.proof.finding import Finding
from rollout.proof.law import Note
from rollout.proof.noise_law import chi_square_limit
from rollout.proof.round_law import check_round_law, round_cases
from rollout.proof.steering import Steering, drive
from rollout.seeds import sample_seed
from rollout.testing import TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_native import fixed_plan, tiny_engine
from rollout.types import Request, SamplingParams

PART = "laws"
VOCABULARY = 4
LOOPED_SEED, DENSE_SEED = 8, 6
"""Of random policies that find many short texts likely."""

USUAL_LOOPS = 4
"""Of the looped one; more where a drafter under test runs as many itself."""

TEXT_TOKENS = 4
"""Of a text that is counted: the first is chosen plainly, with its prompt, the others under drafts."""

GAMMA = 2
BATCH = 64
PROMPT: Prefix = (3, 2, 0)
FEWEST_EXPECTED = 5.0
"""Texts that are expected less often are counted together, as chi-square wants it."""

FILTERS = {
    "temperature 1": SamplingParams(max_tokens=TEXT_TOKENS, ignore_eos=True),
    "top-k 3, temperature 0.7": SamplingParams(
        max_tokens=TEXT_TOKENS, ignore_eos=True, temperature=0.7, top_k=3
    ),
    "top-p 0.8, min-p 0.1": SamplingParams(max_tokens=TEXT_TOKENS, ignore_eos=True, top_p=0.8, min_p=0.1),
}


FALSE_ALARM = math.exp(-14)
"""Bound on the odds that one chi-square of a right sampler exceeds its limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LawFit:
    """How well counted texts fit a law."""

    statistic: float
    freedom: int
    limit: float
    forbidden: int
    """Draws of texts that have no probability."""

    @property
    def passed(self) -> bool:
        """Whether a right sampler could have drawn them."""
        return self.forbidden == 0 and self.statistic <= self.limit


def fit_of(counts: Counter[Prefix], law: Law) -> LawFit:
    """Return how well ``counts`` fit ``law``; rare texts are one cell."""
    draws = counts.total()
    cells: list[tuple[float, int]] = []
    rare_expected, rare_seen = 0.0, 0
    for text, probability in law.items():
        if draws * probability >= FEWEST_EXPECTED:
            cells.append((draws * probability, counts[text]))
        else:
            rare_expected += draws * probability
            rare_seen += counts[text]
    if rare_expected >= FEWEST_EXPECTED:
        cells.append((rare_expected, rare_seen))
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    freedom = max(1, len(cells) - 1)
    return LawFit(
        statistic=statistic,
        freedom=freedom,
        limit=chi_square_limit(freedom),
        forbidden=sum(n for text, n in counts.items() if law.get(text, 0.0) <= 0.0),
    )


def law_findings(
    drafters: Sequence[str],
    config: DrafterConfig,
    *,
    looped: bool,
    draws: int,
    seeds: int,
    seed: int,
    note: Note,
) -> Iterator[Finding]:
    """Yield a finding per drafter and filter, then those of the enumerated rounds.

    ``draws`` in all are spread over ``seeds`` run seeds, ``seed`` and those that follow.
    """
    loops = max([USUAL_LOOPS, *map(least_loops, drafters)])
    policy = (
        tiny_looped_policy(seed=LOOPED_SEED, vocab=VOCABULARY, layers=1, loops=loops)
        if looped
        else tiny_policy(seed=DENSE_SEED, vocab=VOCABULARY, layers=1)
    )
    teacher = _engine(policy, [], config)
    for name in drafters:
        if least_loops(name) == 1 and name != "w4":
            continue  # there is nothing to copy in texts of four tokens
        engine = _engine(policy, [name], config)
        for kind, params in FILTERS.items():
            note(f"{name}, {kind}")
            drawn = [
                _drawn(engine, name, kind, params, draws=count, seed=seed + turn)
                for turn, count in enumerate(spread_over(seeds, draws))
            ]
            yield judged(name, kind, plain_law(teacher, params), drawn)
    yield from _enumerated("looped" if looped else "torch", note)


def _engine(policy: TinyPolicy, names: Sequence[str], config: DrafterConfig) -> NativeEngine:
    """Return an engine of the production kernels where they can be had, else in float64."""
    compiled = compiled_unavailable() is None
    own = DrafterConfig(
        w4_kernel="auto" if compiled else "torch",
        wavefront_depth=min(config.wavefront_depth, max(1, policy.spec.loops - 1)),
    )
    return tiny_engine(
        policy,
        [build_drafter(name, own) for name in names],
        compiled=compiled,
        config=EngineConfig(max_batch=BATCH, max_context_tokens=16),
    )


def spread_over(seeds: int, draws: int) -> list[int]:
    """Return the draws of every seed: as many of each, the first ones one more where that leaves some."""
    return [draws // seeds + (turn < draws % seeds) for turn in range(seeds)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What one run seed drew."""

    counts: Counter[Prefix]
    """By text."""

    drafted: int
    accepted: int


def _drawn(
    engine: NativeEngine, name: str, kind: str, params: SamplingParams, *, draws: int, seed: int
) -> Drawn:
    requests = [
        Request(
            prompt_uid=f"{kind}/{seed}/{number}",
            sample_index=0,
            prompt_ids=PROMPT,
            params=params,
            seed=sample_seed(run_seed=seed, trainer_step=0, prompt_uid=f"{name}/{kind}", sample_index=number),
        )
        for number in range(draws)
    ]
    run = drive(engine, requests, Steering(plan=fixed_plan(name, GAMMA)), batch=BATCH)
    counts = Counter(c.token_ids for c in run.completions.values())
    return Drawn(counts=counts, drafted=run.drafted, accepted=run.accepted)


def judged(name: str, kind: str, law: Law, drawn: Sequence[Drawn]) -> Finding:
    """Return the finding on all seeds together and, where there are several, on each."""
    everything = sum((d.counts for d in drawn), Counter[Prefix]())
    fit = fit_of(everything, law)
    fits = [fit, *(fit_of(d.counts, law) for d in drawn)] if len(drawn) > 1 else [fit]
    worst = max(f.statistic / f.limit for f in fits)
    drafted, accepted = sum(d.drafted for d in drawn), sum(d.accepted for d in drawn)
    by_seed = f"; of {len(drawn)} seeds and all together at most {worst:.0%} of a limit" if drawn[1:] else ""
    detail = (
        f"chi-square {fit.statistic:.1f} of {fit.freedom} degrees, limit {fit.limit:.1f}{by_seed} (a right "
        f"sampler exceeds one less than once in {1 / (len(fits) * FALSE_ALARM):,.0f}), {fit.forbidden} "
        f"forbidden texts, {drafted - accepted} of {drafted} drafts rejected"
    )
    return Finding(
        part=PART,
        name=f"{name}, {kind}",
        passed=all(f.passed for f in fits) and accepted > 0,
        detail=detail,
        compared=everything.total(),
        measures={
            "chi_square": fit.statistic,
            "freedom": float(fit.freedom),
            "limit": fit.limit,
            "seeds": float(len(drawn)),
            "largest_over_limit": worst,
            "drafted": float(drafted),
            "accepted": float(accepted),
        },
    )


def plain_law(teacher: NativeEngine, params: SamplingParams) -> Law:
    """Return the joint law of plain decoding's texts, from the policy's logits after every prefix."""
    chooser = TorchChooser()

    def next_probs(prefix: Prefix) -> torch.Tensor:
        tokens = (*PROMPT, *prefix)
        row = TargetRow(seed=0, position=len(tokens), params=params)
        return chooser.probs(teacher.logits_after(tokens).double().unsqueeze(0), [row])[0]

    return ar_law(next_probs, length=TEXT_TOKENS)


def _enumerated(decoder: str, note: Note) -> Iterator[Finding]:
    for kind, case in round_cases(cut=True):
        if case.decoder != decoder:
            continue
        note(f"{case.rule}, {kind}")
        found = check_round_law(case)
        yield Finding(
            part=PART,
            name=f"{case.rule}, {kind}",
            passed=found.passed,
            detail=f"total variation {found.tv:.2g} from plain decoding over all {found.branches} branches",
            compared=found.branches,
            measures={"total_variation": found.tv, "drafted": float(found.drafted)},
        )
