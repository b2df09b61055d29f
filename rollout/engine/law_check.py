"""Losslessness by exact enumeration: what a round emits, summed over everything that can happen in it.

A tiny vocabulary, random logits for every prefix, and the production verify functions: they ask a
``Decisions`` for each random outcome, and here every outcome is tried and weighted with its probability.
Nothing is sampled, so a correct rule agrees with AR to rounding and a wrong one shows its exact error.
The same code serves the tests and ``taildraft verify``. ``planted_laws.py`` holds known-wrong rounds.

Shapes: G drafts, V vocabulary.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from rollout.engine import noise
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.target import Chooser, TargetRow
from rollout.engine.verify import Decisions, SampledVerdict, verify_block, verify_token
from rollout.types import SamplingParams

EXACT_TV = 1e-12
"""A correct rule differs from AR by the rounding of a few hundred double precision products."""

CAUGHT_TV = 1e-6
"""A planted error must show at least this much, a million times what rounding does."""

LOGIT_SPREAD = 1.5
"""Standard deviation of the random logits: neither near uniform nor near certain at vocabulary 3 to 5."""

Prefix = tuple[int, ...]
Law = dict[Prefix, float]
T = TypeVar("T")

RoundLaw = Callable[[Prefix, Decisions], Prefix]
"""One round after a prefix, all its randomness taken from the decisions; returns the tokens it emits."""

Rule = Callable[[Sequence[int], Tensor, Tensor | None, Decisions], SampledVerdict]

RULES: dict[str, Rule] = {"token": verify_token, "block": verify_block}


@dataclass(frozen=True, kw_only=True, slots=True)
class LawCase:
    """One setting to enumerate."""

    rule: Literal["token", "block"]
    gamma: int
    vocab_size: int
    params: SamplingParams
    draft_params: SamplingParams | None = None
    """How drafts are drawn; None: as the target. A drafter may differ as long as it reports what it did."""

    point_mass: bool = False
    """Drafts are certain given their prefix and come without distributions."""

    gamma_varies: bool = False
    """The draft length follows from the prefix, as an adaptive controller's does."""

    seed: int = 0
    length: int = 3
    """Tokens per output; a round that would emit more is cut, as a length limit cuts it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LawCheck:
    """What enumerating one case showed."""

    case: LawCase
    tv: float
    """Total variation between the emitted joint law and AR's."""

    branches: int
    """Rounds run, one for every way the randomness can fall."""

    @property
    def passed(self) -> bool:
        """Whether the emitted law is AR's."""
        return self.tv <= EXACT_TV


class _Replay:
    """Decisions that follow a script of outcomes, and the first possible outcome after it."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.trail: list[tuple[int, list[float]]] = []
        self.probability = 1.0

    def accept(self, probability: float, *, slot: int) -> bool:
        """Implements ``Decisions.accept``."""
        if not 0 <= probability <= 1:
            raise ValueError(f"slot {slot} is kept with probability {probability}")
        return self._next([probability, 1.0 - probability]) == 0

    def sample(self, weights_V: Tensor, *, slot: int) -> int:
        """Implements ``Decisions.sample``."""
        probs: list[float] = (weights_V / weights_V.sum()).tolist()
        return self._next(probs)

    def _next(self, probs: list[float]) -> int:
        depth = len(self.trail)
        outcome = self._script[depth] if depth < len(self._script) else _first_possible(probs, 0)
        assert outcome is not None, f"no outcome is possible: {probs}"
        self.trail.append((outcome, probs))
        self.probability *= probs[outcome]
        return outcome

    def next_script(self) -> list[int] | None:
        """Return the script of the next branch, depth first; None after the last."""
        outcomes = [outcome for outcome, _ in self.trail]
        for depth in range(len(self.trail) - 1, -1, -1):
            following = _first_possible(self.trail[depth][1], outcomes[depth] + 1)
            if following is not None:
                return [*outcomes[:depth], following]
        return None


def _first_possible(probs: list[float], start: int) -> int | None:
    return next((i for i in range(start, len(probs)) if probs[i] > 0), None)


def outcomes(run: Callable[[Decisions], T]) -> Iterator[tuple[T, float]]:
    """Run something once for every way its decisions can fall; yield results with their probabilities."""
    script: list[int] | None = []
    while script is not None:
        replay = _Replay(script)
        result = run(replay)
        yield result, replay.probability
        script = replay.next_script()


def emitted_law(round_law: RoundLaw, *, length: int) -> tuple[Law, int]:
    """Return the joint law of the first ``length`` tokens over as many rounds as they take, and how many
    branches that were."""
    law: Law = defaultdict(float)
    branches = 0
    open_prefixes: Law = {(): 1.0}
    while open_prefixes:
        longer: Law = defaultdict(float)
        for prefix, mass in open_prefixes.items():
            for tokens, probability in outcomes(partial(round_law, prefix)):
                branches += 1
                if not tokens:
                    raise ValueError(f"a round after {prefix} emitted nothing")
                grown = (prefix + tokens)[:length]
                (law if len(grown) == length else longer)[grown] += mass * probability
        open_prefixes = longer
    return dict(law), branches


def ar_law(next_probs: Callable[[Prefix], Tensor], *, length: int) -> Law:
    """Return the joint law of ``length`` tokens drawn one after the other."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*prefix, token): mass * probability
            for prefix, mass in law.items()
            for token, probability in enumerate(next_probs(prefix).tolist())
        }
    return law


def total_variation(a: Law, b: Law) -> float:
    """Return half the summed absolute difference."""
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())


