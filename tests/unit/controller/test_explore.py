import pytest

from controller.explore import STREAK_ROUNDS, ExploreBudget, Pace
from controller.types import AR, RoundFacts, SequenceOutcome


def facts(*, tokens: int, seconds: float, prefill_rows: int = 0) -> RoundFacts:
    outcome = SequenceOutcome(
        key=0,
        drafter=AR,
        gamma=0,
        accepted=0,
        committed=tokens,
        context_tokens=10,
        censored=False,
        finished=False,
    )
    return RoundFacts(
        round_index=0,
        policy_version=0,
        batch=1,
        prefill_rows=prefill_rows,
        verify_rows=1,
        context_tokens=10,
        draft_s=0.0,
        verify_s=seconds,
        commit_s=0.0,
        total_s=seconds,
        outcomes=(outcome,),
    )


def test_a_streak_slower_than_what_it_replaced_disappoints_once_and_a_faster_one_does_not() -> None:
    for tokens, slower in ((2, True), (4, False)):
        pace = Pace()
        for _ in range(8):
            assert not pace.disappoints(facts(tokens=1, seconds=0.010), 0, speculated=False)
        streak = [
            pace.disappoints(facts(tokens=tokens, seconds=0.025), 0, speculated=True)
            for _ in range(2 * STREAK_ROUNDS)
        ]
        ends = [False] * (STREAK_ROUNDS - 1) + [slower]
        assert streak == ends * 2


@pytest.mark.parametrize("between", ["plain", "prompt", "batch"])
def test_only_rounds_in_a_row_at_one_batch_make_a_streak(between: str) -> None:
    pace = Pace()
    for bucket in (0, 1):
        pace.disappoints(facts(tokens=1, seconds=0.010), bucket, speculated=False)
    slow = facts(tokens=1, seconds=0.050)
    for turn in range(5):
        for _ in range(STREAK_ROUNDS - 1):
            bucket = turn % 2 if between == "batch" else 0
            assert not pace.disappoints(slow, bucket, speculated=True)
        if between == "plain":
            assert not pace.disappoints(facts(tokens=1, seconds=0.010), 0, speculated=False)
        elif between == "prompt":
            assert not pace.disappoints(facts(tokens=1, seconds=0.050, prefill_rows=64), 0, speculated=True)


def test_without_a_plain_round_at_this_batch_there_is_nothing_to_compare_with() -> None:
    pace = Pace()
    pace.disappoints(facts(tokens=1, seconds=0.010), 3, speculated=False)
    assert not any(pace.disappoints(facts(tokens=1, seconds=9.0), 0, speculated=True) for _ in range(20))


def test_what_is_there_at_once_is_the_share_of_the_start() -> None:
    budget = ExploreBudget(0.01, start_s=0.5)
    assert not budget.afford(0.006, 100.0)
    assert budget.afford(0.004, 100.0)
    assert not budget.afford(0.004, 100.0)
    budget.earn(0.5)
    assert budget.afford(0.004, 100.0)


def test_looks_that_keep_losing_more_than_expected_are_expected_to_and_a_single_stall_is_not() -> None:
    budget = ExploreBudget(0.01, start_s=100.0)
    taken = []
    for seconds in (0.011, 0.9, 0.031, 0.031, 0.011):
        before = budget.lost_s
        assert budget.afford(0.001, 100.0)
        taken.append(budget.lost_s - before)
        budget.settle(seconds, 1)
    # A token is worth 10 ms: the third look knows of one stall only, the fourth of two looks 20 ms too dear.
    assert taken == pytest.approx([0.001, 0.001, 0.001, 0.021, 0.021])
