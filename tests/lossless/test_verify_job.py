"""``taildraft verify``: what it compares, what it says, and its exit code."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from rollout.cli import MISUSED
from rollout.cli import main as cli
from rollout.config import EngineConfig, PolicyConfig, ServiceConfig
from rollout.job_config import JobConfig, VerifyConfig
from rollout.jobs import verify
from rollout.proof import faults
from rollout.proof.budget import LEAST_TOKENS, PricedArm, affordable_tokens
from rollout.proof.compare import first_difference
from rollout.proof.margin import choice_margin
from rollout.proof.steering import Steering, drive
from rollout.testing import save_tiny_folder, tiny_policy
from rollout.testing_native import ar_plan, requests_for, run_engine, tiny_engine
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save_tiny_folder(path, "smollm2")
    return path


def job_of(folder: Path, tmp_path: Path, **settings: Any) -> JobConfig:
    return JobConfig(
        policy=PolicyConfig(source=str(folder)),
        engine=EngineConfig(threads=1),
        service=ServiceConfig(host_cpus=0.1, object_store_bytes=150 << 20),
        verify=VerifyConfig(out=str(tmp_path / "verify.json"), cut=True, **settings),
        output_dir=str(tmp_path),
    )


def record_of(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "verify.json").read_text())


def test_the_cut_version_proves_a_policy_and_writes_down_what_it_did(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main(job_of(folder, tmp_path, hosts=(), parts=("coupled", "equality"))) == 0
    record = record_of(tmp_path)
    assert record["verdict"] == "proven"
    names = [f["name"] for f in record["findings"] if f["part"] == "equality"]
    for wanted in (
        "plain, each request alone",
        "plain, batch 4",
        "w4 gamma 1",
        "w4 gamma 8",
        "history gamma 3",
        "at random by sequence and round",
        "controller on",
        "prompts in chunks",
        "no prompt page shared",
        "kernel threads: 2",
        "preemption",
    ):
        assert [n for n in names if wanted in n], wanted
    assert all(f["passed"] for f in record["findings"])
    assert record["exact_over_fast"]["ratio"] > 0
    assert record["conditions"]["config"]["verify"]["cut"] is True
    told = capsys.readouterr()
    assert told.out.startswith("proven")
    assert len([line for line in told.err.splitlines() if line.startswith("ok")]) == len(record["findings"])


def test_a_difference_is_exit_code_one_and_shown_with_its_margin(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(folder, tmp_path, hosts=(), parts=("equality",), drafters=("w4",), gammas=(3,))
    with faults.keys_one_off():
        assert verify.main(job) == 1
    record = record_of(tmp_path)
    assert record["verdict"] == "different"
    difference = next(f["difference"] for f in record["findings"] if f["difference"])
    assert difference["margin"] is not None
    assert difference["expected_logprobs"] != difference["found_logprobs"]
    assert difference["position"] >= difference["index"] > 0
    assert "margin" in capsys.readouterr().out


@pytest.fixture
def no_ray_left() -> Iterator[None]:
    known = ray.is_initialized()
    yield
    if not known:
        ray.shutdown()


@pytest.mark.ray
def test_two_hosts_give_the_text_of_the_engine_in_this_process(
    folder: Path, tmp_path: Path, no_ray_left: None
) -> None:
    job = job_of(
        folder, tmp_path, parts=("equality",), drafters=("w4",), gammas=(3,), batches=(4,), hosts=(2,)
    )
    assert verify.main(job) == 0
    served = record_of(tmp_path)["findings"][-1]
    assert served["name"] == "through the service, 2 hosts"
    assert "fingerprint the reference's" in served["detail"]
    assert re.search(r"; [1-9]\d* tokens drafted;", served["detail"]), served["detail"]


@pytest.mark.parametrize(
    "wrong",
    [
        "parts=[nothing]",
        "gammas=[0]",
        "batches=[]",
        "limit_s=0",
        "hosts=[-1]",
        "no_such_setting=1",
        "policy.source=/no/such/folder",
        "drafters=[nobody]",
        "gammas=[99]",
    ],
)
def test_wrong_settings_are_exit_code_two(
    wrong: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [] if wrong.startswith("policy") else [f"policy.source={folder}"]
    known = [f"output_dir={tmp_path}/run", "verify.parts=[equality]", "verify.hosts=[]"]
    name = wrong.split("=")[0]
    known = [k for k in known if k.split("=")[0].removeprefix("verify.") != name]
    assert cli(["verify", *source, *known, wrong]) == MISUSED
    assert name.split(".")[-1] in capsys.readouterr().err


# ---- its parts ------------------------------------------------------------------------------------


def some_run() -> tuple[list[Request], dict[tuple[str, int], Completion]]:
    requests = requests_for(vocab=48, prompts=3, params=(SamplingParams(max_tokens=6, ignore_eos=True),))
    return requests, run_engine(tiny_engine(tiny_policy(), compiled=True), requests, ar_plan)


def test_the_first_difference_is_found_whatever_it_is() -> None:
    requests, expected = some_run()
    key = requests[1].key
    whole = expected[key]
    assert first_difference(requests, expected, dict(expected)) is None
    tokens = whole.tokens
    other_id = replace(tokens[2], token_id=(tokens[2].token_id + 1) % 48)
    changed = {
        "token": replace(whole, tokens=(*tokens[:2], other_id, *tokens[3:])),
        "length": replace(whole, tokens=tokens[:4]),
        "finish": replace(whole, finish_reason="stop"),
        "text": replace(whole, text="else"),
    }
    for kind, completion in changed.items():
        difference = first_difference(requests, expected, {**expected, key: completion})
        assert difference is not None
        assert difference.kind == kind
        assert kind in difference.line()
        assert (difference.prompt_uid, difference.sample_index) == key


def test_logprobs_that_differ_in_a_bit_are_a_difference() -> None:
    requests, expected = some_run()
    key = requests[0].key
    whole = expected[key]
    for index, token in enumerate(whole.tokens):
        assert token.kept_logmass == 0.0
        minus_zero = replace(token, kept_logmass=-0.0)
        tokens = (*whole.tokens[:index], minus_zero, *whole.tokens[index + 1 :])
        found = {**expected, key: replace(whole, tokens=tokens)}
        difference = first_difference(requests, expected, found)
        assert difference is not None
        assert (difference.kind, difference.index) == ("logprobs", index)
        assert difference.position == len(requests[0].prompt_ids) + index


def test_the_margin_is_the_lead_of_the_token_that_was_chosen() -> None:
    params = (
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.0),
        SamplingParams(max_tokens=12, temperature=0.6, frequency_penalty=0.5),
    )
    requests = requests_for(vocab=48, prompts=6, params=params, seed=1)
    engine = tiny_engine(tiny_policy())
    for request in requests:
        ids = run_engine(engine, [request], ar_plan)[request.key].token_ids
        for at, chosen in enumerate(ids):
            logits_V = engine.logits_after([*request.prompt_ids, *ids[:at]])
            assert choice_margin(logits_V, request, ids[:at], chosen=chosen) > 0
            other = (chosen + 1) % 48
            assert choice_margin(logits_V, request, ids[:at], chosen=other) < 0


def test_no_more_than_the_batch_is_ever_in_the_engine() -> None:
    requests = requests_for(vocab=48, prompts=7, params=(SamplingParams(max_tokens=5),))
    engine = tiny_engine(tiny_policy(), compiled=True)
    seen: list[int] = []
    steering = Steering(plan=ar_plan, observe=lambda facts: seen.append(engine.running))
    run = drive(engine, requests, steering, batch=2)
    assert len(run.completions) == 7
    assert max(seen) <= 2


def test_texts_are_as_long_as_the_time_allows() -> None:
    engine = tiny_engine(tiny_policy(), compiled=True)
    arms = [PricedArm(batch=8, drafter="ar", gamma=0)] * 3
    assert affordable_tokens(engine, arms, requests=64, within_s=1e-6, most=50) == LEAST_TOKENS
    assert affordable_tokens(engine, arms, requests=64, within_s=1e6, most=50) == 50
