import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from controller.auto import AutoController, _View
from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.keeping import FAR_PATIENCE, LONGEST_PAUSE_ROUNDS, PLAN_S, YOUNG_TOKENS
from controller.testing import (
    BOTH,
    HISTORY_ONLY,
    PLAIN,
    W4_ONLY,
    SimulatedMachine,
    auto,
    constant,
    load_of,
    regret_of,
    traits_of,
)
from controller.types import AR, DrafterTraits, RoundLoad, RoundPlan


def learn(
    machine: SimulatedMachine, controller: AutoController, batch: int, rounds: int, start: int = 0
) -> None:
    for r in range(start, start + rounds):
        load = load_of(batch, round_index=r)
        controller.observe(machine.run(load, controller.decide(load, now_s=r * 0.01)))


# Where it switches, and that it stays there.


def test_break_even_flips_with_the_batch_and_back() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.85))
    controller = auto(machine)
    found = regret_of(
        machine,
        controller,
        lambda r: load_of(32 if 200 <= r < 400 else 1, round_index=r),
        rounds=600,
        phase=lambda r: 200 <= r < 400,
    )

    def speculating(start: int, stop: int) -> float:
        plans = [p for p in found.plans[start:stop] if not p.probe]
        return sum(bool(p.assignments) for p in plans) / len(plans)

    assert speculating(50, 200) == 1.0
    assert speculating(200, 400) == 0.0
    assert speculating(400, 600) == 1.0


def test_hysteresis_keeps_a_marginal_gain_from_flapping() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.62), seed=3)
    controller = auto(machine)
    found = regret_of(machine, controller, lambda r: load_of(4, round_index=r), rounds=1500)
    assert 0.98 < found.of_ar < 1.08  # the gain is marginal
    assert controller.gauges()["controller/switches"] <= 6


def test_long_sequences_of_a_tail_get_more_drafts() -> None:
    machine = SimulatedMachine(shapes=HISTORY_ONLY, hazard=constant(0.85))
    gammas = {}
    for waiting in (0, 5):
        load = load_of(14, ready={"history": 8}, waiting=waiting)
        sequences = tuple(
            s._replace(generated_tokens=600 if s.key == 0 else 100, remaining_tokens=900)
            for s in load.sequences
        )
        plan = auto(machine, tail_weight=1.0).decide(replace(load, sequences=sequences), now_s=1.0)
        gammas[waiting] = plan.of(0).gamma, plan.of(1).gamma
    assert gammas[0][0] > gammas[0][1]
    assert gammas[5][0] == gammas[5][1]


# Probes and checks.


def test_probes_find_a_drafter_that_became_better() -> None:
    def hazard(drafter: str, key: int, position: int, round_index: int) -> float:
        return 0.1 if round_index < 300 else 0.93

    machine = SimulatedMachine(shapes=W4_ONLY, hazard=hazard)
    found = regret_of(machine, auto(machine), lambda r: load_of(2, round_index=r), rounds=2600)
    before, after = found.plans[200:300], found.plans[2500:]
    assert not any(p.assignments for p in before if not p.probe)
    assert all(p.assignments for p in after if not p.probe)


def test_exploring_stays_within_its_budget() -> None:
    for batch, acceptance in ((1, 0.2), (1, 0.95), (8, 0.5)):
        machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(acceptance), stall_chance=0.0)
        controller = auto(machine, explore_budget_frac=0.005)
        found = regret_of(machine, controller, lambda r, b=batch: load_of(b, round_index=r), rounds=800)
        assert controller.gauges()["controller/explored_frac"] <= 0.0075
        assert any(p.probe for p in found.plans)


def test_without_a_budget_nothing_is_explored() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.2))
    found = regret_of(
        machine, auto(machine, explore_budget_frac=0.0), lambda r: load_of(2, round_index=r), rounds=400
    )
    assert not any(p.probe for p in found.plans)


def test_a_probe_costs_one_sequence_a_few_tokens() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.2))
    found = regret_of(machine, auto(machine), lambda r: load_of(8, round_index=r), rounds=600)
    probes = [p for p in found.plans if p.probe]
    assert probes
    assert all(len(p.assignments) == 1 and sum(a.gamma for a in p.assignments.values()) <= 2 for p in probes)


