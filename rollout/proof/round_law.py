"""The law of the production round: ``NativeEngine.run_round`` with every random outcome tried and weighted.

``law_check`` enumerates the verification functions alone; here they stand where they serve, between the
scheduler, the drafters, the policy's pages and the committer. The engine takes its decisions from the branch
being tried, and its choices by noise (plain tokens, drafts of a model) are drawn by the branch as well, from
the very distributions the chooser gives. AR's law comes from teacher forcing, apart from the engine.

One round from one start is enough for one rule: what it emits, continued as AR would, must be AR's joint law.
``lives`` runs several rounds on one sequence instead, so that what a round leaves behind is judged as well.

Shapes: R rows, G drafts, V vocabulary.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.registry import build as build_drafter
from drafters.testing import ScriptedDrafter
from drafters.types import Drafter, DraftRequest
from rollout.config import EngineConfig
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.law_check import (
    EXACT_TV,
    PARAMS,
    Law,
    Prefix,
    TinyModel,
    outcomes,
    total_variation,
)
from rollout.engine.native.decoder import Decoder
from rollout.engine.native.drafts.drafting import Drafting
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.target import Choice, TargetRow
from rollout.engine.verify import Decisions
from rollout.proof.table_decoder import LogitsOf, TableDecoder
from rollout.testing import tiny_looped_policy, tiny_policy
from rollout.testing_native import fixed_plan
from rollout.types import Request, SamplingParams

PROMPT: Prefix = (0, 1)
FIRST = 0
"""Committed before the enumerated tokens: a sequence's first token is chosen plainly, with its prompt."""

CASES: dict[str, SamplingParams] = {
    **PARAMS,
    "stops": SamplingParams(stop_ids=(1,), min_tokens=2, top_p=0.95),
}
"""All that shapes the target distribution, and an end that is forbidden at first."""


ShallowDrafts = Literal["shallow_loop_1", "shallow_loop_2", "shallow_loop_3"]
Drafts = Literal["sampled", "certain", "w4"] | ShallowDrafts


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCase:
    """One setting to enumerate."""

    rule: Literal["token", "block"]
    gamma: int
    vocab_size: int
    params: SamplingParams
    drafts: Drafts = "sampled"
    """``sampled``: from known rows; ``certain``: without rows; else a drafter made of the policy itself."""

    decoder: Literal["table", "torch", "looped"] = "table"
    """``torch``: a real policy in float64; ``looped``: one that runs its block ``loops`` times."""

    loops: int = 2

    lives: int = 0
    """0: one round, continued as AR would; otherwise rounds until so many tokens are there."""

    seed: int = 0

    @property
    def length(self) -> int:
        """Tokens whose joint law is compared."""
        return self.lives or self.gamma + 1

    @property
    def end(self) -> int:
        """Stands for everything after a stop."""
        return self.vocab_size


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCheck:
    """What enumerating one case showed."""

    case: RoundCase
    tv: float
    branches: int
    drafted: int
    """Drafts verified, over all branches: none would make the check empty."""

    @property
    def passed(self) -> bool:
        """Whether the round's law is AR's."""
        return self.tv <= EXACT_TV and self.drafted > 0


@dataclass(kw_only=True, slots=True)
class _Branch:
    """Where the engine's randomness comes from now."""

    decisions: Decisions | None = None
    forced: int | None = None
    """Chosen whatever its probability: how a sequence is brought to its start."""

    def sample(self, probs_V: Tensor, *, slot: int) -> int:
        """Return the branch's next token."""
        assert self.decisions is not None, "a branch is running"
        return self.decisions.sample(probs_V, slot=slot)


