from dataclasses import replace

import pytest

from controller.trust import Timing, anchors_of, disagreement, judge, timing_of


def timings(*, spread: float = 0.02, repeats: int = 5) -> list[Timing]:
    return [
        replace(
            timing_of([0.01 * rows], part=part, rows=rows, sequences=rows, context_tokens=context),
            spread_frac=spread,
            repeats=repeats,
        )
        for part in ("policy", "w4")
        for rows in (1, 8, 32)
        for context in (64, 512)
    ]


def test_a_timing_keeps_minimum_median_and_spread_of_its_repeats() -> None:
    t = timing_of([0.03, 0.011, 0.01, 0.5, 0.02], part="w4", rows=1, sequences=1, context_tokens=64)
    assert (t.repeats, t.fastest_s, t.median_s) == (5, 0.01, 0.02)
    assert t.spread_frac == pytest.approx(0.1)


def test_quiet_repeats_on_an_idle_machine_are_good() -> None:
    assert judge(timings(), others_frac=0.02).verdict == "good"
    assert judge(timings(), others_frac=None).verdict == "good"


@pytest.mark.parametrize(
    ("found", "others_frac", "says"),
    [
        (timings(spread=0.3), 0.0, "repeats differ by 30%"),
        (timings(repeats=2), 0.0, "repeats that fitted the time: 2"),
        (timings(), 0.4, "others took 40%"),
    ],
)
def test_what_may_have_been_disturbed_is_provisional_and_says_why(
    found: list[Timing], others_frac: float, says: str
) -> None:
    quality = judge(found, others_frac=others_frac)
    assert quality.verdict == "provisional"
    assert says in quality.reason


def test_one_stalled_point_in_twelve_spoils_nothing() -> None:
    found = timings()
    assert judge([replace(found[0], spread_frac=4.0), *found[1:]], others_frac=0.0).verdict == "good"


def test_nothing_measured_is_not_good() -> None:
    assert judge([], others_frac=0.0).verdict == "unknown"


def test_anchors_are_a_light_and_a_heavy_forward_of_every_part() -> None:
    anchors = anchors_of(timings())
    assert {p: [(t.rows, t.context_tokens) for t in pair] for p, pair in anchors.items()} == {
        "policy": [(1, 64), (32, 64)],
        "w4": [(1, 64), (32, 64)],
    }


@pytest.mark.parametrize(
    ("policy", "w4", "holds"),
    [
        ((1.0, 1.0), (1.0, 1.0), True),
        ((1.7, 1.1), (1.6, 1.0), True),  # neighbours took memory: both parts' light forwards know it
        ((1.2, 1.0), (1.0, 1.0), True),
        ((1.5, 1.0), (1.0, 1.0), False),
        ((1.0, 1.0), (2.0, 1.0), False),
        ((1.0, 1.0), (1.0, 0.5), False),
        ((1.9, 1.0), (1.9, 1.0), False),
        ((0.5, 0.5), (0.5, 0.5), False),
    ],
)
def test_parts_must_agree_with_each_other_and_the_machine_roughly_with_itself(
    policy: tuple[float, float], w4: tuple[float, float], holds: bool
) -> None:
    anchors = anchors_of(timings())
    now = {
        t: t.fastest_s * factor
        for part, factors in (("policy", policy), ("w4", w4))
        for t, factor in zip(anchors[part], factors, strict=True)
    }
    said = disagreement(anchors, now)
    assert (said == "") == holds
    assert holds or "now take" in said
