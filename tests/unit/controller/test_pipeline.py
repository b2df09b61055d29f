"""What a pipeline over a policy's loops brings and costs, and that plans and rounds are priced alike."""

import random
from dataclasses import replace

import numpy as np
import pytest

from controller.allocate import batch_of
from controller.auto import AutoController
from controller.calibration import Calibration, PartFit, sweep_plan
from controller.candidates import Candidates
from controller.config import ControllerConfig
from controller.cost import CostModel, DraftLine
from controller.decide import build_controller
from controller.pipeline import Pipeline, allocate_lanes, pipelines_of
from controller.testing import load_of, traits_of
from controller.types import (
    AR,
    POLICY,
    Assignment,
    DraftCost,
    PartShape,
    RoundFacts,
    RoundLoad,
    RoundPlan,
    SequenceOutcome,
)

LOOPS = 4
BODY, HEAD = 40_000_000, 1_000_000
"""Numbers of one loop and of the head."""

SHAPES = {
    POLICY: PartShape(
        name=POLICY,
        weight_bytes=2 * (LOOPS * BODY + HEAD),
        flops_per_row=2.0 * (LOOPS * BODY + HEAD),
        kv_bytes_per_token=4 * LOOPS * 1000,
        flops_per_context_token=4.0 * LOOPS * 1000,
    ),
    "wavefront": PartShape(
        name="wavefront",
        weight_bytes=2 * (BODY + HEAD),
        flops_per_row=2.0 * (BODY + HEAD),
        kv_bytes_per_token=4 * 1000,
        flops_per_context_token=4.0 * 1000,
        lane_loops=LOOPS,
        lane_depth=1,
    ),
}
PIPELINE = pipelines_of(SHAPES)["wavefront"]


def calibration(*, flops_per_s: float) -> Calibration:
    fit = PartFit(
        bandwidth_bytes_per_s=2e10,
        flops_per_s=flops_per_s,
        context_factor=1.0,
        overhead_s=1e-7,
        overhead_s_per_row=1e-8,
        samples=1,
        mape_frac=0.0,
        worst_frac=0.0,
    )
    return Calibration(key="looped", parts=dict.fromkeys(SHAPES, fit))


def candidates_of(batch: int, alpha: float) -> Candidates:
    return Candidates(
        label="wavefront",
        drafter_B=("wavefront",) * batch,
        survival_BP=np.full((batch, 8), alpha) ** np.arange(1, 9),
        cap_B=np.full(batch, 8),
        model_B=np.full(batch, True),
        line=DraftLine(pass_s=0.0, row_s=0.0),
    )


def simulated(pipeline: Pipeline, alpha: float, *, tokens: int, seed: int = 1) -> tuple[float, float]:
    """Run lanes of nothing but their depths; return passes per token and lanes per pass."""
    rng = random.Random(seed)
    lanes, passes, rows, done = [0], 0, 0, 0
    while done < tokens:
        if lanes[-1] >= pipeline.depth:
            lanes.append(0)
        passes, rows = passes + 1, rows + len(lanes)
        lanes = [lane + 1 for lane in lanes]
        if lanes[0] == pipeline.loops:
            done += 1
            lanes = lanes[1:] if len(lanes) > 1 and rng.random() < alpha else [0]
    return passes / done, rows / passes


@pytest.mark.parametrize(("depth", "loops"), [(1, 4), (2, 4), (3, 4), (2, 6)])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 0.9])
def test_tokens_and_lanes_are_those_of_lanes_played_through(depth: int, loops: int, alpha: float) -> None:
    shape = replace(SHAPES["wavefront"], lane_depth=depth, lane_loops=loops)
    pipeline = pipelines_of({"wavefront": shape})["wavefront"]
    passes, lanes = simulated(pipeline, alpha, tokens=4000)
    assert pipeline.passes_per_token(alpha) == pytest.approx(passes, rel=0.03)
    assert pipeline.mean_lanes(alpha) == pytest.approx(lanes, rel=0.03)


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.95])
def test_where_bytes_bound_the_gain_is_the_published_law(alpha: float) -> None:
    cost = CostModel(SHAPES, calibration(flops_per_s=1e14), ControllerConfig())
    batch = batch_of(load_of(1).sequences, tail_weight=0.0, tail=True)
    found = allocate_lanes(batch, candidates_of(1, alpha), cost, PIPELINE)
    plain_per_s = 1.0 / cost.plain_s(1, read_tokens=batch.read_tokens)
    law = LOOPS / (alpha + (1.0 - alpha) * LOOPS)
    assert found.worth_per_s / plain_per_s == pytest.approx(law, rel=0.05)


