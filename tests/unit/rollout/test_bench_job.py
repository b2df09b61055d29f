"""``taildraft bench``: what it refuses, and the JSON it writes about a tiny policy."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from controller.testing import W4_ONLY, SimulatedMachine
from controller.trust import Quality
from drafters.kernels.build import instruction_sets
from drafters.kernels.processor import processor
from rollout.bench.book import told
from rollout.bench.bound import Peaks
from rollout.bench.cell import Cell
from rollout.bench.fixed import fixed_cells
from rollout.bench.grids import chosen_arms, open_grid, resolved_engine
from rollout.bench.pairing import Timed
from rollout.bench.prompts import PROMPTS, prompt_ids
from rollout.bench.result import result, table
from rollout.config import EngineConfig, PolicyConfig
from rollout.errors import ConfigError
from rollout.job_config import BenchConfig, JobConfig
from rollout.jobs.bench import main
from rollout.settings import load_config
from rollout.testing import char_tokenizer, save_tiny_folder

TORCH = EngineConfig(decoder="torch", dtype="float32", threads=1, max_batch=4, max_context_tokens=128)
COMPILED = replace(TORCH, decoder="compiled", dtype="bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("policy")
    save_tiny_folder(path)
    return path


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One small drain of two rows on both grids, with every arm that needs no calibration."""
    out = tmp_path_factory.mktemp("out") / "new" / "drain.json"
    bench = BenchConfig(
        out=str(out),
        arms=("ar", "w4", "history", "hf"),
        laws=("trace",),
        prompts=2,
        cap_tokens=12,
        trace_median_tokens=6.0,
        gamma=2,
        min_pairs=2,
        max_pairs=2,
    )
    job = JobConfig(policy=PolicyConfig(source=str(folder)), engine=COMPILED, bench=bench)
    assert main(job) == 0
    data: dict[str, Any] = json.loads(out.read_text())
    assert [p.name for p in out.parent.iterdir()] == ["drain.json"]
    return data


def test_arms_and_ratios_are_named_by_law_and_grid(written: dict[str, Any]) -> None:
    ours = [f"trace_{grid}{arm}" for grid in ("", "offgrid_") for arm in ("ar", "w4", "history")]
    assert set(written["arms"]) == {*ours, "trace_hf"}
    assert set(written["ratios"]) == {
        "trace_w4_over_ar",
        "trace_history_over_ar",
        "trace_ar_over_hf",
        "trace_offgrid_w4_over_ar",
        "trace_offgrid_history_over_ar",
    }


def test_ratios_say_median_least_most_and_interval_of_their_pairs(written: dict[str, Any]) -> None:
    for name, ratio in written["ratios"].items():
        values = ratio["values"]
        assert ratio["pairs"] == len(values) <= 2
        assert ratio["dropped"] == len(written["dropped_pairs"].get(name, []))
        if values:
            assert ratio["median"] == statistics.median(values)
            assert (ratio["min"], ratio["max"]) == (min(values), max(values))
        if len(values) == 2:
            assert ratio["ci90"][0] <= ratio["min"] <= ratio["max"] <= ratio["ci90"][1]


def test_every_counted_run_of_ours_had_the_same_text(written: dict[str, Any]) -> None:
    for name, arm in written["arms"].items():
        assert len(arm["makespan_s"]) >= 2
        assert all(seconds > 0 for seconds in arm["makespan_s"])
        if name != "trace_hf":
            assert arm["identical_texts"] >= len(arm["makespan_s"])
            assert arm["watchdog_alarms"] == arm["draft_failures"] == 0


def test_rounds_and_time_are_told_by_drafter_and_gamma(written: dict[str, Any]) -> None:
    w4 = written["arms"]["trace_w4"]
    assert w4["gamma"] == 2
    assert {"prefill", "w4/2"} <= set(w4["rounds"])
    assert set(written["arms"]["trace_ar"]["rounds"]) == {"prefill", "ar"}
    tokens = sum(choice["tokens"] for choice in w4["rounds"].values())
    assert tokens == w4["tokens"] * len(w4["makespan_s"])


def test_acceptance_is_told_by_drafter_and_position_on_both_grids(written: dict[str, Any]) -> None:
    for arm in ("trace_w4", "trace_offgrid_w4"):
        w4 = written["acceptance"][arm]["w4"]
        assert 0 < w4["rate"] <= 1
        assert [p["position"] for p in w4["by_position"]] == [0, 1]
        assert w4["by_position"][0]["rate"] >= w4["by_position"][1]["rate"]


def test_lengths_rows_at_the_cap_and_the_tails_share_are_shown(written: dict[str, Any]) -> None:
    lengths = written["lengths"]["trace_"]
    assert len(lengths["lengths"]) == 2
    assert max(lengths["lengths"]) <= 12
    assert lengths["rows_at_cap"] == sum(n == 12 for n in lengths["lengths"])
    ar = written["ar"]["trace_"]
    shares = ar["time_share_at_batch_at_most"]
    assert 0 < shares["2"] <= shares["4"] == shares["8"] < 1
    assert {point["batch"] for point in ar["by_batch"]} <= {1, 2}
    assert all(point["bound_frac"] > 0 for point in ar["by_batch"])