class TinyModel:
    """Random logits for every prefix, and the distributions a chooser makes of them. Fixed by its seed."""

    def __init__(self, *, vocab_size: int, seed: int, chooser: Chooser | None = None) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._chooser = chooser or TorchChooser()
        self._probs: dict[tuple[Prefix, int], Tensor] = {}

    def logits(self, prefix: Prefix) -> Tensor:
        """Return the logits after a prefix, float64, shape V."""
        number = noise.mix64(self._seed)
        for token in prefix:
            number = noise.mix64(number ^ (token + 1))
        generator = torch.Generator().manual_seed(number >> 1)
        return LOGIT_SPREAD * torch.randn(self._vocab_size, dtype=torch.float64, generator=generator)

    def probs(self, prefix: Prefix, params: SamplingParams) -> Tensor:
        """Return the distribution of the token after a prefix under ``params``, shape V."""
        key = (prefix, id(params))
        if key not in self._probs:
            row = TargetRow(
                seed=0,
                position=1 + len(prefix),
                params=params,
                output_counts=Counter(prefix),
                prompt_tokens=frozenset({0}),
            )
            self._probs[key] = self._chooser.probs(self.logits(prefix).unsqueeze(0), [row])[0]
        return self._probs[key]


class TinyRound:
    """The pieces of a round on tiny models. Subclasses plant errors; this one is right."""

    def __init__(self, case: LawCase) -> None:
        self.case = case
        self.target = TinyModel(vocab_size=case.vocab_size, seed=2 * case.seed + 1)
        self.drafter = TinyModel(vocab_size=case.vocab_size, seed=2 * case.seed + 2)
        self.draft_params = case.draft_params or case.params

    def target_row(self, prefix: Prefix) -> Tensor:
        """Return the distribution verification holds drafts against."""
        return self.target.probs(prefix, self.case.params)

    def drawn_from(self, prefix: Prefix) -> Tensor:
        """Return the distribution the draft after ``prefix`` is really drawn from."""
        return self.drafter.probs(prefix, self.draft_params)

    def reported(self, prefix: Prefix) -> Tensor:
        """Return the distribution the drafter says it drew from."""
        return self.drawn_from(prefix)

    def gamma(self, prefix: Prefix) -> int:
        """Return the draft length after a prefix."""
        return 1 + sum(prefix) % self.case.gamma if self.case.gamma_varies else self.case.gamma

    def draft(self, prefix: Prefix, decisions: Decisions) -> tuple[list[int], Tensor | None]:
        """Return drafts and the rows reported for them."""
        drafts: list[int] = []
        rows: list[Tensor] = []
        for slot in range(self.gamma(prefix)):
            here = (*prefix, *drafts)
            if self.case.point_mass:
                drafts.append(int(self.drawn_from(here).argmax()))
                continue
            rows.append(self.reported(here))
            drafts.append(decisions.sample(self.drawn_from(here), slot=slot))
        return drafts, torch.stack(rows) if rows else None

    def verify(
        self, prefix: Prefix, drafts: list[int], draft_probs_GV: Tensor | None, decisions: Decisions
    ) -> list[int]:
        """Return the tokens the round emits."""
        target = torch.stack([self.target_row((*prefix, *drafts[:i])) for i in range(len(drafts) + 1)])
        verdict = RULES[self.case.rule](drafts, target, draft_probs_GV, decisions)
        return [token for token, _ in verdict.tokens]

    def __call__(self, prefix: Prefix, decisions: Decisions) -> Prefix:
        """Run one round: a ``RoundLaw``."""
        drafts, rows = self.draft(prefix, decisions)
        return tuple(self.verify(prefix, drafts, rows, decisions))


def check_round(round_law: TinyRound) -> LawCheck:
    """Enumerate a round, right or wrong, and compare what it emits with AR."""
    case = round_law.case
    reference = TinyModel(vocab_size=case.vocab_size, seed=2 * case.seed + 1)
    expected = ar_law(lambda prefix: reference.probs(prefix, case.params), length=case.length)
    law, branches = emitted_law(round_law, length=case.length)
    return LawCheck(case=case, tv=total_variation(law, expected), branches=branches)


def check_law(case: LawCase) -> LawCheck:
    """Enumerate the production rule of a case."""
    return check_round(TinyRound(case))


PARAMS: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "greedy": SamplingParams(temperature=0.0),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.2),
    "all_filters": SamplingParams(temperature=1.3, top_k=3, top_p=0.9, min_p=0.1),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    "bias": SamplingParams(logit_bias={0: 1.0, 2: float("-inf")}, top_p=0.95),
}
"""Sampling params every rule is enumerated with."""


def standard_cases() -> Iterator[LawCase]:
    """Yield the cases of the suite: both rules, gamma 1 to 4, every kind of params and drafter."""
    for rule in ("token", "block"):
        for number, params in enumerate(PARAMS.values()):
            for gamma in (1, 2):
                yield LawCase(rule=rule, gamma=gamma, vocab_size=4, params=params, seed=number)
        yield LawCase(rule=rule, gamma=3, vocab_size=3, params=PARAMS["all_filters"], seed=20)
        yield LawCase(rule=rule, gamma=3, vocab_size=3, params=PARAMS["penalties"], seed=21)
        yield LawCase(rule=rule, gamma=4, vocab_size=3, params=PARAMS["plain"], seed=22)
        yield LawCase(rule=rule, gamma=1, vocab_size=5, params=PARAMS["all_filters"], seed=23)
        for gamma in (1, 2, 3, 4):
            yield LawCase(
                rule=rule, gamma=gamma, vocab_size=4, params=PARAMS["top_p"], point_mass=True, seed=30 + gamma
            )
        yield LawCase(rule=rule, gamma=3, vocab_size=3, params=PARAMS["cold"], gamma_varies=True, seed=40)
        yield LawCase(
            rule=rule,
            gamma=2,
            vocab_size=4,
            params=PARAMS["top_k"],
            draft_params=PARAMS["cold"],
            seed=41,
        )
