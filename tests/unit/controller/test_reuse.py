"""Rounds whose verification goes on from the draft: priced by the law of looped policies, and learnt from."""

from dataclasses import replace

import numpy as np
import pytest

from controller.allocate import allocate, allocate_uniform, batch_of
from controller.calibration import Calibration, OtherFit, PartFit
from controller.candidates import Candidates, mixed
from controller.config import ControllerConfig
from controller.cost import CostModel, DraftLine
from controller.reuse import Reused, Share, reused_by, shares_of
from controller.testing import (
    HISTORY,
    SimulatedMachine,
    TrueCost,
    auto,
    load_of,
    regret_of,
)
from controller.types import (
    POLICY,
    Assignment,
    DraftCost,
    PartShape,
    RoundFacts,
    RoundPlan,
    SequenceOutcome,
)

LOOPS, LOOP_BYTES, LOOP_FLOPS, LOOP_KV = 4, 60_000_000, 6e7, 6_000


def loops_shape(name: str, loops: int, *, reuse: bool = True, head: int = 0) -> PartShape:
    """The first loops of a policy of four, its head as large as ``head`` bytes."""
    whole = LOOPS * LOOP_BYTES + head
    return PartShape(
        name=name,
        weight_bytes=loops * LOOP_BYTES + head,
        flops_per_row=loops * LOOP_FLOPS + head,
        kv_bytes_per_token=loops * LOOP_KV,
        flops_per_context_token=3.0 * loops * LOOP_KV,
        reuse_frac=loops * LOOP_BYTES / whole if reuse and loops < LOOPS else 0.0,
    )


def shallow(depth: int) -> str:
    return f"shallow_loop_{depth}"


def shapes_of(head: int = 0) -> dict[str, PartShape]:
    depths = {shallow(d): loops_shape(shallow(d), d, head=head) for d in (1, 2, 3)}
    return {POLICY: loops_shape(POLICY, LOOPS, head=head), **depths}


SHAPES = shapes_of()
TRUE = TrueCost(
    bandwidth_bytes_per_s=50e9, flops_per_s=1e12, context_factor=1.0, overhead_s=1e-7, overhead_s_per_row=1e-9
)


def machine_of(
    *, flops_per_s: float = 1e12, shapes: dict[str, PartShape] | None = None, **settings: object
) -> SimulatedMachine:
    shapes = shapes or SHAPES
    costs = dict.fromkeys(shapes, replace(TRUE, flops_per_s=flops_per_s))
    quiet = {"other_s": 0.0, "other_s_per_row": 0.0, **settings}
    return SimulatedMachine(shapes=shapes, costs=costs, **quiet)  # type: ignore[arg-type]


def model_of(machine: SimulatedMachine, *, draft_round_s: float = 0.0) -> CostModel:
    """The machine, known exactly; ``draft_round_s`` is what a round's drafting costs beside its passes."""
    parts = {
        name: PartFit(
            bandwidth_bytes_per_s=cost.bandwidth_bytes_per_s,
            flops_per_s=cost.flops_per_s,
            context_factor=cost.context_factor,
            overhead_s=cost.overhead_s,
            overhead_s_per_row=cost.overhead_s_per_row,
            samples=9,
            mape_frac=0.0,
            worst_frac=0.0,
        )
        for name, cost in machine.costs.items()
        if machine.shapes[name].rows_per_draft_token
    }
    drafts = {name: OtherFit(base_s=draft_round_s, s_per_row=draft_round_s) for name in parts}
    return CostModel(machine.shapes, Calibration(key="exact", parts=parts, drafts=drafts), ControllerConfig())


def plan_of(*asked: tuple[str, int]) -> RoundPlan:
    assignments = {i: Assignment(drafter=name, gamma=g) for i, (name, g) in enumerate(asked) if g}
    return RoundPlan(assignments=assignments, reason="test")


# ---- shares -------------------------------------------------------------------------------------


