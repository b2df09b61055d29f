import math
from dataclasses import replace

import numpy as np
import pytest

from controller.calibration import Calibration, OtherFit, PartFit
from controller.config import ControllerConfig
from controller.cost import CostModel
from controller.testing import HISTORY, SMALL_COSTS, SMALL_POLICY, SMALL_W4, SimulatedMachine, load_of
from controller.tracking import FactorTracker, LineTracker, ResidualTable
from controller.trust import Timing, timing_of
from controller.types import POLICY, Assignment, RoundFacts, RoundPlan

SHAPES = {POLICY: SMALL_POLICY, "w4": SMALL_W4, "history": HISTORY}


def exact_calibration() -> Calibration:
    """The simulated machine, known exactly."""
    parts = {}
    for name, c in SMALL_COSTS.items():
        parts[name] = PartFit(
            bandwidth_bytes_per_s=c.bandwidth_bytes_per_s,
            flops_per_s=c.flops_per_s,
            context_factor=c.context_factor,
            overhead_s=c.overhead_s,
            overhead_s_per_row=c.overhead_s_per_row,
            samples=9,
            mape_frac=0.0,
            worst_frac=0.0,
        )
    return Calibration(key="exact", parts=parts)


def cost_model() -> CostModel:
    return CostModel(SHAPES, exact_calibration(), ControllerConfig())


def plan_of(batch: int, drafter: str, gammas: list[int]) -> RoundPlan:
    return RoundPlan(
        assignments={i: Assignment(drafter=drafter, gamma=g) for i, g in enumerate(gammas) if g},
        reason="test",
    )


@pytest.mark.parametrize("gammas", [[], [4], [3, 1, 0, 2], [1] * 16])
def test_a_round_is_priced_as_the_machine_behaves(gammas: list[int]) -> None:
    quiet = SimulatedMachine(shapes=SHAPES, other_s=0.0, other_s_per_row=0.0)
    load = load_of(max(1, len(gammas)), context_tokens=700)
    plan = plan_of(len(gammas), "w4", gammas)
    draft_s, verify_s, other_s = predicted = cost_model().predict_round(load, plan.assignments)
    assert predicted.total_s == pytest.approx(quiet.true_s(load, plan))
    assert draft_s + verify_s + other_s == predicted.total_s
    assert (draft_s > 0) == any(gammas)


def test_a_history_drafter_costs_rows_but_no_passes() -> None:
    load, cost = load_of(4), cost_model()
    plain = cost.predict_round(load, {})
    free = cost.predict_round(load, plan_of(4, "history", [4] * 4).assignments)
    assert free.draft_s == 0.0
    assert free.verify_s > plain.verify_s


def test_rows_of_one_sequence_read_its_keys_once_and_compute_their_own_attention() -> None:
    cost = cost_model()
    few = cost.forward_s(POLICY, rows=4, sequences=1, read_tokens=4000, context_tokens=16_000)
    many = cost.forward_s(POLICY, rows=4, sequences=4, read_tokens=16_000, context_tokens=16_000)
    assert many > few * 1.5


def test_bytes_of_attention_do_not_hide_behind_the_arithmetic_of_linears() -> None:
    cost, rows = cost_model(), 64
    known = SMALL_COSTS[POLICY]
    assert SMALL_POLICY.flops_per_row * rows / known.flops_per_s > 2 * (
        SMALL_POLICY.weight_bytes / known.bandwidth_bytes_per_s
    ), "its linears compute"
    near, far = (
        cost.forward_s(POLICY, rows=rows, sequences=rows, read_tokens=c * rows, context_tokens=c * rows)
        for c in (10.0, 110.0)
    )
    moved = known.context_factor * SMALL_POLICY.kv_bytes_per_token * 100 * rows
    assert far - near == pytest.approx(moved / known.bandwidth_bytes_per_s)


