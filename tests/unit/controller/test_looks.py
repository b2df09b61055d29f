from controller.looks import EARLY_LOOKS, LookTimes


def looks() -> LookTimes:
    return LookTimes(["w4", "history"], probe_rounds=64, check_rounds=32)


def test_the_first_looks_at_a_drafter_come_early_and_a_surprise_brings_early_ones_back() -> None:
    times = looks()
    waits = []
    for n in range(EARLY_LOOKS + 1):
        times.observed("w4", 100 * n, surprised=False)
        waits.append(times.probe_round("w4") - 100 * n)
    assert waits == [16] * (EARLY_LOOKS - 1) + [64, 64]
    times.observed("w4", 900, surprised=True)
    assert times.probe_round("w4") == 916
    assert times.probe_round("history") == 16, "another drafter's looks are its own"


def test_a_look_that_was_chosen_moves_the_next_one_but_teaches_nothing() -> None:
    times = looks()
    for round_ in (10, 20, 30, 40, 50, 60):
        times.looked("w4", round_)
    assert (times.last_seen("w4"), times.probe_round("w4")) == (60, 76)


def test_plain_decoding_of_a_batch_never_seen_counts_from_when_it_is_asked_about() -> None:
    times = looks()
    assert times.check_round(3, 50) == 58
    assert times.check_round(3, 70) == 78, "asking alone begins nothing"
    times.begin(3, 70)
    times.begin(3, 90)
    assert times.check_round(3, 99) == 78


def test_a_demanded_check_is_due_at_once() -> None:
    times = looks()
    times.observed(2, 100, surprised=False)
    times.demand(2, 101)
    assert times.check_round(2, 101) <= 101