def test_a_forward_is_shares_over_the_rows_that_still_need_them() -> None:
    assert shares_of(5, 50.0, {}) == [Share(1.0, 5, 50.0)]
    reused = {0.5: Reused(1, 10.0), 0.25: Reused(3, 30.0)}
    assert shares_of(5, 50.0, reused) == [
        Share(0.25, 1, 10.0),
        Share(0.25, 4, 40.0),
        Share(0.5, 5, 50.0),
    ]
    assert shares_of(4, 40.0, {0.25: Reused(4, 40.0)}) == [Share(0.75, 4, 40.0)]


def test_only_draft_tokens_of_drafters_that_reuse_count() -> None:
    drafts = [("a", 3, 10), ("b", 2, 20), ("ar", 0, 30), ("a", 1, 40), ("c", 1, 50)]
    found = reused_by(drafts, {"a": 0.25, "b": 0.0, "ar": 0.0, "c": 0.5}.__getitem__)
    assert found == {0.25: Reused(4, 70.0), 0.5: Reused(1, 50.0)}


# ---- the cost law -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_where_moving_weights_bounds_it_the_speed_up_is_the_law_of_looped_policies(
    gamma: int, depth: int
) -> None:
    """S = D (1 + a) / (d (K + 1) + D - d), for any number a of accepted drafts."""
    model = model_of(machine_of(flops_per_s=1e16))
    load = load_of(1, context_tokens=100)
    plain_s = model.predict_round(load, {}).total_s
    drafted_s = model.predict_round(load, plan_of((shallow(depth), gamma)).assignments).total_s
    law = LOOPS / (depth * (gamma + 1) + LOOPS - depth)
    assert plain_s / drafted_s == pytest.approx(law, rel=0.02)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_where_maths_bounds_it_every_row_of_every_loop_costs_the_same(depth: int) -> None:
    """S = (1 + a) / (K + 1): a draft's loops are paid once, when it is drafted."""
    model = model_of(machine_of(flops_per_s=1e9))
    load = load_of(8, context_tokens=100)
    plain_s = model.predict_round(load, {}).total_s
    drafted_s = model.predict_round(load, plan_of(*[(shallow(depth), 3)] * 8).assignments).total_s
    assert drafted_s / plain_s == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize("head", [0, 30_000_000])
@pytest.mark.parametrize("asked", [[], [(2, 4)], [(1, 3)] * 16, [(1, 4), (3, 2), (2, 0), (2, 5)]])
def test_a_round_is_priced_as_the_machine_behaves(asked: list[tuple[int, int]], head: int) -> None:
    machine = machine_of(shapes=shapes_of(head))
    load = load_of(max(1, len(asked)), context_tokens=400)
    plan = plan_of(*[(shallow(depth), gamma) for depth, gamma in asked])
    predicted = model_of(machine).predict_round(load, plan.assignments)
    assert predicted.total_s == pytest.approx(machine.true_s(load, plan))


@pytest.mark.parametrize("per_sequence", [True, False])
def test_what_a_plan_is_chosen_by_is_what_its_round_is_predicted_to_take(per_sequence: bool) -> None:
    model, load = model_of(machine_of(), draft_round_s=1e-3), load_of(8, context_tokens=300)
    name, read = shallow(2), 8 * 300.0
    batch = batch_of(load.sequences, tail_weight=0.0, tail=False)
    candidates = Candidates(
        label=name,
        drafter_B=(name,) * 8,
        survival_BP=np.tile(0.9 ** np.arange(1, 5), (8, 1)),
        cap_B=np.full(8, 4),
        model_B=np.full(8, True),
        line=model.draft_line(name, sequences=8, mean_context_tokens=read / 8),
        reuse_frac=model.reuse_frac(name),
    )
    if per_sequence:
        found = allocate(batch, candidates, model, longest=(4,), least_worth=0.0)
    else:
        found = allocate_uniform(batch, candidates, model, longest=(4,))
    assert found is not None
    assert found.gamma_B.min() > 0
    plan = plan_of(*[(name, g) for g in found.gamma_B.tolist()])
    assert found.seconds == pytest.approx(model.predict_round(load, plan.assignments).total_s, rel=1e-6)


