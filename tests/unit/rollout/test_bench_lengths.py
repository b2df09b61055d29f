"""The length law: the same everywhere, with the median and spread it says, never past the cap."""

import math
import statistics

from rollout.bench.lengths import summarize, trace_lengths


def lengths(count: int, *, seed: int = 0, cap_tokens: int = 1024) -> tuple[int, ...]:
    return trace_lengths(count, seed=seed, median_tokens=80.0, sigma=1.1, cap_tokens=cap_tokens)


def test_lengths_are_the_same_on_every_machine() -> None:
    assert lengths(8) == (109, 71, 618, 40, 214, 48, 80, 563)


def test_a_longer_trace_starts_like_a_shorter_one() -> None:
    assert lengths(32)[:8] == lengths(8)


def test_another_seed_gives_other_lengths() -> None:
    assert lengths(32, seed=1) != lengths(32, seed=0)


def test_lengths_have_the_laws_median_and_spread() -> None:
    """20000 draws: the mean log is off by more than 5 standard errors less than once in a million."""
    logs = [math.log(n) for n in lengths(20000, cap_tokens=10**9)]
    assert abs(statistics.fmean(logs) - math.log(80.0)) < 5 * 1.1 / math.sqrt(20000) + 0.005
    assert abs(statistics.stdev(logs) - 1.1) < 5 * 1.1 / math.sqrt(2 * 20000) + 0.005


def test_no_length_leaves_one_to_the_cap() -> None:
    found = lengths(2000, cap_tokens=100)
    assert min(found) >= 1
    assert max(found) == 100


def test_the_summary_counts_rows_at_the_cap() -> None:
    summary = summarize((5, 100, 20, 100), cap_tokens=100)
    assert (summary.rows_at_cap, summary.max_tokens, summary.median_tokens) == (2, 100, 60.0)