@pytest.mark.parametrize("context", [10, 300, 3000])
def test_the_curve_agrees_with_single_forwards(context: int) -> None:
    cost, rows = cost_model(), np.arange(2, 60)
    curve = cost.verify_curve_s(rows, rows * float(context), sequences=2, read_tokens=2.0 * context)
    single = [
        cost.forward_s(
            POLICY, rows=int(r), sequences=2, read_tokens=2.0 * context, context_tokens=float(r * context)
        )
        for r in rows
    ]
    assert curve == pytest.approx(single)


def test_the_draft_line_is_exact_at_both_ends() -> None:
    cost = cost_model()
    line = cost.draft_line("w4", sequences=8, mean_context_tokens=300.0)
    for n in (1, 8):
        exact = cost.forward_s("w4", rows=n, sequences=n, read_tokens=n * 300.0, context_tokens=n * 300.0)
        assert line.pass_s + n * line.row_s == pytest.approx(exact)


def test_what_drafting_costs_beside_its_passes_is_paid_once_however_long_the_draft() -> None:
    known = exact_calibration()
    dearer = replace(known, drafts={"w4": OtherFit(base_s=2e-4, s_per_row=5e-5)})
    cost, plain = CostModel(SHAPES, dearer, ControllerConfig()), cost_model()
    load = load_of(4)
    for gammas, drafting in (([], 0), ([1, 0, 1, 0], 2), ([1] * 4, 4), ([8] * 4, 4)):
        assignments = plan_of(4, "w4", gammas).assignments
        more = cost.predict_round(load, assignments).draft_s - plain.predict_round(load, assignments).draft_s
        assert more == pytest.approx((2e-4 + 5e-5 * drafting) if drafting else 0.0)
    line = cost.draft_line("w4", sequences=4, mean_context_tokens=300.0)
    assert line.round_s == pytest.approx(4e-4)
    assert replace(line, round_s=0.0) == plain.draft_line("w4", sequences=4, mean_context_tokens=300.0)


def run(
    cost: CostModel, machine: SimulatedMachine, batch: int, gamma: int, *, start: int, rounds: int
) -> None:
    for r in range(start, start + rounds):
        load = load_of(batch, round_index=r)
        cost.observe(machine.run(load, plan_of(batch, "w4", [gamma] * batch if gamma else [])))


def test_slower_memory_is_followed_within_a_window_and_back() -> None:
    machine = SimulatedMachine(
        shapes=SHAPES, stall_chance=0.05, slowdown=lambda r: 1.4 if 100 <= r < 200 else 1.0
    )
    cost, fast = cost_model(), SMALL_COSTS[POLICY].bandwidth_bytes_per_s
    run(cost, machine, 2, 0, start=0, rounds=100)
    assert cost.bandwidth_bytes_per_s == pytest.approx(fast, rel=0.05)
    run(cost, machine, 2, 0, start=100, rounds=24)
    assert cost.bandwidth_bytes_per_s == pytest.approx(fast / 1.4, rel=0.08)
    run(cost, machine, 2, 0, start=200, rounds=24)
    assert cost.bandwidth_bytes_per_s == pytest.approx(fast, rel=0.08)


def test_plain_rounds_move_bandwidth_and_wide_verification_moves_rate() -> None:
    slow = {k: replace(c, flops_per_s=c.flops_per_s / 1.3) for k, c in SMALL_COSTS.items()}
    machine = SimulatedMachine(shapes=SHAPES, costs=slow, slowdown=lambda r: 1.2)
    cost = cost_model()
    run(cost, machine, 2, 0, start=0, rounds=40)
    assert cost.flops_per_s == SMALL_COSTS[POLICY].flops_per_s
    bandwidth = cost.bandwidth_bytes_per_s
    assert bandwidth == pytest.approx(SMALL_COSTS[POLICY].bandwidth_bytes_per_s / 1.2, rel=0.06)
    run(cost, machine, 16, 4, start=40, rounds=40)
    assert cost.flops_per_s == pytest.approx(SMALL_COSTS[POLICY].flops_per_s / 1.3, rel=0.06)