LANES = replace(loops_shape("wavefront", 1, reuse=False), lane_loops=LOOPS, lane_depth=1)


@pytest.mark.parametrize("slow", [1.0, 1.4])
def test_lanes_stand_beside_a_reused_forward_and_neither_takes_the_blame_for_the_other(slow: float) -> None:
    """Two sequences of either kind in every round, on a machine that may be slower than it was calibrated."""
    machine = machine_of(shapes={**SHAPES, "wavefront": LANES})
    model, true = model_of(machine), model_of(machine)
    reusing, lanes = (shallow(2), 3), ("wavefront", 8)
    plan, load = plan_of(reusing, reusing, lanes, lanes), load_of(4, context_tokens=300)
    apart = true.predict_round(load_of(2, context_tokens=300), plan_of(reusing, reusing).assignments)
    lanes_s = true.lanes_s("wavefront", lanes=4.0, sequences=2, read_tokens=600.0, passes=LOOPS)
    together = true.predict_round(load, plan.assignments)
    assert together.verify_s == pytest.approx(apart.verify_s)
    assert together.draft_s == pytest.approx(apart.draft_s + lanes_s)
    outcomes = [
        SequenceOutcome(
            key=key,
            drafter=plan.of(key).drafter,
            gamma=3,
            accepted=2,
            committed=3,
            context_tokens=300,
            censored=False,
            finished=False,
        )
        for key in range(4)
    ]
    shallow_cost = DraftCost(
        drafter=shallow(2), passes=3, rows=6, context_tokens=6 * 300, seconds=apart.draft_s * slow
    )
    lanes_cost = DraftCost(
        drafter="wavefront",
        passes=LOOPS,
        rows=LOOPS * 8,
        context_tokens=LOOPS * 8 * 300,
        seconds=lanes_s * slow,
    )
    for r in range(150):
        facts = RoundFacts(
            round_index=r,
            policy_version=0,
            batch=4,
            prefill_rows=0,
            verify_rows=8,
            context_tokens=8 * 300,
            draft_s=together.draft_s * slow,
            verify_s=together.verify_s * slow,
            commit_s=0.0,
            total_s=together.total_s * slow,
            drafts=(shallow_cost, lanes_cost),
            outcomes=tuple(outcomes),
        )
        model.observe(facts)
    assert model.bandwidth_bytes_per_s == pytest.approx(TRUE.bandwidth_bytes_per_s / slow, rel=0.03)
    for drafter in (shallow(2), "wavefront"):
        assert model.own_slowdown(drafter) == pytest.approx(1.0, rel=0.03)
    learnt = model.predict_round(load, plan.assignments)
    assert learnt.verify_s == pytest.approx(together.verify_s * slow, rel=0.05)
    assert learnt.draft_s == pytest.approx(together.draft_s * slow, rel=0.05)


# ---- choosing -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("acceptance", "least_of_best"),
    [((0.9, 0.93, 0.95), 0.93), ((0.3, 0.9, 0.95), 0.93), ((0.05, 0.1, 0.2), 0.95)],
    ids=["the first loop is good", "it takes two loops", "none is worth it"],
)
@pytest.mark.parametrize("batch", [1, 8])
def test_auto_finds_depth_and_gamma(
    batch: int, acceptance: tuple[float, float, float], least_of_best: float
) -> None:
    kept = {shallow(d): a for d, a in enumerate(acceptance, start=1)}
    machine = machine_of(hazard=lambda drafter, key, position, round_index: kept[drafter], other_s=1e-4)
    found = regret_of(machine, auto(machine), lambda r: load_of(batch, round_index=r), rounds=400, since=200)
    assert found.of_best >= least_of_best
    assert found.of_ar >= 0.97


