"""The prepared check of a CUDA machine: its own logic, on the CPU. What it finds there is not tested here."""

import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from drafters.config import DrafterConfig
from drafters.types import DraftError
from rollout.bench.device_costs import CostGrid, arms_of, break_even_acceptance, measure, random_decoder
from rollout.config import EngineConfig, PolicyConfig
from rollout.engine.native.build import build_engine
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.native.torch_forward.forward_graphs import EagerRecorder
from rollout.errors import ConfigError
from rollout.proof import device, device_paths
from rollout.proof.device import (
    CHECKS,
    DeviceFinding,
    check_chooser,
    check_int4,
    check_logits,
    check_noise,
    decoder_on,
    kernel_state,
    not_run,
)
from rollout.proof.device_paths import (
    PATH_CHECKS,
    check_flash_attention,
    check_recorded_forwards,
    leaves_others_untouched,
)
from rollout.testing import TinyPolicy, save_tiny_folder, tiny_policy

no_cuda_here = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).parents[3] / "scripts" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _record(module: ModuleType, out: Path, *options: str) -> tuple[int, Mapping[str, Any]]:
    code = module.main(["--out", str(out), *options])
    return code, json.loads(out.read_text())


@no_cuda_here
def test_without_a_device_nothing_is_claimed(gpu_check: ModuleType, tmp_path: Path) -> None:
    code, record = _record(gpu_check, tmp_path / "out.json")
    assert (code, record["exit_code"]) == (2, 2)
    assert set(record["parts"]) >= {*CHECKS, *PATH_CHECKS, "costs"}
    assert all(part["state"].startswith("not run: ") for part in record["parts"].values())
    assert all(part["passed"] is None for part in record["parts"].values())


@pytest.mark.slow
def test_on_the_cpu_every_part_runs_and_passes(gpu_check: ModuleType, tmp_path: Path) -> None:
    code, record = _record(gpu_check, tmp_path / "out.json", "--device", "cpu", "--tiny")
    assert code == 0
    for name in {*CHECKS, *PATH_CHECKS, "costs"} - {"flash_attention"}:
        assert record["parts"][name]["state"] == "ran", record["parts"][name]
    assert record["parts"]["flash_attention"]["state"] == "not run: flash-attn runs on CUDA, not on cpu"
    assert record["parts"]["speculation"]["facts"]["drafted_tokens"] > 0
    recorded = record["parts"]["recorded_forwards"]["facts"]
    # Nothing is recorded on a CPU, and the record says so.
    assert recorded["recorder"] == record["parts"]["costs"]["facts"]["recorder"] == "buckets run eagerly"
    assert recorded["others_untouched"] is True
    assert all(recorded["bits_of_the_same_buckets_run_eagerly"].values())
    speculation = record["parts"]["recorded_speculation"]["facts"]
    assert speculation["drafted_tokens"] > 0
    grid = CostGrid(batches=(1, 2), contexts=(32,), gammas=(1, 3))
    points = record["parts"]["costs"]["facts"]["points"]
    assert [(p["batch"], p["context_tokens"]) for p in points] == [(1, 32), (2, 32)]
    for point in points:
        assert min(point[f"{part}_{how}"] for part in ("ar", "draft") for how in ("ms", "recorded_ms")) > 0
        assert point["ar_recorded_over_plain"] == point["ar_recorded_ms"] / point["ar_ms"]
        assert [cost["gamma"] for cost in point["by_gamma"]] == list(grid.gammas)


def test_one_failed_check_is_the_verdict_and_none_made_is_no_verdict(gpu_check: ModuleType) -> None:
    passed = DeviceFinding(state="ran", passed=True)
    failed = DeviceFinding(state="ran", passed=False)
    reported = DeviceFinding(state="ran")
    assert gpu_check.verdict_of({"a": passed, "b": reported, "c": not_run("no")}) == 0
    assert gpu_check.verdict_of({"a": passed, "b": failed}) == 1
    assert gpu_check.verdict_of({"a": reported, "b": not_run("no")}) == 2


def _record_at(module: ModuleType, out: Path, *names: str) -> Any:
    findings = dict.fromkeys(names, not_run("the process ended before"))
    return module.Record(out=out, device="cpu", hardware="cpu", findings=findings)


