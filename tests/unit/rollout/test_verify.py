import math

import pytest
import torch
from torch import Tensor

from rollout.engine.law_check import RULES, outcomes
from rollout.engine.target import Choice
from rollout.engine.verify import (
    Decisions,
    DraftDistributionError,
    NoiseDecisions,
    usable_drafts,
    verify_block,
    verify_coupled,
    verify_token,
)
from rollout.errors import NumericError


def choice(token: int, *, finite: bool = True) -> Choice:
    return Choice(
        token=token,
        raw_logprob=-1.0,
        scaled_logprob=-1.0,
        target_logprob=-1.0,
        kept_logmass=0.0,
        finite=finite,
    )


def rows(*probs: list[float]) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64)


class Scripted:
    """Decisions with fixed answers, which remember what they were asked."""

    def __init__(self, *, accept: tuple[bool, ...] = (), token: int = 0) -> None:
        self._accept = list(accept)
        self._token = token
        self.asked: list[tuple[int, float]] = []
        self.weights: Tensor | None = None

    def accept(self, probability: float, *, slot: int) -> bool:
        self.asked.append((slot, probability))
        return self._accept.pop(0)

    def sample(self, weights_V: Tensor, *, slot: int) -> int:
        self.weights = weights_V
        return self._token


# ---- coupled ------------------------------------------------------------------------------------


def test_coupled_keeps_drafts_up_to_the_first_difference() -> None:
    verdict = verify_coupled([4, 5, 6], [choice(4), choice(9), choice(6), choice(7)])
    assert verdict.accepted == 1
    assert [(c.token, origin) for c, origin in verdict.tokens] == [(4, "accepted"), (9, "corrected")]


def test_coupled_adds_a_bonus_when_all_drafts_are_kept() -> None:
    verdict = verify_coupled([4, 5], [choice(4), choice(5), choice(6)])
    assert verdict.accepted == 2
    assert [origin for _, origin in verdict.tokens] == ["accepted", "accepted", "bonus"]


def test_coupled_without_drafts_is_plain() -> None:
    assert [origin for _, origin in verify_coupled([], [choice(1)]).tokens] == ["plain"]


def test_coupled_stops_at_a_choice_that_is_not_finite_even_where_it_equals_the_draft() -> None:
    verdict = verify_coupled([4, 0, 6], [choice(4), choice(0, finite=False), choice(6), choice(7)])
    assert verdict.accepted == 1
    assert [c.finite for c, _ in verdict.tokens] == [True, False]


def test_coupled_ignores_rows_after_the_first_difference() -> None:
    verdict = verify_coupled([4, 5], [choice(3), choice(0, finite=False), choice(0, finite=False)])
    assert [(c.token, origin) for c, origin in verdict.tokens] == [(3, "corrected")]


def test_coupled_needs_one_choice_more_than_drafts() -> None:
    with pytest.raises(ValueError, match="2 choices"):
        verify_coupled([1], [choice(1)])


# ---- block and token ----------------------------------------------------------------------------


def expected_accepted(rule: str) -> float:
    """Mean kept drafts for target (1/3, 2/3), drafter (2/3, 1/3) at every position, two drafts."""
    target = rows([1 / 3, 2 / 3], [1 / 3, 2 / 3], [1 / 3, 2 / 3])
    draft = rows([2 / 3, 1 / 3], [2 / 3, 1 / 3])

    def run(decisions: Decisions) -> int:
        drafts = [decisions.sample(row, slot=slot) for slot, row in enumerate(draft)]
        return RULES[rule](drafts, target, draft, decisions).accepted

    return sum(kept * probability for kept, probability in outcomes(run))


def test_the_published_toy_example_keeps_what_the_paper_says() -> None:
    assert expected_accepted("token") == pytest.approx(10 / 9, abs=1e-12)
    assert expected_accepted("block") == pytest.approx(11 / 9, abs=1e-12)


def test_token_stops_at_the_first_draft_not_kept_and_samples_the_residual() -> None:
    target = rows([0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0])
    draft = rows([0.2, 0.5, 0.3], [0.1, 0.8, 0.1])
    decisions = Scripted(accept=(False,), token=0)
    verdict = verify_token([1, 1], target, draft, decisions)
    assert decisions.asked == [(0, pytest.approx(0.6))]
    assert verdict.tokens == [(0, "corrected")]
    assert decisions.weights is not None
    assert decisions.weights.tolist() == pytest.approx([0.3, 0.0, 0.0])


@pytest.mark.parametrize("rule", sorted(RULES))
def test_identical_distributions_keep_everything_for_sure(rule: str) -> None:
    target = rows([0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6])
    kept = {v.accepted for v, _ in outcomes(lambda d: RULES[rule]([1, 2], target, target[:2], d))}
    assert kept == {2}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_certain_draft_is_kept_with_its_target_probability(rule: str) -> None:
    target = rows([0.25, 0.75], [0.5, 0.5])
    emitted = [0.0, 0.0]
    for verdict, probability in outcomes(lambda d: RULES[rule]([0], target, None, d)):
        emitted[verdict.tokens[0][0]] += probability
    assert emitted == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("rule", sorted(RULES))