class CountingController(AutoController):
    """Counts the plans it works out."""

    thoughts = 0

    def _think(self, load: RoundLoad) -> tuple[RoundPlan, float, _View]:
        self.thoughts += 1
        return super()._think(load)


@pytest.mark.parametrize("acceptance", [0.2, 0.95])
def test_early_looks_do_not_wait_for_the_next_plan_and_thinking_stays_within_its_budget(
    acceptance: float,
) -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(acceptance), stall_chance=0.0)
    config = ControllerConfig(explore_budget_frac=0.1)
    controller = CountingController(config, traits_of(W4_ONLY), W4_ONLY, machine.calibration())
    learn(machine, controller, batch=2, rounds=100)
    controller.policy_changed(1)
    before, seconds, looks = controller.thoughts, 0.0, []
    for r in range(100, 1900):
        load = load_of(2, round_index=r, policy_version=1)
        plan = controller.decide(load, now_s=seconds)
        facts = machine.run(load, plan)
        controller.observe(facts)
        seconds += facts.total_s
        looks += [r] if plan.probe else []
    interval = config.probe_interval_rounds if acceptance < 0.5 else config.check_interval_rounds
    gaps = [b - a for a, b in pairwise(looks)]
    # Here plain decoding is far ahead with few acceptances, and then stands longest.
    patience_s = PLAN_S / config.think_budget_frac * (FAR_PATIENCE if acceptance < 0.5 else 1.0)
    patience_rounds = patience_s / (seconds / 1800)
    assert len(gaps) >= 8
    assert max(gaps) <= interval + patience_rounds + 1
    assert (controller.thoughts - before) * PLAN_S <= config.think_budget_frac * seconds + 4 * PLAN_S


# History, mixes, limits.


def test_history_without_matches_is_never_planned() -> None:
    machine = SimulatedMachine(shapes=BOTH, hazard=constant(0.9))
    found = regret_of(
        machine, auto(machine), lambda r: load_of(2, round_index=r, ready={"history": 0}), rounds=200
    )
    assert all(a.drafter != "history" for p in found.plans for a in p.assignments.values())


def test_history_with_good_matches_is_preferred_because_it_is_free() -> None:
    machine = SimulatedMachine(shapes=BOTH, hazard=constant(0.9))
    found = regret_of(
        machine, auto(machine), lambda r: load_of(2, round_index=r, ready={"history": 6}), rounds=300
    )
    late = [p for p in found.plans[200:] if not p.probe]
    assert all(a.drafter == "history" for p in late for a in p.assignments.values())
    assert found.of_best >= 0.97


def test_drafters_are_mixed_where_only_some_sequences_have_matches() -> None:
    machine = SimulatedMachine(shapes=BOTH, hazard=constant(0.9))
    controller = auto(machine)

    def load_at(r: int) -> RoundLoad:
        load = load_of(6, round_index=r)
        first = load.sequences[0]._replace(history_match_tokens={"history": 2})
        rest = tuple(s._replace(history_match_tokens={"history": 0}) for s in load.sequences[1:])
        return replace(load, sequences=(first, *rest))

    # Copies are hoped for little, so a few probes come first.
    found = regret_of(machine, controller, load_at, rounds=700)
    late = [p for p in found.plans[600:] if not p.probe]
    assert all(p.of(0).drafter == "history" and p.of(1).drafter == p.of(2).drafter == "w4" for p in late)


def blind(load: RoundLoad) -> RoundLoad:
    return replace(load, sequences=tuple(s._replace(history_match_tokens={}) for s in load.sequences))


@pytest.mark.parametrize(("ready", "batch"), [(0, 8), (1, 32), (6, 2)])
def test_what_is_ready_is_looked_up_only_where_a_plan_may_change_and_plans_are_the_same(
    ready: int, batch: int
) -> None:
    machine = SimulatedMachine(shapes=BOTH, hazard=constant(0.9 if ready == 6 else 0.02))
    calibration = machine.calibration()
    sees, asks = (build_controller(ControllerConfig(), traits_of(BOTH), BOTH, calibration) for _ in range(2))
    looked_up = used = 0
    for r in range(400):
        load = load_of(batch, round_index=r, ready={"history": ready})
        wants = asks.wants_look_up(blind(load))
        plan = asks.decide(load if wants else blind(load), now_s=0.01 * r)
        assert plan == sees.decide(load, now_s=0.01 * r)
        facts = machine.run(load, plan)
        asks.observe(facts)
        sees.observe(facts)
        looked_up += wants and r >= 100
        used += r >= 100 and any(a.drafter == "history" for a in plan.assignments.values())
    if ready == 6:
        assert looked_up >= used >= 290, "a plan that copies is cut to what can be copied, every round"
    else:
        assert looked_up <= 30


