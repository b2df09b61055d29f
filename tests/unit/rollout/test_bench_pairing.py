"""Paired ratios: intervals, the same-work rule, when pairs are enough, and what they say about a goal."""

import math
import random
from dataclasses import replace

import pytest

from rollout.bench.pairing import Claim, Gap, PairedRatio, Timed, interval90, same_work_gap, t95

CLAIM = Claim(name="trace_auto_over_ar", a="auto", b="ar", margin=0.15, at_least=1.15)


def timed(makespan_s: float, *, pace_s: float = 0.01, round_s: float = 0.02, rounds: int = 100) -> Timed:
    return Timed(
        makespan_s=makespan_s, pace_s=pace_s, plain={(8, 3): (rounds, rounds * round_s)} if rounds else {}
    )


def paired(claim: Claim = CLAIM, *, min_pairs: int = 3, max_pairs: int = 10) -> PairedRatio:
    return PairedRatio(claim, min_pairs=min_pairs, max_pairs=max_pairs)


@pytest.mark.parametrize(
    ("freedom", "published"),
    [(1, 6.3138), (4, 2.1318), (10, 1.8125), (11, 1.7959), (15, 1.7531), (30, 1.6973), (39, 1.6849)],
)
def test_the_quantile_of_student_is_the_published_one(freedom: int, published: float) -> None:
    assert t95(freedom) == pytest.approx(published, abs=2e-4)


@pytest.mark.slow
def test_the_interval_holds_the_true_ratio_nine_times_in_ten() -> None:
    """5000 intervals of 5 pairs; 90% give or take 5.2 standard errors: false alarm under 1e-6."""
    rng = random.Random(0)
    truth, trials = 1.2, 5000
    held = 0
    for _ in range(trials):
        interval = interval90([truth * math.exp(rng.gauss(0.0, 0.05)) for _ in range(5)])
        assert interval is not None
        held += interval[0] <= truth <= interval[1]
    assert held / trials == pytest.approx(0.9, abs=5.2 * math.sqrt(0.09 / trials))


def test_the_interval_of_the_inverse_ratio_is_the_inverse_interval() -> None:
    ratios = [1.1, 1.3, 1.2, 1.05]
    forth, back = interval90(ratios), interval90([1 / r for r in ratios])
    assert forth is not None
    assert back is not None
    assert back == pytest.approx((1 / forth[1], 1 / forth[0]))


def test_one_pair_has_no_interval() -> None:
    assert interval90([1.2]) is None


def test_a_ratio_is_the_time_of_b_over_the_time_of_a() -> None:
    ratio = paired()
    assert ratio.add(timed(10.0), timed(12.0))
    assert ratio.ratios == [1.2]


def test_a_pair_whose_same_work_took_unequal_time_is_dropped_and_counted() -> None:
    ratio = paired()
    assert not ratio.add(timed(10.0, round_s=0.02), timed(12.0, round_s=0.0212))
    assert ratio.ratios == []
    assert [(g.by, round(g.frac, 3)) for g in ratio.dropped] == [("plain rounds", 0.06)]
    assert ratio.add(timed(10.0, round_s=0.02), timed(12.0, round_s=0.0208))
    assert len(ratio.ratios) == 1


def test_the_same_work_rule_holds_whichever_arm_was_slower() -> None:
    fast, slow = timed(10.0, round_s=0.02), timed(12.0, round_s=0.0212)
    assert same_work_gap(fast, slow) == same_work_gap(slow, fast)


def test_makespans_may_differ_as_they_like_while_the_same_work_took_the_same_time() -> None:
    assert paired().add(timed(1.0), timed(100.0))


def test_only_rounds_that_had_to_do_the_same_are_compared() -> None:
    a = Timed(makespan_s=1.0, pace_s=0.01, plain={(8, 3): (30, 0.6), (4, 5): (50, 9.0)})
    b = Timed(makespan_s=1.0, pace_s=0.02, plain={(8, 3): (60, 1.2), (4, 6): (50, 1.0)})
    assert same_work_gap(a, b) == Gap(frac=0.0, by="plain rounds")


def test_too_few_shared_rounds_leave_the_reference_forwards_to_speak() -> None:
    gap = same_work_gap(timed(10.0, rounds=5, round_s=0.5), timed(12.0, rounds=5, pace_s=0.0104))
    assert gap.by == "reference forward"
    assert gap.frac == pytest.approx(0.04)
    assert not paired().add(timed(10.0, rounds=0), timed(12.0, rounds=0, pace_s=0.0106))


