from dataclasses import replace

from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.testing import SMALL_POLICY, SMALL_W4, SimulatedMachine, load_of, traits_of
from controller.types import POLICY, DraftCost, RoundFacts, SequenceOutcome
from controller.watchdog import Watchdog

SHAPES = {POLICY: SMALL_POLICY, "w4": SMALL_W4}


def facts(
    *, accepted: int = 0, gamma: int = 8, sequences: int = 4, failures: int = 0, version: int = 0
) -> RoundFacts:
    outcomes = tuple(
        SequenceOutcome(
            key=k,
            drafter="w4",
            gamma=gamma,
            accepted=accepted,
            committed=accepted + 1,
            context_tokens=9,
            censored=False,
            finished=False,
        )
        for k in range(sequences)
    )
    cost = DraftCost(
        drafter="w4", passes=gamma, rows=gamma, context_tokens=9, seconds=0.01, failures=failures
    )
    return RoundFacts(
        round_index=0,
        policy_version=version,
        batch=sequences,
        prefill_rows=0,
        verify_rows=sequences,
        context_tokens=9,
        draft_s=0.01,
        verify_s=0.01,
        commit_s=0.0,
        total_s=0.02,
        drafts=(cost,),
        outcomes=outcomes,
    )


def watch(watchdog: Watchdog, one: RoundFacts, rounds: int) -> list[tuple[str, str]]:
    out = []
    for _ in range(rounds):
        watchdog.observe(one, one.outcomes)
        out += [(a.drafter, a.action) for a in watchdog.take_actions()]
    return out


def dog(**settings: object) -> Watchdog:
    return Watchdog(ControllerConfig(**settings), ["w4"])  # type: ignore[arg-type]


def test_a_healthy_drafter_is_left_alone() -> None:
    assert watch(dog(), facts(accepted=6), 500) == []


def test_a_drafter_that_was_always_poor_is_no_collapse() -> None:
    assert watch(dog(), facts(accepted=0), 500) == []


def test_a_collapse_asks_for_a_rebuild_and_on_probation_switches_off() -> None:
    watchdog = dog(watchdog_cooldown_s=60.0)
    watch(watchdog, facts(accepted=8), 100)
    assert watch(watchdog, facts(accepted=0), 120) == [("w4", "rebuild")]
    assert watchdog.usable("w4")
    watchdog.drafter_built("w4", 0)
    assert watch(watchdog, facts(accepted=0), 120) == [("w4", "off")]
    assert not watchdog.usable("w4")
    watchdog.tick(59.0)
    assert not watchdog.usable("w4")
    watchdog.tick(61.0)
    assert watchdog.usable("w4")


def test_a_slow_decline_is_no_collapse() -> None:
    watchdog = dog()
    for accepted in (8, 6, 5, 4, 3):
        assert watch(watchdog, facts(accepted=accepted), 300) == []


def test_repeated_failures_rebuild_then_switch_off() -> None:
    watchdog = dog(watchdog_failures=3)
    bad = facts(failures=1, sequences=0)
    assert watch(watchdog, bad, 2) == []
    assert watch(watchdog, facts(accepted=6), 1) == []
    assert watch(watchdog, bad, 3) == [("w4", "rebuild")]
    assert watch(watchdog, bad, 3) == [("w4", "off")]


def test_a_trouble_after_probation_starts_over() -> None:
    watchdog = dog(watchdog_failures=1, watchdog_cooldown_s=10.0)
    bad = facts(failures=1, sequences=0)
    assert watch(watchdog, bad, 1) == [("w4", "rebuild")]
    watchdog.tick(11.0)
    assert watch(watchdog, bad, 1) == [("w4", "rebuild")]


def test_a_drafter_that_lags_behind_the_policy_is_asked_once_per_version() -> None:
    watchdog = dog(watchdog_version_lag=1)
    watchdog.drafter_built("w4", 0)
    assert watch(watchdog, facts(version=1), 5) == []
    assert watch(watchdog, facts(version=2), 5) == [("w4", "rebuild")]
    watchdog.drafter_built("w4", 2)
    assert watch(watchdog, facts(version=2), 5) == []


def test_a_drafter_built_from_a_newer_policy_is_trusted_again() -> None:
    watchdog = dog(watchdog_failures=1)
    watchdog.drafter_built("w4", 0)
    watch(watchdog, facts(failures=1, sequences=0), 2)
    assert not watchdog.usable("w4")
    watchdog.drafter_built("w4", 1)
    assert watchdog.usable("w4")


def test_a_drafter_that_is_off_is_not_planned_and_comes_back() -> None:
    machine = SimulatedMachine(shapes=SHAPES, hazard=lambda drafter, key, position, round_index: 0.95)
    controller = build_controller(
        ControllerConfig(watchdog_failures=1, watchdog_cooldown_s=5.0),
        traits_of(SHAPES),
        SHAPES,
        machine.calibration(),
    )
    for r in range(2):
        load = load_of(1, round_index=r)
        done = machine.run(load, controller.decide(load, now_s=0.0))
        failed = tuple(replace(d, failures=1) for d in done.drafts)
        controller.observe(replace(done, drafts=failed))
    assert [a.action for a in controller.take_actions()] == ["rebuild", "off"]
    assert controller.take_actions() == ()
    assert controller.decide(load_of(1, round_index=2), now_s=1.0).assignments == {}
    assert controller.gauges()["controller/usable/w4"] == 0.0
    assert controller.decide(load_of(1, round_index=3), now_s=6.0).assignments