def test_a_plan_that_copies_looks_seldom_while_there_is_nothing_and_copies_again_soon_once_there_is() -> None:
    machine = SimulatedMachine(shapes=HISTORY_ONLY, hazard=constant(0.9), stall_chance=0.0)
    calibration = machine.calibration()
    sees, asks = (
        build_controller(ControllerConfig(), traits_of(HISTORY_ONLY), HISTORY_ONLY, calibration)
        for _ in range(2)
    )
    looks: list[int] = []
    copies: list[int] = []
    seconds = 0.0
    for r in range(300):
        load = load_of(2, round_index=r, ready={"history": 0 if 100 <= r < 200 else 6})
        wants = asks.wants_look_up(blind(load))
        plan = asks.decide(load if wants else blind(load), now_s=0.01 * r)
        assert plan == sees.decide(load, now_s=0.01 * r)
        facts = machine.run(load, plan)
        seconds += facts.total_s
        asks.observe(facts)
        sees.observe(facts)
        looks += [r] if wants else []
        copies += [r] if plan.assignments else []
    assert len([r for r in looks if 100 <= r < 200]) <= 20
    again = min(r for r in copies if r >= 200)
    patience_rounds = PLAN_S / ControllerConfig().think_budget_frac / (seconds / 300)
    assert again <= 200 + patience_rounds + LONGEST_PAUSE_ROUNDS
    assert len([r for r in copies if r >= again]) >= 0.9 * (300 - again), "and then in nearly every round"


def test_much_more_that_is_ready_is_noticed_within_the_patience() -> None:
    machine = SimulatedMachine(shapes=HISTORY_ONLY, hazard=constant(0.9), stall_chance=0.0)
    controller = auto(machine)
    drafts = []
    for r in range(600):
        ready = 0 if r < 300 else 8
        load = load_of(2, round_index=r, ready={"history": ready})
        plan = controller.decide(load, now_s=0.01 * r)
        controller.observe(machine.run(load, plan))
        drafts.append(bool(plan.assignments) or plan.probe)
    first = drafts.index(True)
    patience_rounds = 2 * PLAN_S / ControllerConfig().think_budget_frac / (controller._elapsed_s / 600)
    assert 300 <= first <= 300 + patience_rounds + 1
    assert all(drafts[first : first + 50])


def test_a_sequence_with_nothing_left_to_copy_is_planned_for_at_once() -> None:
    machine = SimulatedMachine(shapes=BOTH, hazard=constant(0.9), stall_chance=0.0)
    for batch in (1, 2):
        controller = auto(machine)
        for r in range(400):
            ready = 6 if r // 10 % 2 else 0
            load = load_of(batch, round_index=r, ready={"history": ready})
            plan = controller.decide(load, now_s=0.01 * r)
            controller.observe(machine.run(load, plan))
            if r >= 100 and not ready and not plan.probe:
                assert {a.drafter for a in plan.assignments.values()} == {"w4"}


