"""Weights are kept once, from their file to their panels, and a host's peak is near what it has to hold."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafters.config import DrafterConfig
from drafters.registry import build, least_loops, names_for, shallow_loops
from drafters.w4 import W4Drafter
from rollout.bench import memory
from rollout.bench.machine import commit
from rollout.bench.memory import LARGEST_RATIO, MemoryUse, MemoryWork, memory_of_child
from rollout.bench.result import SCHEMA
from rollout.config import EngineConfig, PolicyConfig
from rollout.engine.native.compiled_forward.decoder import compiled_unavailable
from rollout.errors import UnsupportedError
from rollout.policy.embedded import embedded_folder
from rollout.policy.stored import SelectedTensors, StoredTensors
from rollout.testing import tiny_looped_policy, tiny_policy
from rollout.testing_native import ar_plan, requests_for, tiny_engine

needs_kernels = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))


@needs_kernels
def test_a_tied_policy_keeps_its_embedding_once() -> None:
    policy = tiny_policy(family="smollm2")
    assert policy.spec.tie_embeddings
    engine = tiny_engine(policy, compiled=True)
    norms = sum(t.numel() for n, t in policy.state.items() if t.dim() == 1)
    matrices = sum(t.numel() for n, t in policy.state.items() if t.dim() == 2)
    # bf16 matrices and float32 norms: no second copy of anything.
    assert engine.memory().weights == 2 * matrices + 4 * norms
    decoder, ids = engine._decoder, torch.tensor([0, 5, 17, 47], dtype=torch.int32)
    assert torch.equal(decoder.embed(ids), policy.state["model.embed_tokens.weight"][ids.long()].float())


@needs_kernels
def test_memory_tells_the_pages_in_use_and_the_scratch_of_the_widest_forward() -> None:
    engine = tiny_engine(tiny_policy(family="smollm2"), compiled=True)
    assert (engine.memory().kv_used, engine.memory().scratch) == (0, 0)
    for request in requests_for(vocab=48, prompts=2):
        engine.add(request)
    engine.run_round(ar_plan(engine.load()))
    used = engine.memory()
    assert used.kv_used == engine.gauges()["engine/kv_pages_used"] * engine._state.storage.bytes_per_page > 0
    assert used.scratch > 0
    assert used.drafters == 0


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_kernels), False])
def test_every_weight_of_a_looped_policy_is_counted_once_whoever_reads_it(compiled: bool) -> None:
    """Its loops are one block, and its drafters' loops and heads are its own; ``w4`` alone keeps a copy."""
    policy = tiny_looped_policy()
    w4 = W4Drafter(DrafterConfig(w4_head_bits=16))
    shared = [build(name, DrafterConfig()) for name in names_for(4) if name != "w4"]
    engine = tiny_engine(policy, [w4, *shared], compiled=compiled)
    memory = engine.memory()
    if compiled:
        # The vocabulary and every size are whole panels; what has one dimension, and the gate, is float32.
        sizes = {
            n: t.numel() * (2 if t.dim() == 2 and t.shape[0] > 1 else 4) for n, t in policy.state.items()
        }
        assert memory.weights == sum(sizes.values())
    else:
        assert memory.weights == 8 * sum(t.numel() for t in policy.state.values())
    assert {d.name: d.held_bytes for d in shared} == dict.fromkeys([d.name for d in shared], 0)
    assert memory.drafters == w4.held_bytes == sum(linear.weight_bytes for linear in w4.linears.values())
    assert all(d.weight_bytes > 0 for d in shared if least_loops(d.name) > 1), "their passes do read"


@needs_kernels
def test_scratch_that_drafters_share_with_the_policy_is_counted_once() -> None:
    policy = tiny_looped_policy()
    scratch = []
    for names in ((), shallow_loops(4)):
        engine = tiny_engine(policy, [build(name, DrafterConfig()) for name in names], compiled=True)
        for request in requests_for(vocab=48, prompts=2):
            engine.add(request)
        engine.run_round(ar_plan(engine.load()))
        scratch.append(engine.memory().scratch)
    assert scratch[0] == scratch[1] > 0