LONG = {**SHAPES, "wavefront": replace(SHAPES["wavefront"], lane_passes=32)}
"""Of an engine whose rounds run more passes where nothing else is in them."""


def test_a_round_has_more_passes_where_it_is_the_pipelines_own_and_shares_them_out() -> None:
    shape = LONG["wavefront"]
    assert [shape.passes_of(n, alone=True) for n in (1, 2, 5, 8, 9, 64)] == [32, 16, 6, 4, 4, 4]
    assert [shape.passes_of(n, alone=False) for n in (1, 9)] == [4, 4]
    assert SHAPES["wavefront"].passes_of(1, alone=True) == LOOPS


def test_longer_rounds_bring_their_tokens_and_spare_what_a_round_costs_beside_them() -> None:
    fit = calibration(flops_per_s=1e14)
    fit = replace(fit, other=replace(fit.other, base_s=0.01))
    config, found = ControllerConfig(), {}
    for name, shapes in (("short", SHAPES), ("long", LONG)):
        cost, pipeline = CostModel(shapes, fit, config), pipelines_of(shapes)["wavefront"]
        batch = batch_of(load_of(1).sequences, tail_weight=0.0, tail=True)
        found[name] = allocate_lanes(batch, candidates_of(1, 0.8), cost, pipeline)
    short, long = found["short"], found["long"]
    assert long.tokens == pytest.approx(8 * short.tokens)
    assert long.seconds - 0.01 == pytest.approx(8 * (short.seconds - 0.01))
    assert long.worth_per_s > 1.3 * short.worth_per_s


def test_a_round_that_ends_with_its_sequence_is_priced_to_its_end_alone() -> None:
    cost, pipeline = CostModel(LONG, calibration(flops_per_s=1e14), ControllerConfig()), pipelines_of(LONG)
    near = [s._replace(remaining_tokens=5) for s in load_of(1).sequences]
    found = {}
    for name, sequences in (("near", near), ("far", load_of(1).sequences)):
        batch = batch_of(sequences, tail_weight=0.0, tail=True)
        found[name] = allocate_lanes(batch, candidates_of(1, 0.8), cost, pipeline["wavefront"])
    assert found["near"].tokens == pytest.approx(5.0)
    assert found["near"].worth_per_s == pytest.approx(found["far"].worth_per_s, rel=0.05)


def test_where_arithmetic_bounds_lanes_cost_more_than_they_bring() -> None:
    cost = CostModel(SHAPES, calibration(flops_per_s=1e9), ControllerConfig())
    batch = batch_of(load_of(16).sequences, tail_weight=0.0, tail=True)
    found = allocate_lanes(batch, candidates_of(16, 0.9), cost, PIPELINE)
    assert found.worth_per_s < 16 / cost.plain_s(16, read_tokens=batch.read_tokens)


def test_a_plan_and_its_round_are_priced_alike_and_plain_sequences_apart() -> None:
    cost = CostModel(SHAPES, calibration(flops_per_s=1e11), ControllerConfig())
    load = load_of(4)
    lanes = Assignment(drafter="wavefront", gamma=8)
    all_in = cost.predict_round(load, {s.key: lanes for s in load.sequences}, lanes={"wavefront": 3.0})
    assert all_in.verify_s == 0.0
    assert all_in.draft_s == cost.lanes_s("wavefront", lanes=3.0, sequences=4, read_tokens=1200.0, passes=4)
    half = cost.predict_round(load, {0: lanes, 1: lanes}, lanes={"wavefront": 3.0})
    two = load_of(2, first_key=2)
    assert half.verify_s == pytest.approx(cost.predict_round(two, {}).verify_s)
    assert half.draft_s == cost.lanes_s("wavefront", lanes=3.0, sequences=2, read_tokens=600.0, passes=4)


