import math

import numpy as np
import pytest

from controller.acceptance import AcceptanceModel, tried_and_kept
from controller.config import ControllerConfig
from controller.types import SequenceOutcome


def outcome(
    gamma: int,
    accepted: int,
    *,
    key: int = 0,
    committed: int | None = None,
    censored: bool = False,
    finished: bool = False,
    drafter: str = "w4",
    judged_singly: bool = False,
) -> SequenceOutcome:
    return SequenceOutcome(
        key=key,
        drafter=drafter,
        gamma=gamma,
        accepted=accepted,
        committed=accepted + 1 if committed is None else committed,
        context_tokens=100,
        censored=censored,
        finished=finished,
        judged_singly=judged_singly,
    )


def model(**settings: object) -> AcceptanceModel:
    plain = {"hope_errors": 0.0, "position_prior_tokens": 1.0, "acceptance_window_tokens": 1e6}
    return AcceptanceModel(ControllerConfig(**{**plain, **settings}), {"w4": 4, "history": 4})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "tried", "kept"),
    [
        (outcome(4, 4), 4, 4),  # all kept, bonus token
        (outcome(4, 2), 3, 2),  # position 3 rejected, 4 never tried
        (outcome(4, 0), 1, 0),
        (outcome(4, 2, committed=2, censored=True), 2, 2),  # a kept draft ended it: 3 was cut, not rejected
        (outcome(4, 2, committed=3, censored=True), 3, 2),  # the correction ended it: 3 was rejected
        (outcome(0, 0), 0, 0),
        (outcome(2, 2, committed=2, censored=True), 2, 2),
        (outcome(9, 5, committed=9, judged_singly=True), 9, 5),  # four were wrong, each followed by others
        (outcome(9, 5, committed=7, censored=True, judged_singly=True), 7, 5),
    ],
)
def test_only_positions_whose_fate_was_seen_count(one: SequenceOutcome, tried: int, kept: int) -> None:
    assert tried_and_kept(one) == (tried, kept)


def test_positions_are_recovered_from_rounds_of_mixed_gamma_and_cuts() -> None:
    hazards = (0.9, 0.7, 0.8, 0.5)
    m, rng = model(), np.random.default_rng(0)
    for i in range(20_000):
        gamma = int(rng.integers(1, 5))
        cut = int(rng.integers(1, 4)) if rng.random() < 0.3 else 99
        accepted = 0
        while accepted < gamma and accepted < cut and rng.random() < hazards[accepted]:
            accepted += 1
        was_cut = accepted == cut
        m.observe(
            [
                outcome(
                    gamma,
                    accepted,
                    key=i,
                    committed=accepted + (not was_cut),
                    censored=was_cut,
                    finished=was_cut,
                )
            ]
        )
    # At least 2000 tries per position: five standard errors are under 0.056, odds of a false alarm 6e-7.
    assert m.hazard("w4") == pytest.approx(hazards, abs=0.056)


def test_draft_tokens_judged_singly_all_count_for_the_first_position() -> None:
    m, rng = model(), np.random.default_rng(0)
    for _ in range(4000):
        kept = int((rng.random(13) < 0.6).sum())
        m.observe([outcome(13, kept, committed=13, judged_singly=True)])
    assert m.mean("w4") == pytest.approx(0.6, abs=0.01)
    assert m.hazard("w4")[0] == pytest.approx(0.6, abs=0.01)
    assert m.expected_accepted("w4", 1) == pytest.approx(0.6, abs=0.01)


def test_survival_is_the_product_over_positions_and_expectation_its_sum() -> None:
    m = model()
    for accepted in (4, 1, 0, 2, 4, 3):
        m.observe([outcome(4, accepted, key=9, finished=True)])
    survival = m.survival("w4", [1])[0]
    assert survival == pytest.approx(np.cumprod(m.hazard("w4")))
    assert m.expected_accepted("w4", 3) == pytest.approx(survival[:3].sum())
    assert m.expected_accepted("w4", 3, 1) == pytest.approx(survival[:3].sum())


def test_nothing_seen_is_the_prior() -> None:
    m = model(prior_acceptance=0.6)
    assert m.mean("w4") == pytest.approx(0.6)
    assert m.hazard("w4") == pytest.approx([0.6] * 4)


def test_scarce_evidence_is_read_with_hope_and_plenty_without() -> None:
    hopeful = model(hope_errors=1.5, acceptance_window_tokens=256.0)
    assert hopeful.hazard("w4")[0] > hopeful.mean("w4") + 0.05
    for i in range(2000):
        hopeful.observe([outcome(1, i % 2, key=i, finished=True)])
    assert hopeful.hazard("w4")[0] == pytest.approx(0.5, abs=0.02)