def test_stored_tensors_are_read_when_asked_for_and_let_go(tmp_path: Path) -> None:
    first, second = {"a": torch.arange(4.0)}, {"b": torch.ones(2, 3), "c": torch.zeros(1)}
    save_file(first, tmp_path / "1.safetensors")
    save_file(second, tmp_path / "2.safetensors")
    stored = StoredTensors([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])
    assert set(stored) == {"a", "b", "c"}
    assert len(stored) == 3
    assert "b" in stored
    assert "d" not in stored
    assert torch.equal(stored["a"], first["a"])
    chosen = SelectedTensors(stored, ["c", "a"], torch.bfloat16)
    assert list(chosen) == ["c", "a"]
    assert chosen["a"].dtype == torch.bfloat16
    with pytest.raises(KeyError):
        chosen["b"]


def test_a_file_that_changes_while_a_policy_is_read_from_it_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "1.safetensors"
    save_file({"a": torch.arange(4.0)}, file)
    stored = StoredTensors([file])
    save_file({"a": torch.arange(8.0)}, file)
    with pytest.raises(UnsupportedError, match=r"1\.safetensors was changed"):
        stored["a"]


def test_one_ratio_is_of_the_whole_peak_and_one_of_what_lies_beyond_the_baseline() -> None:
    use = MemoryUse(baseline=100, ready=220, peak=280, weights=80, drafters=40, kv_in_use=30, scratch=10)
    assert use.held == 150
    assert use.peak_over_held == pytest.approx(280 / 150)
    assert use.peak_beyond_baseline_over_held == pytest.approx(1.2)
    assert "the same beyond the baseline: 1.20 (<= 1.25: met)" in use.lines()
    over = replace(use, peak=290)
    assert "1.27 (<= 1.25: missed)" in over.lines()


def test_what_is_printed_says_commit_and_conditions_as_other_results_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use = MemoryUse(baseline=100, ready=220, peak=280, weights=80, drafters=40, kv_in_use=30, scratch=10)
    monkeypatch.setattr(memory, "memory_of_child", lambda *_: use)
    assert memory.main(["--policy", "some/folder", "--batch", "3"]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert printed.err == use.lines()
    assert (told["schema"], told["workload"], told["most"]) == (SCHEMA, "memory", LARGEST_RATIO)
    assert (told["peak"], told["baseline"], told["held"], told["work"]["batch"]) == (280, 100, 150, 3)
    assert told["peak_over_held"] == pytest.approx(280 / 150)
    assert told["peak_beyond_baseline_over_held"] == told["ratio"] == pytest.approx(1.2)
    conditions = told["conditions"]
    assert conditions["commit"] == commit()
    assert conditions["machine"]["cores_usable"] >= 1
    assert conditions["versions"]["torch"]
    assert conditions["config"]["policy"]["source"] == "some/folder"
    assert conditions["config"]["engine"]["max_batch"] == 3
    assert conditions["config"]["drafter"]["names"] == ["w4"]


@pytest.mark.slow
@needs_kernels
def test_a_host_of_the_embedded_policy_peaks_near_what_it_has_to_hold() -> None:
    embedded_folder()  # converting it, where nobody has, is no part of serving it
    work = MemoryWork()
    use = memory_of_child(
        PolicyConfig(),
        EngineConfig(max_batch=work.batch, max_context_tokens=work.prompt_tokens + work.new_tokens + 1),
        DrafterConfig(names=("w4",)),
        work,
    )
    assert use.baseline < use.ready < use.peak
    assert use.weights == pytest.approx(269e6, rel=0.01)
    assert use.drafters > 0.3 * use.weights
    assert use.kv_in_use > 50e6
    assert use.peak_beyond_baseline_over_held <= LARGEST_RATIO