def test_reference_forwards_drop_only_what_could_matter_to_the_claim() -> None:
    wide = paired(replace(CLAIM, margin=2.0, at_least=3.0))
    assert wide.add(timed(10.0, rounds=0), timed(70.0, rounds=0, pace_s=0.0115))
    assert not wide.add(timed(10.0, rounds=0), timed(70.0, rounds=0, pace_s=0.0125))
    assert not wide.add(timed(10.0), timed(70.0, round_s=0.0212))


def test_pairs_are_wanted_until_the_interval_is_narrower_than_half_the_margin() -> None:
    ratio = paired()
    for b in (11.6, 12.4):
        ratio.add(timed(10.0), timed(b))
        assert ratio.wants_pairs
    while ratio.wants_pairs:
        ratio.add(timed(10.0), timed(11.6 + 0.8 * (len(ratio.ratios) % 2)))
    interval = ratio.interval
    assert interval is not None
    assert ratio.settled
    assert interval[1] - interval[0] < ratio.wanted_width
    assert 3 < len(ratio.ratios) < 10


def test_few_equal_pairs_are_not_enough() -> None:
    ratio = paired(min_pairs=3)
    ratio.add(timed(10.0), timed(12.0))
    ratio.add(timed(10.0), timed(12.0))
    assert not ratio.settled
    ratio.add(timed(10.0), timed(12.0))
    assert ratio.settled


def test_a_ratio_far_beyond_its_goal_need_not_be_known_to_the_goals_precision() -> None:
    ratio = paired(replace(CLAIM, margin=2.0, at_least=3.0))
    for b in (95.0, 100.0, 105.0):
        ratio.add(timed(10.0), timed(b))
    assert ratio.wanted_width == pytest.approx(4.5, rel=0.02)
    assert ratio.settled
    assert ratio.verdict == "met"


@pytest.mark.parametrize("counted", [True, False])
def test_a_noisy_ratio_stops_at_the_most_pairs_kept_or_dropped(counted: bool) -> None:
    ratio = paired(max_pairs=6)
    runs = 0
    while ratio.wants_pairs:
        ratio.add(timed(10.0), timed(5.0 + 20.0 * (runs % 2), round_s=0.02 if counted else 0.03))
        runs += 1
    assert runs == 6
    assert not ratio.settled
    assert ratio.verdict == "undecided"


@pytest.mark.parametrize(
    ("b_s", "verdict"),
    [((11.8, 11.9, 12.0), "met"), ((11.4, 11.5, 11.6), "undecided"), ((10.0, 10.1, 10.2), "not met")],
)
def test_a_goal_is_met_by_the_lower_end_and_missed_by_the_upper(b_s: tuple[float, ...], verdict: str) -> None:
    ratio = paired()
    for b in b_s:
        ratio.add(timed(10.0), timed(b))
    assert ratio.verdict == verdict


def test_a_stricter_goal_has_a_name_and_a_verdict_of_its_own_on_the_same_pairs() -> None:
    ratio = paired(replace(CLAIM, stricter=1.7))
    for b in (11.8, 11.9, 12.0):
        ratio.add(timed(10.0), timed(b))
    verdicts = {name: ratio.verdict_on(goal) for name, goal in ratio.claim.goals.items()}
    assert verdicts == {"trace_auto_over_ar": "met", "trace_auto_over_ar_strict": "not met"}
    assert ratio.verdict == "met"


def test_a_ratio_without_a_goal_has_no_verdict() -> None:
    ratio = paired(replace(CLAIM, at_least=None))
    ratio.add(timed(10.0), timed(20.0))
    assert ratio.verdict is None


def test_no_pair_of_a_lockstep_is_dropped_and_its_gap_is_written_down() -> None:
    """Both arms met the same machine: dropping a gap would drop pairs by their outcome."""

    def of(lockstep: int | None, *, rounds: int, round_s: float = 0.02, pace_s: float = 0.01) -> Timed:
        run = timed(10.0, rounds=rounds, round_s=round_s, pace_s=pace_s)
        return replace(run, lockstep=lockstep)

    apart = same_work_gap(of(1, rounds=100), of(1, rounds=100, round_s=0.03))
    assert (apart.by, apart.frac) == ("lockstep", pytest.approx(0.5))
    assert not apart.too_wide(CLAIM)
    assert same_work_gap(of(1, rounds=0), of(1, rounds=0, pace_s=0.02)) == Gap(frac=0.0, by="lockstep")
    assert same_work_gap(of(1, rounds=0), of(2, rounds=0, pace_s=0.02)).by == "reference forward"
    assert same_work_gap(of(1, rounds=100), of(2, rounds=100, round_s=0.03)).too_wide(CLAIM)