def test_a_plan_that_mixes_reused_drafts_with_copies_is_priced_as_its_round() -> None:
    model = model_of(machine_of(shapes={**SHAPES, "history": HISTORY}), draft_round_s=1e-3)
    load, name = load_of(6, context_tokens=300), shallow(2)
    drafter_B = tuple(name if i % 2 else "history" for i in range(6))
    candidates = Candidates(
        label="both",
        drafter_B=drafter_B,
        survival_BP=np.tile(0.95 ** np.arange(1, 4), (6, 1)),
        cap_B=np.full(6, 3),
        model_B=np.asarray([d == name for d in drafter_B]),
        line=model.draft_line(name, sequences=3, mean_context_tokens=300.0),
        reuse_frac=model.reuse_frac(name),
    )
    batch = batch_of(load.sequences, tail_weight=0.0, tail=False)
    found = allocate(batch, candidates, model, longest=(3,), least_worth=0.0)
    assert found is not None
    assert found.gamma_B.min() > 0
    plan = plan_of(*zip(drafter_B, found.gamma_B.tolist(), strict=True))
    assert found.seconds == pytest.approx(model.predict_round(load, plan.assignments).total_s, rel=1e-6)


@pytest.mark.parametrize(("reuse_frac", "moves"), [(0.0, True), (0.75, False)])
def test_a_sequence_stays_with_a_model_whose_drafts_leave_little_of_their_rows_to_pay(
    reuse_frac: float, moves: bool
) -> None:
    """Beside a copy that is kept a little more often, but whose row is computed whole."""

    def one_token(label: str, kept: float, cap: list[int], *, runs_model: bool) -> Candidates:
        return Candidates(
            label=label,
            drafter_B=(label, label),
            survival_BP=np.full((2, 1), kept),
            cap_B=np.asarray(cap),
            model_B=np.full(2, runs_model),
            line=DraftLine(pass_s=0.0, row_s=0.0),
            reuse_frac=reuse_frac if runs_model else 0.0,
        )

    drafts = one_token(shallow(3), 0.8, [1, 1], runs_model=True)
    copies = one_token("history", 0.85, [1, 0], runs_model=False)
    both = mixed(drafts, [copies], row_worth=0.5, plain_per_s=1.0)
    assert (both is not None) == moves


# ---- learning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("slowdown", [1.4, 0.7])
def test_memory_that_changes_speed_is_followed_through_reused_rounds_alone(
    slowdown: float, depth: int
) -> None:
    """No plain round in between, and no overshoot although most of the forward may be done by drafts."""
    machine = machine_of(slowdown=lambda r: slowdown if r >= 60 else 1.0, other_s=1e-4)
    model, plan = model_of(machine), plan_of(*[(shallow(depth), 3)] * 2)
    seen = []
    for r in range(160):
        model.observe(machine.run(load_of(2, round_index=r), plan))
        seen.append(model.bandwidth_bytes_per_s)
    true = TRUE.bandwidth_bytes_per_s
    assert seen[59] == pytest.approx(true, rel=0.06)
    assert seen[-1] == pytest.approx(true / slowdown, rel=0.08)
    low, high = sorted((true, true / slowdown))
    assert all(0.9 * low < s < 1.1 * high for s in seen), "it goes there and not beyond"


@pytest.mark.parametrize("misfit", [1.25, 0.8])
def test_what_stays_wrong_for_the_wide_part_of_a_reused_round_is_learnt_for_its_shape(misfit: float) -> None:
    def wrong(part: str, rows: int, sequences: int) -> float:
        return misfit if part == POLICY and rows > sequences else 1.0

    machine = machine_of(misfit=wrong, other_s=1e-4)
    model, plan = model_of(machine), plan_of(*[(shallow(2), 3)] * 4)
    nothing = plan_of()
    for r in range(300):
        model.observe(machine.run(load_of(4, round_index=r), plan if r % 2 else nothing))
    for asked in (plan, nothing):
        load = load_of(4, round_index=300)
        predicted = model.predict_round(load, asked.assignments).total_s
        assert predicted == pytest.approx(machine.true_s(load, asked), rel=0.06)