@pytest.mark.parametrize("acceptance", [0.8, 0.9])
def test_no_pass_is_run_for_the_one_sequence_that_ceased_to_copy(acceptance: float) -> None:
    """What was best without copying was priced for all: a model's pass is paid by those who share it."""
    machine = SimulatedMachine(shapes=BOTH, hazard=constant(acceptance), stall_chance=0.0)
    controller = auto(machine)
    copied = 0
    for r in range(400):
        load = load_of(2, round_index=r, ready={"history": 0})
        first = load.sequences[0]._replace(history_match_tokens={"history": 6 if r // 10 % 2 else 0})
        load = replace(load, sequences=(first, *load.sequences[1:]))
        plan = controller.decide(load, now_s=0.01 * r)
        controller.observe(machine.run(load, plan))
        used = sorted(a.drafter for a in plan.assignments.values())
        assert plan.probe or used != ["w4"]
        copied += "history" in used
    assert copied > 5


def test_a_repeated_plan_never_exceeds_what_a_match_still_offers() -> None:
    machine = SimulatedMachine(shapes=BOTH, hazard=constant(0.9))
    controller = auto(machine)
    for r in range(300):
        ready = (7 * r) % 9
        load = load_of(2, round_index=r, ready={"history": ready}, remaining_tokens=1 + r % 6)
        plan = controller.decide(load, now_s=0.0)
        for a in plan.assignments.values():
            assert 1 <= a.gamma <= r % 6
            assert a.drafter != "history" or a.gamma <= ready
        controller.observe(machine.run(load, plan))


@pytest.mark.parametrize(("batch", "others"), [(1, 1), (4, 2), (8, 8)])
def test_a_batch_of_other_sequences_is_planned_for_at_once(batch: int, others: int) -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.9), stall_chance=0.0)
    controller = auto(machine)
    for r in range(200):
        load = load_of(batch, round_index=r)
        controller.observe(machine.run(load, controller.decide(load, now_s=0.01 * r)))
    for r in range(200, 260):
        load = load_of(batch, round_index=r, first_key=others * (r - 199))
        plan = controller.decide(load, now_s=0.01 * r)
        controller.observe(machine.run(load, plan))
        assert plan.reason.startswith(("check", "probe")) or len(plan.assignments) == batch


@pytest.mark.parametrize("batch", [1, 4])
def test_others_in_place_of_sequences_that_all_drafted_alike_draft_alike_without_a_thought(
    batch: int,
) -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.9), stall_chance=0.0)
    controller = CountingController(
        ControllerConfig(explore_budget_frac=0.0), traits_of(W4_ONLY), W4_ONLY, machine.calibration()
    )
    learn(machine, controller, batch=batch, rounds=200)
    controller._keeper.drop()
    learn(machine, controller, batch=batch, rounds=1, start=200)
    thoughts = controller.thoughts
    for r in range(201, 211):
        load = load_of(batch, round_index=r, first_key=batch * r, remaining_tokens=3)
        plan = controller.decide(load, now_s=0.0)
        assert {(a.drafter, a.gamma) for a in plan.assignments.values()} == {("w4", 2)}, "cut to their room"
        assert len(plan.assignments) == batch
        assert plan.predicted_tokens > batch
    assert controller.thoughts == thoughts


def test_a_batch_that_decodes_plainly_is_not_thought_over_while_it_fills_and_is_once_it_drains() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.2), stall_chance=0.0)
    controller = CountingController(
        ControllerConfig(explore_budget_frac=0.0), traits_of(W4_ONLY), W4_ONLY, machine.calibration()
    )
    learn(machine, controller, batch=8, rounds=400)
    thoughts = []
    for r, batch in enumerate((8, 12, 20, 32, 32, 8), start=400):
        load = load_of(batch, round_index=r)
        plan = controller.decide(load, now_s=0.0)
        assert plan.assignments == {}
        thoughts.append(controller.thoughts)
        controller.observe(machine.run(load, plan))
    assert thoughts[4] <= thoughts[0] + 1, "one may fall due"
    assert thoughts[5] == thoughts[4] + 1


def test_nothing_is_drafted_for_a_last_token() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.99))
    plan = auto(machine).decide(load_of(3, remaining_tokens=1), now_s=0.0)
    assert plan.assignments == {}


def test_engines_with_one_gamma_for_all_get_one_gamma_for_all() -> None:
    machine = SimulatedMachine(shapes=BOTH, hazard=constant(0.85))
    controller = build_controller(
        ControllerConfig(), traits_of(BOTH, gamma_per_sequence=False), BOTH, machine.calibration()
    )
    found = regret_of(machine, controller, lambda r: load_of(3, round_index=r), rounds=300)
    assert any(p.assignments for p in found.plans)
    assert all(len(set(p.assignments.values())) <= 1 for p in found.plans)
    assert found.of_best >= 0.97


def test_a_drafter_that_must_be_caught_up_is_charged_for_it() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.8))
    traits = traits_of(W4_ONLY)
    dear = replace(
        traits, drafters=(DrafterTraits(name="w4", max_gamma=8, switch_tokens_per_sequence=1_000_000),)
    )
    calibration = machine.calibration()
    plans = [
        build_controller(ControllerConfig(), t, W4_ONLY, calibration).decide(load_of(2), now_s=0.0)
        for t in (traits, dear)
    ]
    assert plans[0].assignments
    assert not plans[1].assignments


