"""Workload ``steps``: its bounds, claims, cliffs and table, and one small real run."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from controller.types import PartShape
from rollout.bench.bound import Peaks, bounds
from rollout.bench.choosing import CALLS, WAYS, ChoosingClock
from rollout.bench.cliffs import SpeedPoint, find_cliffs
from rollout.bench.cost_ratio import CostClaim, CostRatio
from rollout.bench.prompts import PROMPTS, long_prompts
from rollout.bench.step_cell import DRAFT, PLAIN, Kind, Timings, Visit, visit_tokens
from rollout.bench.step_page import step_page
from rollout.bench.step_result import steps_table
from rollout.bench.steps import claims_of, gammas_of, plan_cells, steps_engine
from rollout.config import EngineConfig, PolicyConfig
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.target import Choice, TargetRow, logit_edits
from rollout.errors import ConfigError
from rollout.job_config import BenchConfig, JobConfig
from rollout.jobs.bench import main
from rollout.testing import char_tokenizer, save_tiny_folder

SHAPE = PartShape(
    name="policy",
    weight_bytes=1000,
    flops_per_row=400.0,
    kv_bytes_per_token=10,
    flops_per_context_token=4.0,
)
PEAKS = Peaks(read_bytes_per_s=100.0, flops_per_s=200.0)
FAST = Peaks(read_bytes_per_s=1e6, flops_per_s=1e6)
"""At these, moving the weights and 700 tokens takes 8 ms."""


# ---- bounds ---------------------------------------------------------------------------------------


def test_weights_are_read_once_a_forward_and_a_sequences_context_once_for_its_rows() -> None:
    least = bounds(SHAPE, PEAKS, rows=6, read_tokens=50, context_tokens=300)
    assert (least.bytes_s, least.flops_s) == ((1000 + 10 * 50) / 100, (400 * 6 + 4 * 300) / 200)
    assert (least.seconds, least.bound_by) == (18.0, "flops")


def test_attention_and_linears_follow_each_other_each_at_its_own_bound() -> None:
    """Linears compute for 12 s and move for 10 s; attention moves for 30 s and computes for 6 s."""
    least = bounds(SHAPE, PEAKS, rows=6, read_tokens=300, context_tokens=300)
    assert (least.linears.seconds, least.attention.seconds) == (12.0, 30.0)
    assert (least.seconds, least.bound_by) == (42.0, "bytes")
    assert (least.bytes_s, least.flops_s) == (40.0, 18.0)


def test_several_forwards_read_the_weights_several_times() -> None:
    one = bounds(SHAPE, PEAKS, rows=1, read_tokens=0, context_tokens=0)
    three = bounds(SHAPE, PEAKS, rows=3, read_tokens=0, context_tokens=0, forwards=3)
    assert three.seconds == 3 * one.seconds
    assert one.bound_by == "bytes"


def test_bounds_move_to_other_peaks_as_if_computed_there() -> None:
    faster = Peaks(read_bytes_per_s=300.0, flops_per_s=250.0)
    work = {"rows": 6, "read_tokens": 50, "context_tokens": 300}
    assert bounds(SHAPE, PEAKS, **work).at(faster, computed_at=PEAKS) == bounds(SHAPE, faster, **work)


# ---- cliffs ---------------------------------------------------------------------------------------


def point(batch: int, context: int, speed: float, bound: float) -> SpeedPoint:
    return SpeedPoint(batch=batch, context_tokens=context, tokens_per_s=speed, bound_tokens_per_s=bound)


def test_a_drop_that_the_bounds_explain_is_no_cliff() -> None:
    assert find_cliffs([point(1, 128, 100, 200), point(1, 256, 50, 100)]) == []
    assert find_cliffs([point(1, 128, 100, 200), point(1, 256, 90.1, 200)]) == []
    assert find_cliffs([point(1, 128, 100, 200), point(2, 128, 150, 390)]) == []


def test_a_drop_beyond_a_tenth_that_nothing_explains_is_a_cliff_between_its_neighbours() -> None:
    points = [point(4, 128, 100, 400), point(1, 128, 50, 100), point(2, 128, 120, 200)]
    (cliff,) = find_cliffs(points)
    assert (cliff.axis, cliff.batch, cliff.context_tokens) == ("batch", (2, 4), (128, 128))
    assert cliff.drop == pytest.approx(1 / 6)
    assert cliff.explained_drop == 0.0  # the bounds rise


def test_a_drop_larger_than_explained_is_a_cliff_over_context_and_says_both_shares() -> None:
    (cliff,) = find_cliffs([point(8, 256, 60, 150), point(8, 128, 100, 200), point(4, 128, 100, 200)])
    assert (cliff.axis, cliff.context_tokens) == ("context", (128, 256))
    assert cliff.drop == pytest.approx(0.4)
    assert cliff.explained_drop == pytest.approx(0.25)


# ---- the drawing ----------------------------------------------------------------------------------


def speeds(*points: SpeedPoint) -> dict[str, Any]:
    return {
        "speeds": [asdict(p) for p in points],
        "cliffs": [asdict(cliff) for cliff in find_cliffs(points)],
        "left_out": [],
    }


def test_every_line_is_drawn_twice_with_its_bound_dashed() -> None:
    page = step_page(speeds(point(1, 128, 100, 120), point(2, 128, 190, 240), point(1, 512, 90, 100)))
    # Two lines over batch (contexts 128, 512), two over context (batches 1, 2), each with its bound.
    assert page.count("<polyline") == 8
    assert page.count("stroke-dasharray") == 4
    assert page.count("No cliff between neighbours") == 2
    assert "batch 2, context 128: 190.0 tokens/s, bound 240.0" in page
    assert "<script" not in page


def test_a_cliff_is_marked_and_named_on_its_own_axis_alone() -> None:
    data = speeds(point(1, 128, 100, 120), point(2, 128, 60, 240), point(1, 512, 98, 119))
    page = step_page(data | {"left_out": [{"batch": 9, "context_tokens": 7, "reason": "too much"}]})
    over_batch, over_context = page.split("Tokens per second over context")
    assert "cliff over batch: batch 1 to 2, context 128: 40% fewer tokens/s, 0% explained" in over_batch
    assert "a drop of more than 10%" in over_batch
    assert "No cliff between neighbours" in over_context
    assert "batch 9 at 7: too much." in over_context


# ---- claims ---------------------------------------------------------------------------------------


def ratio(*values: float, at_most: float = 0.42, most: int = 9) -> CostRatio:
    claim = CostClaim(name="w4_draft_b1_over_ar", at_most=at_most)
    return CostRatio(claim=claim, min_values=3, max_values=most, values=list(values))


def test_a_ceiling_is_met_by_the_upper_end_and_missed_by_the_lower_one() -> None:
    assert ratio(0.40, 0.401, 0.399).verdict == "met"
    assert ratio(0.44, 0.441, 0.439).verdict == "not met"
    assert ratio(0.40, 0.44, 0.42).verdict == "undecided"
    assert ratio(0.40, 0.40).verdict == "undecided", "two values are too few"
    assert ratio().verdict == "undecided"


def test_visits_end_when_the_interval_is_a_tenth_of_the_ceiling_or_enough_were_made() -> None:
    assert not ratio(0.40, 0.401, 0.399).wants_values
    assert ratio(0.30, 0.50, 0.40).wants_values
    assert not ratio(0.30, 0.50, 0.40, most=3).wants_values
    assert ratio(0.30, 0.50, 0.40).told()["median"] == 0.40


def visit() -> Visit:
    six = Kind(name="verify", gamma=5)
    seconds = {PLAIN: [0.010, 0.010, 0.014], DRAFT: [0.004], six: [0.012]}
    return Visit(
        timings={kind: Timings(seconds=s, rows=1.0, verify_s=s) for kind, s in seconds.items()},
        bounds=dict.fromkeys(seconds, bounds(SHAPE, FAST, rows=9, read_tokens=700, context_tokens=0)),
        peaks=PEAKS,
        choosing_s={PLAIN: 0.0005, six: 0.001},
        choosing_in_s={"topp_topk": 0.0005, "penalty": 0.0015},
    )


def test_every_claim_reads_its_own_times_off_a_visit() -> None:
    found = {m.claim.name: (m.claim.at_most, m.value(visit())) for m in claims_of(1, (1, 5))}
    assert found == {
        "token_choice_share_b1": (0.07, pytest.approx(0.05)),
        "token_choice_topp_topk_share_b1": (0.07, pytest.approx(0.05)),
        # The round takes a millisecond longer for it.
        "token_choice_penalty_share_b1": (0.07, pytest.approx(1.5 / 11)),
        "ar_b1_over_bytes_bound": (1.25, pytest.approx(1.25)),
        "w4_draft_b1_over_ar": (0.42, pytest.approx(0.4)),
        "verify6_b1_over_ar": (1.2, pytest.approx(1.2)),
    }


def test_what_a_run_does_not_measure_is_not_claimed() -> None:
    choices = [f"token_choice_{way}share_b4" for way in ("", "topp_topk_", "penalty_")]
    assert [m.claim.name for m in claims_of(4, (1, 3))] == [*choices, "w4_draft_b4_over_ar"]
    assert [m.claim.name for m in claims_of(4, ())] == choices
    assert "verify6_b1_over_ar" not in {m.claim.name for m in claims_of(1, (1, 3))}


def test_choosing_is_timed_with_what_each_way_asks_for_on_the_tokens_of_each_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chooser, asked = TorchChooser(), []
    choose = chooser.choose

    def noted(logits_RV: Tensor, rows: Sequence[TargetRow]) -> list[Choice]:
        asked.append((len(logits_RV), rows))
        return choose(logits_RV, rows)

    monkeypatch.setattr(chooser, "choose", noted)
    clock = ChoosingClock(chooser, torch.randn(4, 9), temperature=0.7)
    assert clock.seconds(3) > 0
    assert all(clock.seconds_in(way, [(1, 2, 1), (5,)]) > 0 for way in WAYS)
    assert [count for count, _ in asked[::CALLS]] == [3, 2, 2]
    plain, filtered, penalised = (rows[0] for _, rows in asked[::CALLS])
    assert {r.params.temperature for r in (plain, filtered, penalised)} == {0.7}
    assert (plain.params.has_filters, plain.params.has_penalties) == (False, False)
    assert (filtered.params.top_p, filtered.params.top_k) == (0.95, 50)
    assert penalised.params.repetition_penalty == 1.1
    assert penalised.prompt_tokens == {1, 2}
    assert logit_edits(penalised).ids == [1, 2]


def test_cells_that_do_not_fit_are_left_out_with_their_reason() -> None:
    bench = BenchConfig(batches=(1, 8), contexts=(512, 128, 4096), step_gammas=(1,))
    room = visit_tokens(bench.step_gammas)
    cells, left_out = plan_cells(bench, context_limit=600, kv_tokens=8 * (128 + room))
    assert cells == [(1, 128), (8, 128), (1, 512)]
    reasons = {(s.batch, s.context_tokens): s.reason for s in left_out}
    assert f"{8 * (512 + room)} tokens over the batch exceed the {8 * (128 + room)}" in reasons[8, 512]
    assert "exceed the context of 600" in reasons[1, 4096]
    with pytest.raises(ConfigError, match="nothing can be measured"):
        plan_cells(bench, context_limit=100, kv_tokens=1 << 20)


def test_drafts_are_measured_up_to_so_much_context_over_the_batch() -> None:
    bench = BenchConfig(step_gammas=(5, 1), max_draft_tokens=1024, max_verify_rows=24)
    assert gammas_of(bench, 4, 256) == (1, 5)
    assert gammas_of(bench, 8, 128) == (1,), "48 rows are more than were asked for"
    assert gammas_of(bench, 4, 257) == ()


def test_the_engine_has_room_for_every_cell_and_keeps_prompts() -> None:
    bench = BenchConfig(workload="steps", batches=(1, 48), contexts=(64,), step_gammas=(3,))
    engine = steps_engine(JobConfig(engine=EngineConfig(threads=1, max_batch=4), bench=bench))
    assert (engine.max_batch, engine.prefix_cache) == (48, True)
    assert engine.max_context_tokens == 64 + visit_tokens((3,))
    assert engine.kv_bytes >= EngineConfig().kv_bytes


def test_long_prompts_share_no_beginning_and_shorter_ones_begin_longer_ones() -> None:
    long = long_prompts(char_tokenizer(), 40, 300, vocab_size=48)
    assert {len(p) for p in long} == {300}
    assert len({p[:1] for p in long}) == 40
    short = long_prompts(char_tokenizer(), 3, 70, vocab_size=48)
    assert short == [p[:70] for p in long[:3]]
    assert len(PROMPTS) == 32


# ---- a real run -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("policy")
    save_tiny_folder(folder)
    out = tmp_path_factory.mktemp("out") / "steps.json"
    bench = BenchConfig(
        workload="steps",
        out=str(out),
        batches=(1, 4),
        contexts=(32, 64, 4096),
        step_gammas=(1, 5),
        max_verify_rows=16,
        min_pairs=2,
        max_pairs=2,
    )
    engine = EngineConfig(decoder="compiled", threads=1, max_batch=2)
    assert main(JobConfig(policy=PolicyConfig(source=str(folder)), engine=engine, bench=bench)) == 0
    assert "Tokens per second over batch" in out.with_suffix(".html").read_text()
    data: dict[str, Any] = json.loads(Path(out).read_text())
    return data


@pytest.mark.slow
def test_every_kind_of_round_is_measured_at_every_batch_and_context(written: dict[str, Any]) -> None:
    found = {(s["kind"], s["batch"], s["context_tokens"], s["rows"]) for s in written["steps"]}
    assert found == {
        *(("ar", batch, context, batch) for batch in (1, 4) for context in (32, 64)),
        *(("w4_draft", batch, context, batch) for batch in (1, 4) for context in (32, 64)),
        *(("verify", 1, context, rows) for context in (32, 64) for rows in (2, 6)),
        *(("verify", 4, context, 8) for context in (32, 64)),  # 24 rows are more than were asked for
    }
    assert {(s["batch"], s["context_tokens"]) for s in written["left_out"]} == {(1, 4096), (4, 4096)}
    assert {(s["batch"], s["context_tokens"]) for s in written["speeds"]} == {
        (batch, context) for batch in (1, 4) for context in (32, 64)
    }


@pytest.mark.slow
def test_a_lines_parts_add_up_and_bounds_follow_the_rows(written: dict[str, Any]) -> None:
    lines = {(s["kind"], s["batch"], s["context_tokens"], s["gamma"]): s for s in written["steps"]}
    for step in lines.values():
        assert 0 < step["p10_ms"] <= step["p90_ms"]
        assert step["bound_frac"] > 0
        assert step["mean_context_tokens"] >= step["context_tokens"]
        if step["kind"] != "w4_draft":
            parts = step["forward_ms"] + step["choosing_ms"] + step["rest_ms"]
            assert math.isclose(parts, step["median_ms"], rel_tol=0.5)
        if step["kind"] == "ar":
            for way in WAYS:
                rest_ms = step["median_ms"] - step["choosing_ms"]
                share = step[f"choosing_{way}_ms"] / (rest_ms + step[f"choosing_{way}_ms"])
                assert math.isclose(step[f"choosing_{way}_share"], share, rel_tol=0.5)
    two, six = lines["verify", 1, 32, 1], lines["verify", 1, 32, 5]
    assert six["flops_bound_ms"] > 2 * two["flops_bound_ms"]
    plain, draft = lines["ar", 1, 32, 0], lines["w4_draft", 1, 32, 0]
    assert draft["bytes_bound_ms"] < plain["bytes_bound_ms"]


@pytest.mark.slow
def test_ratios_goals_and_arms_have_the_shape_of_every_workload(written: dict[str, Any]) -> None:
    assert written["workload"] == "steps"
    assert written["complete"] is True
    names = {"ar_b1_over_bytes_bound", "w4_draft_b1_over_ar", "w4_draft_b4_over_ar", "verify6_b1_over_ar"}
    names |= {f"token_choice_{way}share_b{b}" for way in ("", "topp_topk_", "penalty_") for b in (1, 4)}
    assert set(written["ratios"]) == {goal["name"] for goal in written["goals"]} == names
    for name, one in written["ratios"].items():
        assert one["pairs"] == len(one["values"]) == 2, name
        assert one["median"] == statistics.median(one["values"])
    assert written["too_few_visits"] == {}
    assert set(written["arms"]) == {"ar", "verify", "w4_draft"}
    assert set(written["conditions"]["drafter_flops_per_s"]) == {"w4"}
    assert written["conditions"]["config"]["bench"]["batches"] == [1, 4]
    assert written["conditions"]["ways_of_sampling"]["topp_topk"] == {"top_p": 0.95, "top_k": 50}


@pytest.mark.slow
def test_the_table_shows_every_line_ratio_and_what_was_left_out(written: dict[str, Any]) -> None:
    shown = steps_table(written)
    for name in written["ratios"]:
        assert f"\n{name} " in shown
    assert shown.count("w4_draft ") >= 4
    assert "left out: batch 4 at 4096" in shown
    assert "no drop of tokens/s" in steps_table({**written, "cliffs": []})
    cut = steps_table({**written, "cliffs": [], "too_few_visits": {"b4_c64_": 1}})
    assert "visited too seldom, cliffs among them unknown: b4_c64_\n" in cut
    assert "no drop" not in cut
    cliff = asdict(find_cliffs([point(1, 128, 100, 100), point(2, 128, 50, 100)])[0])
    assert "cliff over batch: batch 1 to 2, context 128: 50% fewer" in steps_table(
        {**written, "cliffs": [cliff]}
    )