def test_goals_say_their_lower_end_and_verdict(written: dict[str, Any]) -> None:
    (goal,) = written["goals"]
    assert (goal["name"], goal["at_least"]) == ("trace_ar_over_hf", 3.0)
    assert goal["verdict"] in ("met", "not met", "undecided")
    undecided = {entry["name"] for entry in written["undecided"]}
    assert goal["verdict"] != "undecided" or goal["name"] in undecided


def test_conditions_tell_what_auto_was_told_of_the_machine_and_how_far_to_trust_it() -> None:
    found = SimulatedMachine(shapes=W4_ONLY).calibration()
    quality = Quality(verdict="provisional", reason="others took 40% of the processor")
    said = json.loads(json.dumps(told(replace(found, quality=quality, taken_utc="2026-01-02T03:04:05Z"))))
    assert said["taken_utc"] == "2026-01-02T03:04:05Z"
    assert (said["quality"]["verdict"], said["quality"]["reason"]) == (quality.verdict, quality.reason)
    for name, part in found.parts.items():
        assert said["parts"][name]["bandwidth_bytes_per_s"] == part.bandwidth_bytes_per_s
        assert said["parts"][name]["flops_per_s"] == part.flops_per_s


def test_conditions_name_machine_versions_threads_and_settings(written: dict[str, Any]) -> None:
    conditions = written["conditions"]
    assert conditions["threads"] == 1
    machine = conditions["machine"]
    assert 1 <= machine["cores_usable"] <= machine["processors"]
    assert machine["processor"] == processor().words
    assert machine["processor"].startswith(machine["cpu"])
    assert machine["kernel_instruction_sets"] == list(instruction_sets())
    assert {"cpu_family", "cpu_model", "cpu_stepping", "l2_bytes", "l3_bytes"} <= set(machine)
    assert conditions["versions"]["torch"]
    assert conditions["config"]["bench"]["cap_tokens"] == 12
    assert conditions["config"]["engine"]["prefix_cache"] is False
    assert "output_dir" not in conditions["config"]
    assert conditions["hf_dtype"] in ("float32", "bfloat16")
    assert conditions["offgrid_perplexity"]["ratio"] > 0
    assert set(conditions["policies"]) == {"on", "off"}
    assert conditions["policies"]["on"]["weights"] != conditions["policies"]["off"]["weights"]
    assert conditions["calibrations"] == {"on": None, "off": None}
    assert all(speed > 0 for speed in conditions["memory_read"]["bytes_per_s"])
    assert all(rate > 0 for rate in conditions["kernel_flops_per_s"])
    assert written["complete"] is True


def test_the_table_names_every_arm_and_ratio(written: dict[str, Any]) -> None:
    shown = table(written)
    for name in (*written["arms"], *written["ratios"]):
        assert f"\n{name} " in f"\n{shown}"


def test_a_workload_that_does_not_exist_is_refused_by_name() -> None:
    known = "'drain', 'fixed', 'steps', 'peers'"
    with pytest.raises(ConfigError, match=rf"bench.workload: expected one of {known}, got 'sprint'"):
        load_config({"workload": "sprint"}, BenchConfig, path="bench")