class LoopedMachine:
    """Rounds of a looped policy on a machine that costs what its calibration says, times ``slow``."""

    def __init__(
        self, *, alpha: float, flops_per_s: float, slow: float = 1.0, shapes: dict[str, PartShape] = SHAPES
    ) -> None:
        self.alpha, self.slow, self.shapes = alpha, slow, shapes
        self.cost = CostModel(shapes, calibration(flops_per_s=flops_per_s), ControllerConfig())
        self.rng = random.Random(5)

    def run(self, load: RoundLoad, plan: RoundPlan) -> RoundFacts:
        lanes = {"wavefront": PIPELINE.mean_lanes(self.alpha)}
        predicted = self.cost.predict_round(load, plan.assignments, lanes=lanes)
        outcomes = []
        in_lanes = sum(plan.of(s.key).drafter != AR for s in load.sequences)
        alone = in_lanes == len(load.sequences)
        passes = self.shapes["wavefront"].passes_of(max(1, in_lanes), alone=alone)
        for s in load.sequences:
            drafter = plan.of(s.key).drafter
            accepted = gamma = committed = left = 0
            while drafter != AR and left < passes:
                # A right proposal is done a pass later; a wrong one takes the next token all loops.
                gamma += 1
                right = self.rng.random() < self.alpha
                accepted += right
                left += 1 if right else LOOPS
                committed += 1
            outcomes.append(
                SequenceOutcome(
                    key=s.key,
                    drafter=drafter,
                    gamma=gamma,
                    accepted=accepted,
                    committed=max(1, committed),
                    context_tokens=s.context_tokens,
                    censored=False,
                    finished=False,
                    judged_singly=drafter != AR,
                )
            )
        rows = round(lanes["wavefront"] * in_lanes) * passes
        draft = DraftCost(
            drafter="wavefront",
            passes=passes,
            rows=rows,
            context_tokens=300 * rows,
            seconds=predicted.draft_s * self.slow,
        )
        plain = len(outcomes) - in_lanes
        return RoundFacts(
            round_index=load.round_index,
            policy_version=0,
            batch=len(outcomes),
            prefill_rows=0,
            verify_rows=plain,
            context_tokens=300 * plain,
            draft_s=draft.seconds if in_lanes else 0.0,
            verify_s=predicted.verify_s * self.slow,
            commit_s=predicted.other_s,
            total_s=(predicted.draft_s + predicted.verify_s) * self.slow + predicted.other_s,
            drafts=(draft,) if in_lanes else (),
            outcomes=tuple(outcomes),
        )


def decided(machine: LoopedMachine, batch: int, *, rounds: int, flops_per_s: float) -> list[RoundPlan]:
    controller = build_controller(
        ControllerConfig(), traits_of(machine.shapes), machine.shapes, calibration(flops_per_s=flops_per_s)
    )
    assert isinstance(controller, AutoController)
    plans, now_s = [], 0.0
    for r in range(rounds):
        plan = controller.decide(load_of(batch, round_index=r), now_s=now_s)
        facts = machine.run(load_of(batch, round_index=r), plan)
        controller.observe(facts)
        now_s += facts.total_s
        plans.append(plan)
        if plan.predicted_s and r > rounds // 2 and not plan.probe:
            assert plan.predicted_s == pytest.approx(facts.total_s, rel=0.2)
    return plans


@pytest.mark.parametrize("shapes", [SHAPES, LONG], ids=["short", "long"])
@pytest.mark.parametrize("slow", [1.0, 2.0])
def test_auto_pipelines_where_bytes_bound_and_proposals_are_right(
    slow: float, shapes: dict[str, PartShape]
) -> None:
    machine = LoopedMachine(alpha=0.85, flops_per_s=1e12, slow=slow, shapes=shapes)
    plans = decided(machine, 1, rounds=200, flops_per_s=1e12)[100:]
    assert np.mean([bool(p.assignments) for p in plans]) > 0.9
    assert {a.drafter for p in plans for a in p.assignments.values()} == {"wavefront"}


@pytest.mark.parametrize(("alpha", "flops_per_s", "batch"), [(0.3, 2e10, 4), (0.85, 2e9, 16)])
def test_auto_decodes_plainly_where_proposals_are_wrong_or_arithmetic_bounds(
    alpha: float, flops_per_s: float, batch: int
) -> None:
    machine = LoopedMachine(alpha=alpha, flops_per_s=flops_per_s)
    plans = decided(machine, batch, rounds=300, flops_per_s=flops_per_s)[150:]
    assert np.mean([bool(p.assignments) for p in plans]) < 0.05


def test_a_sweep_times_full_pipelines_too() -> None:
    points = [p for p in sweep_plan(SHAPES, 8) if p.part == "wavefront"]
    assert {(4 * b, b) for b in (1, 2, 4, 8)} <= {(p.rows, p.sequences) for p in points}
    assert len({p.context_tokens for p in points if p.rows == 4}) == 2