def test_a_lasting_misfit_of_one_shape_is_learnt_for_that_shape_alone() -> None:
    machine = SimulatedMachine(
        shapes=SHAPES, misfit=lambda part, rows, s: 1.25 if rows > s and s == 4 else 1.0
    )
    cost = cost_model()
    for r in range(300):
        run(cost, machine, 4, 3 if r % 2 else 0, start=r, rounds=1)
    for gamma in (0, 3):
        load, plan = load_of(4), plan_of(4, "w4", [gamma] * 4 if gamma else [])
        assert cost.predict_round(load, plan.assignments).total_s == pytest.approx(
            machine.true_s(load, plan), rel=0.05
        )


def test_stalls_barely_move_a_prediction() -> None:
    machine = SimulatedMachine(shapes=SHAPES, stall_chance=0.15, stall_s=0.05)
    cost = cost_model()
    run(cost, machine, 1, 0, start=0, rounds=200)
    load = load_of(1)
    assert cost.predict_round(load, {}).total_s == pytest.approx(
        machine.true_s(load, plan_of(1, "w4", [])), rel=0.05
    )


@pytest.mark.parametrize("field", ["verify_s", "total_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_nonsense_times_teach_nothing(field: str, value: float) -> None:
    cost, machine = cost_model(), SimulatedMachine(shapes=SHAPES)
    load = load_of(2)
    before = cost.predict_round(load, {})
    facts: RoundFacts = replace(machine.run(load, plan_of(2, "w4", [2, 2])), **{field: value})
    cost.observe(facts)
    assert cost.predict_round(load, {}) == before


def test_rounds_with_prompt_rows_teach_nothing() -> None:
    cost, machine, load = cost_model(), SimulatedMachine(shapes=SHAPES), load_of(2)
    before = cost.predict_round(load, {})
    cost.observe(replace(machine.run(load, plan_of(2, "w4", [])), prefill_rows=64, verify_s=1.0, total_s=1.1))
    assert cost.predict_round(load, {}) == before


def test_a_part_without_calibration_is_refused_by_name() -> None:
    partial = Calibration(key="k", parts={POLICY: exact_calibration().parts[POLICY]})
    with pytest.raises(ValueError, match="w4"):
        CostModel(SHAPES, partial, ControllerConfig())


@pytest.mark.parametrize("slowdown", [2.0, 0.5])
def test_an_unheard_parameter_returns_to_its_calibration_without_a_jump(slowdown: float) -> None:
    tracker, before = FactorTracker(quantile=0.35, window=24), slowdown
    for _ in range(30):
        tracker.observe(slowdown)
    assert tracker.slowdown == pytest.approx(slowdown)
    for rounds in range(64 * 100):
        tracker.idle()
        now, before = abs(math.log(tracker.slowdown)), tracker.slowdown
        assert abs(math.log(before)) - now <= 0.04
        if rounds == 64 * 10:
            assert now > 0.5 * abs(math.log(slowdown))
    assert tracker.slowdown == pytest.approx(1.0, abs=0.01)
    for _ in range(8):
        tracker.observe(slowdown)
    assert tracker.slowdown == pytest.approx(slowdown)


@pytest.mark.slow
@pytest.mark.parametrize("own", [1.0, 1.4])
@pytest.mark.parametrize(("batch", "gamma", "check_every"), [(1, 4, 10_000), (2, 3, 10_000), (4, 3, 64)])
def test_ten_thousand_noisy_rounds_of_one_shape_do_not_misprice_another(
    batch: int, gamma: int, check_every: int, own: float
) -> None:
    # Sixteen rows are the knee of this machine, where only plain decoding tells a drafter's slowness apart.
    w4 = SMALL_COSTS["w4"]
    dear = replace(w4, bandwidth_bytes_per_s=w4.bandwidth_bytes_per_s / own, flops_per_s=w4.flops_per_s / own)
    machine = SimulatedMachine(shapes=SHAPES, costs={**SMALL_COSTS, "w4": dear}, noise_frac=0.05, seed=batch)
    cost = cost_model()
    for start in range(0, 10_000, check_every):
        run(cost, machine, batch, 0, start=start, rounds=1)
        run(cost, machine, batch, gamma, start=start + 1, rounds=check_every - 1)
    assert cost.own_slowdown("w4") == pytest.approx(own, rel=0.1)
    assert cost.bandwidth_bytes_per_s == pytest.approx(SMALL_COSTS[POLICY].bandwidth_bytes_per_s, rel=0.1)
    for name, rows in (("w4", 2 * batch), (POLICY, 2 * batch * (gamma + 1)), (POLICY, batch)):
        sequences = rows if name == "w4" else batch
        tokens = 300 * sequences, 300 * rows
        true_s = machine.forward_s(
            name, rows=rows, sequences=sequences, read=tokens[0], context=tokens[1], round_index=0
        )
        priced_s = cost.forward_s(
            name, rows=rows, sequences=sequences, read_tokens=tokens[0], context_tokens=tokens[1]
        )
        assert priced_s == pytest.approx(true_s, rel=0.15)


def test_a_factor_never_leaves_its_range() -> None:
    tracker = FactorTracker(quantile=0.35, window=24)
    for _ in range(30):
        tracker.observe(1e9)
    assert tracker.slowdown == pytest.approx(5.0)


def test_shapes_never_seen_are_believed_to_be_as_modelled() -> None:
    table = ResidualTable(quantile=0.35)
    for _ in range(64):
        table.observe(8, 2, 0.1)
    assert table.factor(8, 2) == pytest.approx(math.exp(0.1), rel=0.02)
    assert table.factor(512, 64) == pytest.approx(1.0, abs=1e-6)


def test_time_outside_forwards_is_learnt_without_blaming_speculation() -> None:
    line, rng = LineTracker(base_s=0.0, per_row_s=0.0), np.random.default_rng(0)
    for _ in range(30):
        line.observe(6, 5e-4 * float(np.exp(0.05 * rng.standard_normal())), flagged=True)
    assert line.predict(6, flagged=True) == pytest.approx(5e-4, rel=0.1)
    assert line.predict(2, flagged=False) > 3e-4


def test_steps_of_the_policy_over_rows_are_those_the_calibration_measured() -> None:
    fitted = exact_calibration()
    plain = CostModel(SHAPES, fitted, ControllerConfig())

    def policy_s(model: CostModel, rows: int, sequences: int) -> float:
        return model.forward_s(
            POLICY,
            rows=rows,
            sequences=sequences,
            read_tokens=64.0 * sequences,
            context_tokens=64.0 * rows,
        )

    def timing(rows: int, log_error: float) -> Timing:
        seconds = policy_s(plain, rows, rows) * math.exp(log_error)
        return timing_of([seconds] * 3, part=POLICY, rows=rows, sequences=rows, context_tokens=64)

    errors = {1: 0.02, 4: 0.08, 6: -0.12, 8: 0.1, 16: -0.05, 32: -0.03}
    timings = tuple(timing(rows, error) for rows, error in errors.items())
    stepped = CostModel(SHAPES, replace(fitted, timings=timings), ControllerConfig())
    for rows, error in errors.items():
        for sequences in {1, min(4, rows), rows}:
            ratio = policy_s(stepped, rows, sequences) / policy_s(plain, rows, sequences)
            assert ratio == pytest.approx(math.exp(error), rel=1e-6), "whatever sequences the rows belong to"
        curve = stepped.verify_curve_s(
            np.asarray([rows]), np.asarray([64.0 * rows]), sequences=rows, read_tokens=64.0 * rows
        )
        assert float(curve[0]) == pytest.approx(policy_s(stepped, rows, rows))
    few = CostModel(SHAPES, replace(fitted, timings=timings[:3]), ControllerConfig())
    assert policy_s(few, 4, 4) == policy_s(plain, 4, 4)
