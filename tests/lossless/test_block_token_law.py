"""Block and token verification by exact enumeration: nothing is sampled, so nothing can fail by chance."""

import pytest
import torch
from torch import Tensor

from rollout.engine.law_check import (
    CAUGHT_TV,
    EXACT_TV,
    RULES,
    Law,
    LawCase,
    TinyRound,
    ar_law,
    check_law,
    check_round,
    outcomes,
    standard_cases,
    total_variation,
)
from rollout.engine.planted_laws import PLANTED, check_planted
from rollout.engine.verify import Decisions
from rollout.types import SamplingParams

pytestmark = pytest.mark.lossless

CASES = list(standard_cases())


def name(case: LawCase) -> str:
    return f"{case.rule}-gamma{case.gamma}-V{case.vocab_size}-seed{case.seed}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_emitted_joint_law_is_that_of_ar(case: LawCase) -> None:
    """A5: whatever the draft was drawn with, filters of its own included."""
    check = check_law(case)
    assert check.tv <= EXACT_TV
    assert check.passed


def test_the_suite_covers_both_rules_and_every_gamma_up_to_four() -> None:
    assert {(c.rule, c.gamma) for c in CASES} == {(r, g) for r in RULES for g in (1, 2, 3, 4)}


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("planted", sorted(PLANTED))
def test_every_planted_error_is_caught(planted: str, rule: str) -> None:
    check = check_planted(planted, rule=rule)
    assert check.tv > CAUGHT_TV
    assert check.caught


class SampledAsCertain(TinyRound):
    """Draws drafts at random and verifies them without their distributions."""

    def draft(self, prefix: tuple[int, ...], decisions: Decisions) -> tuple[list[int], Tensor | None]:
        return super().draft(prefix, decisions)[0], None


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafts_of_any_origin_may_be_verified_as_certain(rule: str) -> None:
    case = LawCase(
        rule="token" if rule == "token" else "block", gamma=3, vocab_size=3, params=SamplingParams(), seed=50
    )
    assert check_round(SampledAsCertain(case)).tv <= EXACT_TV


def test_resuming_from_the_target_errs_by_what_arithmetic_says() -> None:
    """A6: target (.6, .4), drafter (.4, .6): kept mass (.4, .4), and .2 * target, not all to the first."""
    target = torch.tensor([[0.6, 0.4], [0.6, 0.4]], dtype=torch.float64)
    draft = torch.tensor([[0.4, 0.6]], dtype=torch.float64)

    def law(wrong: bool) -> Law:
        class Resuming:
            def __init__(self, inner: Decisions) -> None:
                self._inner = inner

            def accept(self, probability: float, *, slot: int) -> bool:
                return self._inner.accept(probability, slot=slot)

            def sample(self, weights_V: Tensor, *, slot: int) -> int:
                return self._inner.sample(target[slot] if wrong else weights_V, slot=slot)

        def run(decisions: Decisions) -> int:
            token = decisions.sample(draft[0], slot=0)
            return RULES["token"]([token], target, draft, Resuming(decisions)).tokens[0][0]

        emitted: Law = {(0,): 0.0, (1,): 0.0}
        for token, probability in outcomes(run):
            emitted[token,] += probability
        return emitted

    ar: Law = {(0,): 0.6, (1,): 0.4}
    assert total_variation(law(wrong=False), ar) < 1e-15
    assert total_variation(law(wrong=True), ar) == pytest.approx(0.08, abs=1e-12)


def test_trimming_by_value_errs_by_what_arithmetic_says() -> None:
    """Target (.5, .5), drafter (.9, .1), the draft dropped where its own probability is at most 1/2.

    The first token comes out with .9 * (.5 / .9) + .1 * .5 = .55.
    """
    target = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    draft = torch.tensor([[0.9, 0.1]], dtype=torch.float64)

    def run(decisions: Decisions) -> int:
        token = decisions.sample(draft[0], slot=0)
        if draft[0, token] > 0.5:
            return RULES["token"]([token], target, draft, decisions).tokens[0][0]
        return RULES["token"]([], target[:1], None, decisions).tokens[0][0]

    first = sum(probability for token, probability in outcomes(run) if token == 0)
    assert first == pytest.approx(0.55, abs=1e-12)


def test_enumeration_itself_covers_all_the_probability() -> None:
    def run(decisions: Decisions) -> tuple[bool, int]:
        kept = decisions.accept(0.3, slot=0)
        return kept, decisions.sample(torch.tensor([0.5, 0.0, 0.25], dtype=torch.float64), slot=1)

    results = dict(outcomes(run))
    assert len(results) == 4
    assert sum(results.values()) == pytest.approx(1.0, abs=1e-15)
    assert results[True, 0] == pytest.approx(0.3 * 2 / 3)


def test_the_law_of_ar_multiplies_along_the_way() -> None:
    law = ar_law(lambda prefix: torch.tensor([0.25, 0.75] if prefix else [0.5, 0.5]), length=2)
    assert law == {(0, 0): 0.125, (0, 1): 0.375, (1, 0): 0.125, (1, 1): 0.375}