def test_an_empty_round_is_an_empty_plan() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY)
    plan = auto(machine).decide(load_of(0), now_s=0.0)
    assert plan.assignments == {}


def test_prompt_rows_in_the_round_make_speculation_less_attractive() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.8))
    calibration = machine.calibration()
    alone, mixed = (
        build_controller(ControllerConfig(), traits_of(W4_ONLY), W4_ONLY, calibration).decide(
            replace(load_of(4), prefill_tokens=rows), now_s=0.0
        )
        for rows in (0, 512)
    )
    assert alone.assignments
    assert not mixed.assignments


# State, versions, determinism.


def test_a_new_policy_version_is_noticed_once_whoever_says_it_first() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.5))
    told, saw = auto(machine), None
    learn(machine, told, 1, 100)
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.5))
    saw = auto(machine)
    learn(machine, saw, 1, 100)
    load = load_of(1, round_index=100, policy_version=1)
    told.policy_changed(1)
    told.policy_changed(1)
    assert told.decide(load, now_s=1.0) == saw.decide(load, now_s=1.0)
    assert told.gauges() == saw.gauges()


def test_a_new_version_brings_back_hope() -> None:
    """A23: and to one policy version."""
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.15))
    controller = auto(machine)
    learn(machine, controller, 2, 200)
    before = controller.gauges()["controller/acceptance_frac/w4"]
    controller.policy_changed(1)
    assert controller.gauges()["controller/acceptance_frac/w4"] > before


def test_the_same_inputs_give_the_same_plans_and_controllers_share_nothing() -> None:
    """A23: what a controller learnt belongs to one engine."""

    def trace(beside: AutoController | None) -> list[RoundPlan]:
        machine = SimulatedMachine(shapes=BOTH, hazard=constant(0.8), seed=5)
        other = SimulatedMachine(shapes=BOTH, hazard=constant(0.1), seed=6)
        controller, plans = auto(machine), []
        for r in range(200):
            load = load_of(3, round_index=r, ready={"history": r % 3})
            plan = controller.decide(load, now_s=0.01 * r)
            controller.observe(machine.run(load, plan))
            plans.append(plan)
            if beside is not None:
                beside.observe(other.run(load, beside.decide(load, now_s=0.01 * r)))
        return plans

    alone = trace(None)
    assert trace(None) == alone
    assert trace(auto(SimulatedMachine(shapes=BOTH))) == alone


def test_a_finished_or_aborted_sequence_leaves_nothing_behind() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.9))
    controller = auto(machine)
    for r in range(400):
        load = load_of(2, round_index=r, first_key=2 * r)
        controller.observe(machine.run(load, controller.decide(load, now_s=0.0)))
    kept = [len(d.sequences) for d in controller._acceptance._drafters.values()]
    assert max(kept) <= 4 * 32 + 2, "those of a round come on top"


def test_facts_of_rounds_decided_elsewhere_are_fine() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY)
    controller = auto(machine)
    controller.observe(machine.run(load_of(2, round_index=77), PLAIN))
    assert controller.decide(load_of(2), now_s=0.0).predicted_s > 0


# What it says and what it costs.


def test_a_decision_names_its_reason_price_and_alternatives() -> None:
    machine = SimulatedMachine(shapes=BOTH, hazard=constant(0.9))
    controller = auto(machine)
    with pytest.raises(ValueError, match="nothing"):
        controller.decision_record()
    load = load_of(2, ready={"history": 3})
    plan = controller.decide(load, now_s=1.5)
    record = controller.decision_record()
    assert plan.reason
    assert plan.predicted_s > 0
    assert plan.predicted_tokens > 2
    assert record["now_s"] == 1.5
    labels = [a["label"] for a in record["alternatives"]]
    assert labels[0] == AR
    assert {"w4", "history"} <= set(labels)
    assert all(a["predicted_s"] > 0 and a["tokens"] > 0 for a in record["alternatives"])
    controller.decide(replace(load, prefill_tokens=64), now_s=2.0)
    assert controller.decision_record()["alternatives"] == [], "nothing is weighed beside a prompt"


def test_gauges_are_finite_floats() -> None:
    machine = SimulatedMachine(shapes=BOTH)
    controller = auto(machine)
    for _ in range(2):
        gauges = controller.gauges()
        assert all(isinstance(v, float) and v == v and abs(v) != float("inf") for v in gauges.values())
        assert all(name.startswith("controller/") for name in gauges)
        learn(machine, controller, 2, 5)