@pytest.mark.parametrize(
    ("bench", "said"),
    [
        (
            BenchConfig(arms=("ar", "eagle")),
            "no arm eagle in workload drain; there are: ar, w4, history, auto, hf",
        ),
        (BenchConfig(workload="fixed", arms=("ar", "hf")), "no arm hf in workload fixed"),
        (BenchConfig(workload="steps", arms=("ar", "history")), "steps; there are: ar, w4"),
        (BenchConfig(workload="peers", arms=("ar", "w4")), "peers; there are: ar, hf, vllm, vllm_ngram"),
    ],
)
def test_an_arm_that_does_not_exist_is_refused_by_name(bench: BenchConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen_arms(JobConfig(bench=bench))


def test_the_arms_of_a_workload_are_all_but_free_drafts_at_fixed_lengths() -> None:
    assert chosen_arms(JobConfig()) == ("ar", "w4", "history", "auto", "hf")
    assert chosen_arms(JobConfig(bench=BenchConfig(workload="fixed"))) == ("ar", "w4", "auto")
    assert chosen_arms(JobConfig(bench=BenchConfig(arms=("auto", "ar")))) == ("ar", "auto")
    assert chosen_arms(JobConfig(bench=BenchConfig(workload="steps"))) == ("ar", "w4")
    assert chosen_arms(JobConfig(bench=BenchConfig(workload="peers"))) == ("ar", "hf", "vllm", "vllm_ngram")


def test_each_workload_has_its_own_batches_unless_some_are_named() -> None:
    assert BenchConfig(workload="steps").batches_run == (1, 2, 4, 8, 16, 32, 64)
    assert BenchConfig(workload="peers").batches_run == (1, 4, 16, 32)
    assert BenchConfig(workload="peers", batches=(2, 3)).batches_run == (2, 3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"arms": ("auto",)}, "bench.arms must include 'ar'"),
        ({"laws": ()}, "bench.laws must name something"),
        ({"grids": ("on", "on")}, "bench.grids must name something, each once"),
        ({"min_pairs": 1}, "bench.min_pairs must be >= 2"),
        ({"batches": (4, 4)}, "bench.batches must name something, each once"),
        ({"contexts": ()}, "bench.contexts must name something"),
        ({"step_gammas": (0,)}, "bench.step_gammas"),
        ({"max_verify_rows": 0}, "bench.max_verify_rows must be >= 1"),
        ({"max_minutes": -1.0}, "bench.max_minutes"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BenchConfig(**settings)


def fixed_cells_of(folder: Path, which: Literal["on", "off"]) -> list[Cell]:
    bench = BenchConfig(workload="fixed", arms=("ar", "w4"), batches=(1, 2, 4, 8), fixed_tokens=4)
    engine = replace(COMPILED, max_batch=8)
    job = JobConfig(policy=PolicyConfig(source=str(folder)), engine=engine, bench=bench)
    grid = open_grid(job, engine, which)
    cells = fixed_cells(job, [grid], bench.arms)
    grid.arms.close()
    return cells


def test_w4_on_grid_is_held_to_two_goals_at_small_batches_and_each_is_judged(folder: Path) -> None:
    on, off = fixed_cells_of(folder, "on"), fixed_cells_of(folder, "off")
    assert {name: goal for cell in on for name, goal in cell.ratios[0].claim.goals.items()} == {
        "fixed_b1_w4_over_ar": 1.4,
        "fixed_b1_w4_over_ar_strict": 1.7,
        "fixed_b2_w4_over_ar": 1.25,
        "fixed_b2_w4_over_ar_strict": 1.5,
        "fixed_b4_w4_over_ar_strict": 1.3,
    }
    assert not any(cell.ratios[0].claim.goals for cell in off)
    for cell, found in ((on[1], (1.41, 1.42, 1.43)), (on[2], (1.25, 1.29, 1.35))):
        for ratio in found:
            cell.ratios[0].add(Timed(makespan_s=1.0, pace_s=1.0), Timed(makespan_s=ratio, pace_s=1.0))
    peaks = Peaks(read_bytes_per_s=1e9, flops_per_s=1e9)
    data = result(on, workload="fixed", conditions={}, peaks=peaks, ending="all pairs run")
    assert {goal["name"]: goal["verdict"] for goal in data["goals"]} == {
        "fixed_b1_w4_over_ar": "undecided",
        "fixed_b1_w4_over_ar_strict": "undecided",
        "fixed_b2_w4_over_ar": "met",
        "fixed_b2_w4_over_ar_strict": "not met",
        "fixed_b4_w4_over_ar_strict": "undecided",
    }
    undecided = [entry["name"] for entry in data["undecided"]]
    assert undecided[:2] == ["fixed_b1_w4_over_ar", "fixed_b1_w4_over_ar_strict"]
    assert not any(name.startswith("fixed_b2_") for name in undecided)
    assert "fixed_b4_w4_over_ar_strict" in undecided
    assert ">= 1.25: met  >= 1.5: not met" in table(data)


def test_what_gives_other_texts_cannot_be_compared(folder: Path) -> None:
    job = JobConfig(policy=PolicyConfig(source=str(folder)), engine=TORCH)
    with pytest.raises(ConfigError, match=r"engine\.verify=block"):
        resolved_engine(replace(job, engine=replace(TORCH, verify="block")), rows=4)
    with pytest.raises(ConfigError, match=r"engine\.max_batch must be >= 5"):
        resolved_engine(job, rows=5)
    with pytest.raises(ConfigError, match="not exact"):
        open_grid(job, replace(TORCH, numerics="fast"), "on")


def test_rows_that_would_hit_the_context_are_refused(folder: Path) -> None:
    bench = BenchConfig(arms=("ar",), prompts=1, cap_tokens=500, out="unused.json")
    job = JobConfig(policy=PolicyConfig(source=str(folder)), engine=TORCH, bench=bench)
    with pytest.raises(ConfigError, match="exceed the context of 128"):
        main(job)


def test_there_are_thirty_two_different_prompts() -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 32
    assert all(text.isascii() for text in PROMPTS)
    with pytest.raises(ConfigError, match="33 sequences wanted"):
        prompt_ids(char_tokenizer(), 33)
    with pytest.raises(ConfigError, match="chat template"):
        prompt_ids(None, 1)