def test_old_evidence_fades() -> None:
    m = model(acceptance_window_tokens=64.0)
    for i in range(500):
        m.observe([outcome(1, 0, key=i, finished=True)])
    for i in range(200):
        m.observe([outcome(1, 1, key=i, finished=True)])
    # Of the old evidence exp(-200/64) is left.
    assert m.mean("w4") == pytest.approx(1 - math.exp(-200 / 64), abs=0.01)


def test_a_new_version_discounts_the_evidence_and_returns_towards_the_prior() -> None:
    m = model(prior_acceptance=0.8, prior_tokens=8.0, version_discount=0.5)
    for i in range(100):
        m.observe([outcome(1, 0, key=i, finished=True)])
    before, evidence = m.mean("w4"), m.evidence_tokens("w4")
    m.policy_changed()
    assert m.evidence_tokens("w4") == pytest.approx(evidence / 2 + 4, rel=1e-3)
    assert before < m.mean("w4") < 0.8
    for _ in range(60):
        m.policy_changed()
    assert m.mean("w4") == pytest.approx(0.8)


def test_a_sequence_that_accepts_better_is_expected_to_go_on_so() -> None:
    m = model()
    for _ in range(60):
        m.observe([outcome(4, 4, key=1), outcome(4, 1, key=2)])
    good, usual, bad = (m.expected_accepted("w4", 4, key) for key in (1, 3, 2))
    assert good > usual + 0.3
    assert bad < usual - 0.3


def test_one_lonely_sequence_is_its_drafters_mean() -> None:
    m = model()
    for i in range(100):
        m.observe([outcome(1, int(i % 5 < 3), key=1)])
    assert m.expected_accepted("w4", 1, 1) == pytest.approx(m.expected_accepted("w4", 1), abs=0.02)


def test_drafters_do_not_share_evidence() -> None:
    m = model()
    before = m.hazard("history")
    m.observe([outcome(4, 0, drafter="w4"), outcome(4, 4, drafter="unheard-of")])
    assert m.hazard("history") == before
    assert m.seen_tokens("w4") == 1


def test_probes_that_contradict_a_long_memory_replace_it() -> None:
    slow, quick = model(acceptance_window_tokens=1024.0), model(acceptance_window_tokens=1024.0)
    for m in (slow, quick):
        for i in range(800):
            m.observe([outcome(1, int(i % 10 < 3), key=i, finished=True)])
    for i in range(8):
        slow.observe([outcome(2, 2, key=i)], probing=False)
        quick.observe([outcome(2, 2, key=i)], probing=True)
    assert slow.mean("w4") < 0.4
    assert quick.mean("w4") > 0.6


def test_what_is_kept_about_sequences_is_bounded() -> None:
    m = model()
    for key in range(100):
        m.observe([outcome(2, 0, key=key)])
    m.keep_only([7], most=10)
    expected = m.expected_accepted("w4", 2)
    assert m.expected_accepted("w4", 2, 8) == expected
    assert m.expected_accepted("w4", 2, 7) < expected


def shallow_model() -> AcceptanceModel:
    """Of three depths of a policy of four loops, a quarter of it each, out of order, and an outsider."""
    names = ("depth_3", "w4", "depth_1", "depth_2")
    return AcceptanceModel(
        ControllerConfig(hope_errors=0.0),
        dict.fromkeys(names, 4),
        reuse_frac={"depth_1": 0.25, "depth_2": 0.5, "depth_3": 0.75},
    )


def test_what_runs_more_of_the_policy_is_taken_to_be_wrong_less_often_until_it_was_seen() -> None:
    m = shallow_model()
    for _ in range(200):
        m.observe([outcome(4, 4, drafter="depth_2")] * 9 + [outcome(4, 1, drafter="depth_2")])
    known, deeper, shallower, other = (m.hazard(n)[1] for n in ("depth_2", "depth_3", "depth_1", "w4"))
    assert known == pytest.approx(0.9, abs=0.01)
    assert known < deeper < 1.0 - 0.5 * (1.0 - known)
    assert shallower == other == pytest.approx(0.8), (
        "nothing is said of what runs less of it, or something else"
    )
    for _ in range(200):
        m.observe([outcome(4, 1, drafter="depth_3")])
    assert m.hazard("depth_3")[1] < 0.2, "its own evidence counts once there is some"
    m.policy_changed()
    assert m.hazard("depth_3")[1] < 0.5


def test_a_shallow_draft_that_is_often_wrong_takes_nothing_from_a_deeper_one() -> None:
    m = shallow_model()
    for _ in range(50):
        m.observe([outcome(4, 0, drafter="depth_1"), outcome(4, 0, drafter="depth_2")])
    assert min(m.hazard("depth_3")) >= 0.8, "what it starts with"