def test_a_part_that_raises_has_failed_and_takes_nothing_with_it(
    gpu_check: ModuleType, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    seen: list[Mapping[str, Any]] = []

    def looked() -> DeviceFinding:
        seen.append(json.loads(out.read_text()))
        return DeviceFinding(state="ran", passed=True, facts={"on": torch.device("cpu")})

    def broken() -> DeviceFinding:
        raise AssertionError("no kernel image")

    record = _record_at(gpu_check, out, "first", "broken", "last")
    parts = {"first": looked, "broken": broken, "last": looked}
    assert gpu_check.examine(parts, record, until_s=math.inf) == 1
    first, last = seen
    # Whoever is killed within a part leaves a file that names it and holds what was found before.
    assert [first["parts"][name]["state"] for name in parts] == [
        "begun",
        *2 * ["not run: the process ended before"],
    ]
    assert [last["parts"][name]["state"] for name in parts] == [
        "ran",
        "failed: AssertionError: no kernel image",
        "begun",
    ]
    assert first["exit_code"] is last["exit_code"] is None
    whole = json.loads(out.read_text())
    assert whole["exit_code"] == 1
    assert [whole["parts"][name]["passed"] for name in parts] == [True, False, True]
    assert whole["parts"]["first"]["facts"] == {"on": "cpu"}
    assert "in broken" in whole["parts"]["broken"]["facts"]["traceback"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_no_part_begins_once_the_time_is_over(gpu_check: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    record = _record_at(gpu_check, out, "late")
    assert gpu_check.examine({"late": lambda: pytest.fail("begun")}, record, until_s=-math.inf) == 2
    assert json.loads(out.read_text())["parts"]["late"]["state"] == "not run: out of time"


def test_a_drafter_that_breaks_fails_the_costs_and_plain_ones_are_told(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gpu_check, "quantized", breaks)
    finding = gpu_check.costs("cpu", tiny=True, until_s=math.inf)
    assert (finding.state, finding.passed) == ("ran", False)
    assert finding.facts["draft"] == "failed: RuntimeError: no kernel image"
    assert [point["draft_ms"] for point in finding.facts["points"]] == [None, None]
    assert finding.facts["failed"] == []


def test_a_cost_that_cannot_be_measured_leaves_the_others(gpu_check: ModuleType) -> None:
    decoder = random_decoder(gpu_check.TINY, device="cpu", dtype=torch.float32, positions=40)
    grid = CostGrid(batches=(1,), contexts=(64, 16), gammas=(1,))
    table = measure(arms_of(decoder, None, None), grid, until_s=math.inf)
    assert [point.context_tokens for point in table.points] == [16]
    assert [name.split(":")[0] for name in table.failed] == ["batch 1, context 64"]
    late = measure(arms_of(decoder, None, None), grid, until_s=-math.inf)
    assert late.not_run == [f"batch 1, context {context}: out of time" for context in (64, 16)]
    assert late.points == late.failed == []


def test_only_a_kernel_that_is_not_there_is_not_run() -> None:
    def refused(cause: Exception) -> DraftError:
        error = DraftError("build refused")
        error.__cause__ = cause
        return error

    not_here = (NotImplementedError("no operator"), refused(ImportError("no library")))
    assert all(kernel_state(error).startswith("not run: ") for error in not_here)
    broken = (
        RuntimeError("no kernel image"),
        refused(RuntimeError("no kernel image")),
        DraftError("a shape"),
    )
    assert all(kernel_state(error).startswith("failed: ") for error in broken)


def test_a_forward_that_writes_beside_its_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_on(tiny_policy(layers=1), "cpu", torch.float32)
    recorded = decoder.with_fast_paths(decoder.attention, EagerRecorder())
    assert leaves_others_untouched(recorded)
    monkeypatch.setattr(TorchKV, "spare_page", 2)
    assert not leaves_others_untouched(recorded)


@pytest.mark.parametrize(("of", "check"), [(device, check_logits), (device_paths, check_recorded_forwards)])
def test_logits_that_are_no_numbers_do_not_pass(
    monkeypatch: pytest.MonkeyPatch, of: ModuleType, check: Callable[[str], DeviceFinding]
) -> None:
    def broken_on(
        policy: TinyPolicy, device: str, dtype: torch.dtype, *, exact: bool = False
    ) -> TorchDecoder:
        decoder = decoder_on(policy, device, dtype, exact=exact)
        if not exact:
            next(iter(decoder.weights.norms.values())).fill_(math.nan)
        return decoder

    monkeypatch.setattr(of, "decoder_on", broken_on)
    finding = check("cpu")
    assert finding.passed is False
    assert all(math.isnan(apart) for apart in finding.facts["worst"].values())


def test_flash_attn_that_is_not_there_is_not_run() -> None:
    finding = check_flash_attention("cpu")
    assert (finding.passed, finding.state[:9]) == (None, "not run: ")


def test_the_checks_pass_where_device_and_reference_are_one() -> None:
    for check in (check_noise, check_chooser):
        assert check("cpu").passed is True
    found = check_int4("cpu")
    assert found.passed is True, found
    # It is compared with something else: rounding to 4 bits would not agree to the last bit.
    assert set(found.facts) == {"int4", "int8", "dynamic_int8", "nf4"}
    if importlib.util.find_spec("bitsandbytes") is None:
        assert found.facts["nf4"].startswith("not run: DraftError: build refused: checked needs bitsandbytes")
    else:
        assert found.facts["nf4"]["largest_relative_difference"] > 0
    assert found.facts["int4"]["largest_relative_difference"] > 0


@pytest.mark.parametrize(
    ("gamma", "cost", "expected"),
    [(1, 1.5, 0.5), (2, 1.75, 0.5), (3, 4.0, 1.0), (4, 0.9, 0.0), (2, 3.1, None)],
)
def test_break_even_is_where_tokens_are_worth_their_cost(
    gamma: int, cost: float, expected: float | None
) -> None:
    found = break_even_acceptance(gamma, cost_over_ar=cost)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-9))


@no_cuda_here
@pytest.mark.parametrize(("device", "fault"), [("cuda", "sees no CUDA device"), ("gpu", "is no device")])
def test_a_device_that_is_not_there_is_refused_by_name(tmp_path: Path, device: str, fault: str) -> None:
    save_tiny_folder(tmp_path)
    config = EngineConfig(device=device, max_batch=1, max_context_tokens=32)
    with pytest.raises(ConfigError, match=fault):
        build_engine(PolicyConfig(source=str(tmp_path)), config, DrafterConfig(names=()))


@pytest.mark.slow
def test_fast_numerics_are_never_called_exact_for_passing_the_check_by_luck(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path)
    traits = {}
    for numerics in ("auto", "fast"):
        config = EngineConfig(
            decoder="torch", dtype="float32", numerics=numerics, max_batch=1, max_context_tokens=32
        )
        engine = build_engine(PolicyConfig(source=str(tmp_path)), config, DrafterConfig(names=()))
        assert isinstance(engine._decoder, TorchDecoder)
        traits[numerics] = (engine.traits.numerics, engine._decoder.row_invariant)
    assert traits == {"auto": ("exact", True), "fast": ("fast", False)}