def test_predictions_are_close_once_warm() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.9), stall_chance=0.0)
    controller = auto(machine)
    learn(machine, controller, 3, 300)
    assert abs(controller.gauges()["controller/prediction_error_frac"]) < 0.04


def calls_of(controller: AutoController, loads: list[RoundLoad]) -> list[int]:
    """Count Python and C calls of each decision: a measure of work that no busy machine can disturb."""
    counts, count = [], 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for load in loads:
        count = 0
        sys.setprofile(profile)
        try:
            controller.decide(load, now_s=0.0)
        finally:
            sys.setprofile(None)
        counts.append(count)
    return counts


def test_a_decision_at_batch_32_with_two_drafters_is_cheap() -> None:
    machine = SimulatedMachine(shapes=BOTH, hazard=constant(0.9))
    controller = auto(machine)
    for r in range(150):
        load = load_of(32, round_index=r, ready={"history": 4})
        controller.observe(machine.run(load, controller.decide(load, now_s=0.0)))
    loads = [load_of(32, round_index=r, ready={"history": 4}) for r in range(150, 153)]
    controller._keeper.drop()
    planned, *repeated = calls_of(controller, loads)
    # At 0.1 to 0.2 us a call, 1300 calls, a hundred of them small array operations are about 300 us.
    assert planned < 1300
    assert max(repeated) < 300


def test_auto_without_a_calibration_or_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="calibration"):
        build_controller(ControllerConfig(), traits_of(W4_ONLY), W4_ONLY, None)
    machine = SimulatedMachine(shapes=W4_ONLY)
    with pytest.raises(ValueError, match="history"):
        build_controller(ControllerConfig(), traits_of(BOTH), W4_ONLY, machine.calibration())


def test_beside_a_prompt_nobody_drafts_and_the_plan_of_before_stands_after_it() -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.9), stall_chance=0.0)
    controller = CountingController(ControllerConfig(), traits_of(W4_ONLY), W4_ONLY, machine.calibration())
    learn(machine, controller, batch=2, rounds=200)
    controller._keeper.drop()
    load = load_of(2, round_index=200)
    before = controller.decide(load, now_s=0.0)
    controller.observe(machine.run(load, before))
    thoughts = controller.thoughts
    beside = replace(load_of(2, round_index=201), prefill_tokens=64)
    assert not controller.wants_look_up(beside)
    assert controller.decide(beside, now_s=0.0).assignments == {}
    after = controller.decide(load_of(2, round_index=202), now_s=0.0)
    assert after.assignments
    assert controller.thoughts == thoughts


@pytest.mark.parametrize("batch", [2, 32])
def test_a_drafter_little_known_is_tried_on_no_more_than_teaches_enough(batch: int) -> None:
    # On this machine rows cost next to nothing, so that drafting pays at any batch.
    cheap = {"flops_per_row": 1e5, "flops_per_context_token": 1.0, "kv_bytes_per_token": 1}
    shapes = {name: replace(shape, **cheap) for name, shape in W4_ONLY.items()}
    machine = SimulatedMachine(shapes=shapes, hazard=constant(0.9), stall_chance=0.0, other_s_per_row=1e-7)
    controller = auto(machine)
    load = load_of(batch)
    first = controller.decide(load, now_s=0.0)
    assert 0 < sum(a.gamma for a in first.assignments.values()) < YOUNG_TOKENS + 8
    assert (len(first.assignments) == batch) == (batch == 2)
    controller.observe(machine.run(load, first))
    learn(machine, controller, batch, 20)
    assert len(controller.decide(load_of(batch, round_index=20), now_s=0.0).assignments) == batch


def test_where_copying_cannot_pay_it_is_looked_for_only_to_be_probed() -> None:
    machine = SimulatedMachine(shapes=HISTORY_ONLY, hazard=constant(0.02), stall_chance=0.0)
    controller = auto(machine)
    looks = []
    for r in range(600):
        load = load_of(64, round_index=r)
        wants = controller.wants_look_up(load)
        load = load_of(64, round_index=r, ready={"history": 4}) if wants else load
        controller.observe(machine.run(load, controller.decide(load, now_s=0.01 * r)))
        looks += [r] if wants else []
    assert looks[0] == 0
    assert len(looks) <= 600 // 16
    assert not controller._copies_may_pay