class BranchChooser:
    """Implements ``Chooser``: the reference chooser with its noise replaced by the branch's outcomes.

    Noise picks token v with the probability of v, to within ``noise.grid_tv_bound``, so enumerating the
    tokens themselves integrates over it. Distributions are kept: the same rows return in every branch.
    """

    def __init__(self, branch: _Branch) -> None:
        self._branch = branch
        self._reference = TorchChooser()
        self._probs: dict[tuple[object, ...], tuple[SamplingParams, Tensor]] = {}
        self._scores: dict[tuple[object, ...], tuple[SamplingParams, Choice]] = {}

    def choose(
        self, logits_RV: Tensor, rows: Sequence[TargetRow], *, stream: int = 0, logprobs: bool = True
    ) -> list[Choice]:
        """Return the branch's tokens."""
        if self._branch.forced is not None:
            assert len(rows) == 1, "one sequence is brought to its start at a time"
            return self.score(logits_RV, rows, [self._branch.forced])
        probs_RV = self.probs(logits_RV, rows)
        tokens = [self._branch.sample(probs_V, slot=i) for i, probs_V in enumerate(probs_RV)]
        return self.score(logits_RV, rows, tokens)

    def score(self, logits_RV: Tensor, rows: Sequence[TargetRow], tokens: Sequence[int]) -> list[Choice]:
        """Return the logprobs of given tokens, one per row."""
        out = []
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            key = (*_key(logits_RV[i], row), token)
            if key not in self._scores:
                found = self._reference.score(logits_RV[i : i + 1], [row], [token])[0]
                self._scores[key] = (row.params, found)
            out.append(self._scores[key][1])
        return out

    def probs(self, logits_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
        """Return the target distributions."""
        out = []
        for i, row in enumerate(rows):
            key = _key(logits_RV[i], row)
            if key not in self._probs:
                self._probs[key] = (row.params, self._reference.probs(logits_RV[i : i + 1], [row])[0])
            out.append(self._probs[key][1])
        return torch.stack(out)


def _key(logits_V: Tensor, row: TargetRow) -> tuple[object, ...]:
    # The entry holds the params, so their id stays theirs.
    counts = frozenset(row.output_counts.items())
    return (logits_V.numpy().tobytes(), id(row.params), counts, frozenset(row.prompt_tokens), row.banned)


@dataclass(kw_only=True, slots=True)
class EnumeratedEngine:
    """A native engine for one case, and the plain-decoding law it is held against."""

    case: RoundCase
    engine: NativeEngine
    branch: _Branch
    logits_of: LogitsOf
    drafted: int = 0
    _reference: TorchChooser = field(default_factory=TorchChooser)
    _numbers: int = 0

    def run(self, decisions: Decisions) -> Prefix:
        """Bring a sequence to its start and run the case's rounds; return the tokens they emit."""
        case, engine, branch = self.case, self.engine, self.branch
        self._numbers += 1
        request = Request(
            prompt_uid=f"branch{self._numbers}",
            sample_index=0,
            prompt_ids=PROMPT,
            params=case.params,
            seed=0,
        )
        engine.add(request)
        branch.decisions, branch.forced = decisions, FIRST
        plan = fixed_plan(engine.traits.drafters[0].name, case.gamma)
        engine.run_round(plan(engine.load()))
        branch.forced = None
        tokens: list[int] = []
        while True:
            outcome = engine.run_round(plan(engine.load()))
            for emission in outcome.emissions:
                tokens += [t.token_id for t in emission.tokens]
            self.drafted += sum(o.gamma for o in outcome.facts.outcomes)
            if outcome.completions or not case.lives or len(tokens) >= case.lives:
                break
        engine.abort(request.key)
        return tuple(tokens)

    def next_probs(self, prefix: Prefix) -> Tensor:
        """Return plain decoding's distribution after ``FIRST`` and ``prefix``, with the end as last entry."""
        case = self.case
        probs_E = torch.zeros(case.vocab_size + 1, dtype=torch.float64)
        if self._over(prefix):
            probs_E[case.end] = 1.0
            return probs_E
        new = (FIRST, *prefix)
        row = TargetRow(
            seed=0,
            position=len(PROMPT) + len(new),
            params=case.params,
            output_counts=Counter(new),
            prompt_tokens=frozenset(PROMPT),
            banned=case.params.stop_ids if len(new) < case.params.min_tokens else (),
        )
        probs_E[: case.end] = self._reference.probs(self.logits_of((*PROMPT, *new)).unsqueeze(0), [row])[0]
        return probs_E

    def _over(self, prefix: Prefix) -> bool:
        return bool(prefix) and (prefix[-1] == self.case.end or prefix[-1] in self.case.params.stop_ids)


def check_round_law(case: RoundCase) -> RoundCheck:
    """Enumerate one case and compare with AR."""
    return check_engine(enumerated_engine(case))


def check_engine(subject: EnumeratedEngine) -> RoundCheck:
    """Enumerate an engine, right or wrong, and compare with AR."""
    law: Law = defaultdict(float)
    branches = 0
    for tokens, probability in outcomes(subject.run):
        branches += 1
        law[tokens] += probability
    length = subject.case.length
    expected = _continued({(): 1.0}, subject.next_probs, length=length)
    tv = total_variation(_continued(law, subject.next_probs, length=length), expected)
    return RoundCheck(case=subject.case, tv=tv, branches=branches, drafted=subject.drafted)


def _continued(law: Law, next_probs: Callable[[Prefix], Tensor], *, length: int) -> Law:
    """Return the law of ``length`` tokens when plain decoding goes on after what was emitted."""
    done: Law = defaultdict(float)
    open_prefixes = law
    while open_prefixes:
        longer: Law = defaultdict(float)
        for prefix, mass in open_prefixes.items():
            if len(prefix) >= length:
                done[prefix[:length]] += mass
                continue
            for token, probability in enumerate(next_probs(prefix).tolist()):
                if probability > 0:
                    longer[(*prefix, token)] += mass * probability
        open_prefixes = longer
    return done


def enumerated_engine(case: RoundCase) -> EnumeratedEngine:
    """Return the production engine of a case, its randomness in the hands of a branch."""
    branch = _Branch()
    decoder, logits_of = _policy(case)
    chooser = BranchChooser(branch)

    def decisions_of(_sequence: object) -> Decisions:
        assert branch.decisions is not None, "a branch is running"
        return branch.decisions

    engine = NativeEngine(
        decoder=decoder,
        chooser=chooser,
        drafting=Drafting([_drafter(case, branch)], vocab_size=case.vocab_size, failure_limit=3),
        config=EngineConfig(max_batch=1, max_context_tokens=48, prefix_cache=False, verify=case.rule),
        numerics_exact=True,
        decoder_description=case.decoder,
        detokenizer=None,
        policy_version=0,
        weights_checksum="enumerated",
        decisions_of=decisions_of,
    )
    return EnumeratedEngine(case=case, engine=engine, branch=branch, logits_of=logits_of)


def _policy(case: RoundCase) -> tuple[Decoder, LogitsOf]:
    if case.decoder == "table":
        table = TinyModel(vocab_size=case.vocab_size, seed=2 * case.seed + 1)
        return TableDecoder(table.logits, vocab_size=case.vocab_size), table.logits
    if case.decoder == "looped":
        policy = tiny_looped_policy(case.seed, case.vocab_size, loops=case.loops, layers=1)
    else:
        policy = tiny_policy(case.seed, vocab=case.vocab_size, layers=1)

    def decoder() -> TorchDecoder:
        made = TorchDecoder(
            policy.spec,
            cos_PH=policy.cos_PH,
            sin_PH=policy.sin_PH,
            dtype=torch.float64,
            device="cpu",
            exact=False,
        )
        made.load(policy.state)
        return made

    teacher = NativeEngine(
        decoder=decoder(),
        chooser=TorchChooser(),
        drafting=Drafting([], vocab_size=case.vocab_size, failure_limit=3),
        config=EngineConfig(max_batch=1, max_context_tokens=48),
        numerics_exact=True,
        decoder_description="teacher",
        detokenizer=None,
        policy_version=0,
        weights_checksum="enumerated",
    )
    return decoder(), teacher.logits_after


def _drafter(case: RoundCase, branch: _Branch) -> Drafter:
    if case.drafts not in ("sampled", "certain"):
        return build_drafter(case.drafts, DrafterConfig(names=(case.drafts,), w4_kernel="torch"))
    model = TinyModel(vocab_size=case.vocab_size, seed=2 * case.seed + 2)

    def row(request: DraftRequest, drafts: Sequence[int]) -> Tensor:
        return model.probs((*request.tokens[request.prompt_tokens :], *drafts), case.params)

    def sampled(request: DraftRequest) -> list[int]:
        drafts: list[int] = []
        for slot in range(request.gamma):
            drafts.append(branch.sample(row(request, drafts), slot=slot))
        return drafts

    def certain(request: DraftRequest) -> list[int]:
        drafts: list[int] = []
        for _ in range(request.gamma):
            drafts.append(int(row(request, drafts).argmax()))
        return drafts

    def rows(request: DraftRequest, drafts: Sequence[int]) -> Tensor:
        return torch.stack([row(request, drafts[:i]) for i in range(len(drafts))])

    if case.drafts == "certain":
        return ScriptedDrafter(certain)
    return ScriptedDrafter(sampled, probs=rows)


_SHALLOW: tuple[tuple[str, ShallowDrafts, int], ...] = (
    ("its own first loop", "shallow_loop_1", 2),
    ("its first two of three loops", "shallow_loop_2", 3),
    ("its first three of four loops", "shallow_loop_3", 4),
)
"""Name, drafter, and the loops of the policy: drafts have had all but one, which is left to verify with."""

VOCAB_OF_GAMMA = {1: 5, 2: 4, 3: 3, 4: 3}
"""As large as a few hundred to a few thousand branches allow."""


def round_cases(*, cut: bool = False) -> Iterator[tuple[str, RoundCase]]:
    """Yield every case under a name; ``cut`` keeps gamma 3 and 4 to two kinds of params."""
    rules: tuple[Literal["token", "block"], ...] = ("token", "block")
    for rule in rules:
        for number, (kind, params) in enumerate(CASES.items()):
            for gamma, vocab_size in VOCAB_OF_GAMMA.items():
                if cut and gamma > 2 and kind not in ("all_filters", "stops"):
                    continue
                # Filters leave few tokens, and one table may leave too few to show much.
                for table in (100, 150) if params.has_filters and not cut else (100,):
                    case = RoundCase(
                        rule=rule, gamma=gamma, vocab_size=vocab_size, params=params, seed=table + number
                    )
                    yield f"{kind}, gamma {gamma}", case
        for gamma in VOCAB_OF_GAMMA:
            case = RoundCase(
                rule=rule, gamma=gamma, vocab_size=4, params=CASES["cold"], drafts="certain", seed=200
            )
            yield f"drafts without rows, gamma {gamma}", case
        yield from _lives(rule)


def _lives(rule: Literal["token", "block"]) -> Iterator[tuple[str, RoundCase]]:
    yield (
        "several rounds of one sequence",
        RoundCase(rule=rule, gamma=1, vocab_size=3, params=CASES["penalties"], lives=3, seed=300),
    )
    yield (
        "float64 policy, known rows",
        RoundCase(rule=rule, gamma=2, vocab_size=3, params=CASES["cold"], decoder="torch", seed=301),
    )
    yield (
        "float64 policy, its own 4-bit drafter, several rounds",
        RoundCase(
            rule=rule,
            gamma=1,
            vocab_size=3,
            params=CASES["cold"],
            drafts="w4",
            decoder="torch",
            lives=2,
            seed=302,
        ),
    )
    for name, drafts, loops in _SHALLOW:
        for gamma, lives in ((1, 2), (2, 0)):
            yield (
                f"float64 looped policy, {name}, gamma {gamma}",
                RoundCase(
                    rule=rule,
                    gamma=gamma,
                    vocab_size=3,
                    params=CASES["cold"],
                    drafts=drafts,
                    decoder="looped",
                    loops=loops,
                    lives=lives,
                    seed=303,
                ),
            )