def test_no_drafts_sample_the_target_plainly(rule: str) -> None:
    decisions = Scripted(token=1)
    verdict = RULES[rule]([], rows([0.25, 0.75]), None, decisions)
    assert verdict.tokens == [(1, "plain")]
    assert decisions.weights is not None
    assert decisions.weights.tolist() == [0.25, 0.75]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_draft_the_target_excludes_is_never_kept(rule: str) -> None:
    target = rows([0.0, 1.0], [0.5, 0.5])
    kept = {v.accepted for v, _ in outcomes(lambda d: RULES[rule]([0], target, rows([0.5, 0.5]), d))}
    assert kept == {0}


@pytest.mark.slow
def test_block_keeps_at_least_as_much_as_token_in_expectation() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        target = torch.randn(4, 3, generator=generator, dtype=torch.float64).softmax(-1)
        draft = torch.randn(3, 3, generator=generator, dtype=torch.float64).softmax(-1)

        def mean(rule: str, target: Tensor = target, draft: Tensor = draft) -> float:
            def run(decisions: Decisions) -> int:
                drafts = [decisions.sample(row, slot=slot) for slot, row in enumerate(draft)]
                return RULES[rule](drafts, target, draft, decisions).accepted

            return sum(kept * probability for kept, probability in outcomes(run))

        assert mean("block") >= mean("token") - 1e-12


@pytest.mark.parametrize(
    "bad_row",
    [
        [math.nan, 0.5, 0.5],
        [math.inf, 0.0, 0.0],
        [0.5, 0.2, 0.1],
        [1.2, -0.2, 0.0],
        [0.0, 0.5, 0.5],
    ],
)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_row_the_draft_cannot_come_from_is_a_typed_error(rule: str, bad_row: list[float]) -> None:
    """A5: a draft its own distribution rules out is never verified against it."""
    target = rows([0.3, 0.3, 0.4], [0.3, 0.3, 0.4], [0.3, 0.3, 0.4])
    draft = rows([0.3, 0.3, 0.4], bad_row)
    with pytest.raises(DraftDistributionError, match="1"):
        RULES[rule]([0, 0], target, draft, Scripted(accept=(True, True)))
    assert usable_drafts([0, 0], draft)[0] == 1


def test_usable_drafts_says_what_is_wrong_or_nothing() -> None:
    good = rows([0.3, 0.7], [0.6, 0.4])
    assert usable_drafts([0, 1], good) == (2, "")
    assert usable_drafts([0, 1], None) == (2, "")
    assert "probability 0" in usable_drafts([0], rows([0.0, 1.0]))[1]
    assert "outside" in usable_drafts([5], rows([0.0, 1.0]))[1]
    assert usable_drafts([0, 1], good[:1])[0] == 0


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_target_that_is_not_finite_is_the_requests_error(rule: str) -> None:
    target = rows([0.5, 0.5], [math.nan, 0.5])
    with pytest.raises(NumericError):
        RULES[rule]([0], target, None, Scripted())


@pytest.mark.parametrize("rule", sorted(RULES))
def test_shapes_that_do_not_fit_are_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="target rows"):
        RULES[rule]([0], rows([0.5, 0.5]), None, Scripted())
    with pytest.raises(DraftDistributionError, match="tokens"):
        RULES[rule]([0], rows([0.5, 0.5], [0.5, 0.5]), rows([0.5, 0.25, 0.25]), Scripted())


def test_rows_in_single_precision_are_taken_and_normalised() -> None:
    draft = torch.rand(2, 5000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    target = draft.double()[[0, 1, 1]]
    verdict = verify_block(
        [7, 9], target / target.sum(-1, keepdim=True), draft, NoiseDecisions(seed=1, position=4)
    )
    assert verdict.accepted == 2


# ---- decisions from noise -----------------------------------------------------------------------


def test_the_same_round_decides_the_same_and_another_differently() -> None:
    weights = torch.ones(50, dtype=torch.float64)

    def tokens(seed: int) -> list[int]:
        decisions = NoiseDecisions(seed=seed, position=10)
        return [decisions.sample(weights, slot=slot) for slot in range(8)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_certain_and_impossible_decisions_need_no_luck() -> None:
    for seed in range(200):
        decisions = NoiseDecisions(seed=seed, position=0)
        assert decisions.accept(1.0, slot=0)
        assert not decisions.accept(0.0, slot=0)
        assert decisions.sample(torch.tensor([0.0, 1.0, 0.0]), slot=0) == 1
