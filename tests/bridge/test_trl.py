"""TRL's real trainer on a tiny policy, its rollouts from a real engine with real drafts."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.errors import ConfigError, WeightUpdateError
from rollout.job_config import JobConfig
from rollout.testing import EOS_ID, save_tiny_folder
from rollout.testing_native import fixed_plan, tiny_engine
from rollout.tracking.jsonl import JsonlTracker, read_jsonl
from trainers_bridge.config import TrainerConfig
from trainers_bridge.contract import PolicyPushError, UnreproducibleSamplingError
from trainers_bridge.rollouts import TrainerRollouts
from trainers_bridge.testing import EngineClient
from trainers_bridge.trl import earlier_run, make_rollout_func, run, settings_of, trainer_args

pytestmark = [pytest.mark.trl]

MESSAGES = [{"role": "user", "content": "say a"}]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(kw_only=True)
class Setup:
    """A trainer, the engine it draws from, and everything in between."""

    trainer: Any
    client: EngineClient
    rollouts: TrainerRollouts
    tokenizer: Any
    rewarded: list[dict[str, Any]]
    folder: Path
    handed: list[dict[str, Any]] = field(default_factory=list)


def _client(policy: Any) -> EngineClient:
    config = EngineConfig(max_batch=8, max_context_tokens=128, dtype="float32")
    engine: NativeEngine = tiny_engine(
        policy, [build("history", DrafterConfig())], dtype=torch.float32, config=config
    )
    return EngineClient(engine, fixed_plan("history", 3))


def _setup(tmp_path: Path, prompts: list[Any], **settings: Any) -> Setup:
    config = TrainerConfig(
        **{
            "steps": 3,
            "prompts_per_step": 2,
            "num_generations": 4,
            "max_new_tokens": 12,
            "learning_rate": 1e-2,
            "mismatch_samples": 8,
            **settings,
        }
    )
    policy = save_tiny_folder(tmp_path / "policy", "smollm2")
    client = _client(policy)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    rollouts = make_rollout_func(client, tokenizer, config, JsonlTracker(tmp_path / "run", run_id="r"))
    rewarded: list[dict[str, Any]] = []

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        rewarded.append({"completions": completions, **kwargs})
        return [str(c).count("a") / 10 for c in completions]

    made = Setup(
        trainer=None,
        client=client,
        rollouts=rollouts,
        tokenizer=tokenizer,
        rewarded=rewarded,
        folder=tmp_path / "run",
    )

    def recorded(asked: list[Any], trainer: Any) -> dict[str, Any]:
        output = rollouts(asked, trainer)
        made.handed.append({"prompts": asked, **output})
        return output

    made.trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trainer_args(config, folder=tmp_path),
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
        processing_class=tokenizer,
        rollout_func=recorded,
    )
    made.trainer.model.train()  # TRL files metrics by the model's mode
    return made


def test_three_steps_hand_over_exact_ids_in_order_and_push_once_per_step(tmp_path: Path) -> None:
    """A36: also ids that another tokenisation of their text would change."""
    prompts = [MESSAGES, [{"role": "user", "content": "say b"}], MESSAGES]
    made = _setup(tmp_path, prompts, max_new_tokens=24, temperature=2.0)
    made.trainer.train()
    assert made.client.versions == [1, 2, 3], "one push per trainer step, none in between"
    taken = iter(made.client.completions)
    for handed, requests in zip(made.handed, made.client.requests, strict=True):
        assert len(handed["prompts"]) == len(handed["completion_ids"]) == 8
        for i, request in enumerate(requests):
            completion = next(taken)
            assert handed["completion_ids"][i] == list(completion.token_ids)
            assert handed["logprobs"][i] == [t.scaled_logprob for t in completion.tokens]
            assert handed["prompt_ids"][i] == list(request.prompt_ids)
            rendered = made.tokenizer.apply_chat_template(
                handed["prompts"][i], add_generation_prompt=True, tokenize=False
            )
            assert made.tokenizer.decode(request.prompt_ids) == rendered
            if completion.finish_reason == "stop":
                assert completion.token_ids[-1] == EOS_ID
    keys = [r.key for batch in made.client.requests for r in batch]
    seeds = [r.seed for batch in made.client.requests for r in batch]
    assert all(len({r.key for r in batch}) == 8 for batch in made.client.requests)
    assert len(set(seeds)) == 24
    assert len({uid for uid, _ in keys}) == 2, "equal prompts have one name, so their pages are shared"
    stopped = {c.finish_reason for c in made.client.completions}
    assert stopped == {"stop", "length"}, "the policy was to end some samples itself and be cut at others"
    drafted = sum(c.provenance.drafted for c in made.client.completions if c.provenance)
    assert drafted > 0
    texts = [made.tokenizer.decode(c.token_ids) for c in made.client.completions]
    again = [tuple(made.tokenizer(text)["input_ids"]) for text in texts]
    differing = sum(a != c.token_ids for a, c in zip(again, made.client.completions, strict=True))
    assert differing > 0, "some ids do not survive a trip through text, and were handed over all the same"


def test_rewards_see_the_policy_version_and_what_drafts_did(tmp_path: Path) -> None:
    made = _setup(tmp_path, [MESSAGES], steps=2, prompts_per_step=1)
    made.trainer.train()
    assert [r["policy_version"] for r in made.rewarded] == [[1] * 4, [2] * 4]
    for call, handed in zip(made.rewarded, made.handed, strict=True):
        assert call["finish_reason"] == handed["finish_reason"]
        assert call["drafted_tokens"] == handed["drafted_tokens"]
        assert [list(ids) for ids in call["completion_ids"]] == handed["completion_ids"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_handed_logprobs_are_what_the_trainer_itself_recomputes(tmp_path: Path, temperature: float) -> None:
    made = _setup(tmp_path, [MESSAGES], steps=1, temperature=temperature)
    output = made.rollouts([MESSAGES] * 8, made.trainer)
    length = max(map(len, output["completion_ids"]))
    rows = [[*p, *c] for p, c in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
    width = len(output["prompt_ids"][0]) + length
    ids_BT = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    mask_BT = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])
    with torch.no_grad():
        own_BC, _, _ = made.trainer._get_per_token_logps_and_entropies(
            made.trainer.model, ids_BT, mask_BT, logits_to_keep=length
        )
    for own_C, handed in zip(own_BC.tolist(), output["logprobs"], strict=True):
        assert own_C[: len(handed)] == pytest.approx(handed, abs=1e-4)


def test_the_mismatch_with_unmoved_weights_is_rounding_and_is_logged(tmp_path: Path) -> None:
    made = _setup(tmp_path, [MESSAGES] * 2, steps=2)
    made.trainer.train()
    logged = [entry for entry in made.trainer.state.log_history if "trainer/mismatch_kl" in entry]
    assert len(logged) == 2
    for entry in logged:
        assert entry["trainer/mismatch_logprob_abs_max"] < 1e-4
        assert entry["trainer/mismatch_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert entry["rollout/spec_drafted_tokens"] > 0
        assert entry["rollout/kept_mass_mean"] == 1.0
    rounds = list(read_jsonl(made.folder, "rounds"))
    completions = list(read_jsonl(made.folder, "completions"))
    assert len(completions) == 16
    # A sample's first token is committed with its prompt, before it counts as a decode sequence.
    decoded = sum(sum(r["facts"]["outcomes"].get("committed", [])) for r in rounds)
    with_prompts = sum(r["facts"]["prefill_committed"] for r in rounds)
    delivered = sum(c["tokens"] for c in completions)
    assert with_prompts == len(completions)
    assert decoded + with_prompts == sum(entry["rollout/tokens"] for entry in logged) == delivered


def test_a_policy_that_moved_without_a_push_shows_as_mismatch(tmp_path: Path) -> None:
    made = _setup(tmp_path, [MESSAGES], steps=1)
    made.rollouts([MESSAGES] * 4, made.trainer)
    with torch.no_grad():
        for parameter in made.trainer.model.parameters():
            parameter.mul_(1.05)
    made.rollouts([MESSAGES] * 4, made.trainer)
    before, after = made.trainer._metrics["train"]["trainer/mismatch_logprob_abs_max"]
    assert before < 1e-4
    assert after > 1e-2
    assert made.client.versions == [1], "the step did not change, so nothing was pushed"


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.8), ("top_k", 5), ("min_p", 0.1), ("repetition_penalty", 1.2)]
)
def test_the_trainers_own_sampling_settings_are_refused_by_name(
    tmp_path: Path, name: str, value: float
) -> None:
    made = _setup(tmp_path, [MESSAGES], steps=1)
    setattr(made.trainer.args, name, value)
    with pytest.raises(UnreproducibleSamplingError, match=name):
        made.rollouts([MESSAGES], made.trainer)


def test_another_temperature_or_length_in_the_trainer_is_refused(tmp_path: Path) -> None:
    made = _setup(tmp_path, [MESSAGES], steps=1)
    made.trainer.args.max_completion_length = 50
    with pytest.raises(ConfigError, match="max_completion_length"):
        made.rollouts([MESSAGES], made.trainer)
    made.trainer.args.temperature = 0.5
    with pytest.raises(UnreproducibleSamplingError, match="temperature"):
        made.rollouts([MESSAGES], made.trainer)
    assert made.client.requests == []


def test_filters_once_allowed_keep_the_ratio_one_and_say_what_they_kept(tmp_path: Path) -> None:
    """A13: as the trainer itself computes it."""
    made = _setup(tmp_path, [MESSAGES], steps=1, allow_filters=True, sampling={"top_p": 0.8})
    output = made.rollouts([MESSAGES] * 8, made.trainer)
    metrics = made.trainer._metrics["train"]
    # Handed the filtered law's own logprobs, the ratio would be the kept mass: about 0.8.
    assert metrics["trainer/mismatch_ratio_mean"][0] == pytest.approx(1.0, abs=1e-5)
    assert 0.79 < metrics["rollout/kept_mass_mean"][0] < 0.999
    assert all(0.79 < math.exp(k) <= 1 for k in output["kept_logmass"])


def test_text_prompts_go_in_as_they_are(tmp_path: Path) -> None:
    made = _setup(tmp_path, ["say a"], steps=1)
    output = made.rollouts(["say a", "say a", "b"], made.trainer)
    assert output["prompt_ids"][0] == made.tokenizer("say a")["input_ids"]
    assert output["prompt_ids"][2] == made.tokenizer("b")["input_ids"]


def test_a_refused_push_stops_the_run_and_the_old_version_stays(tmp_path: Path) -> None:
    made = _setup(tmp_path, [MESSAGES], steps=1)
    with torch.no_grad():
        next(made.trainer.model.parameters())[0, 0] = float("nan")
    with pytest.raises(WeightUpdateError):
        made.rollouts([MESSAGES], made.trainer)
    assert made.client.requests == []


def test_adapters_are_refused_rather_than_pushed_unmerged(tmp_path: Path) -> None:
    """A29."""
    made = _setup(tmp_path, [MESSAGES], steps=1)
    made.trainer.model.peft_config = {"default": object()}
    with pytest.raises(PolicyPushError, match="adapters"):
        made.rollouts([MESSAGES], made.trainer)


def test_a_whole_job_trains_on_the_task_and_sums_itself_up(tmp_path: Path) -> None:
    policy = save_tiny_folder(tmp_path / "policy", "smollm2")
    folder = tmp_path / "run"
    job = JobConfig(
        policy=_policy_config(tmp_path / "policy"),
        engine=EngineConfig(dtype="float32"),
        task={"kind": "arithmetic", "prompts": 8},
        trainer={
            "kind": "trl",
            "steps": 8,
            "prompts_per_step": 1,
            "num_generations": 2,
            "max_new_tokens": 8,
            "trainable_layers": 1,
            "samples_per_pass": 1,
            "save_policy": True,
        },
        output_dir=str(folder),
        run_id="r",
    )
    client = _client(policy)
    tracker = JsonlTracker(folder, run_id="r")
    assert run(job, client, tracker) == 0
    tracker.finish()
    summary = json.loads((folder / "summary.json").read_text())
    steps = list(read_jsonl(folder, "steps"))
    assert summary["steps"] == len(steps) == len(client.versions) == 8
    assert summary["stopped_by"] == "steps"
    assert sum(summary["generate_s_by_step"]) == pytest.approx(summary["seconds"]["generate"])
    assert set(summary["conditions"]) == {"machine", "versions", "commit"}
    assert summary["reward_by_step"] == [s["reward"] for s in steps]
    assert summary["tokens"] == sum(len(c.tokens) for c in client.completions)
    assert summary["reward"]["improved"] in (True, False)
    assert all(s["step_s"] >= s["generate_s"] + s["weight_sync_s"] for s in steps)
    assert (folder / "policy" / "config.json").exists()


def test_a_run_stops_when_its_minutes_are_over(tmp_path: Path) -> None:
    policy = save_tiny_folder(tmp_path / "policy", "smollm2")
    folder = tmp_path / "run"
    trainer = {"kind": "trl", "prompts_per_step": 1, "num_generations": 2, "max_new_tokens": 4}
    job = JobConfig(
        policy=_policy_config(tmp_path / "policy"),
        engine=EngineConfig(dtype="float32"),
        task={"kind": "arithmetic", "prompts": 4},
        trainer={**trainer, "steps": 500, "max_minutes": 1e-6},
        output_dir=str(folder),
        run_id="r",
    )
    tracker = JsonlTracker(folder, run_id="r")
    assert run(job, _client(policy), tracker) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["stopped_by"]) == (1, "time")
    assert summary["reward"]["improved"] is None


def _job(tmp_path: Path, name: str, **trainer: Any) -> JobConfig:
    settings = {"prompts_per_step": 1, "num_generations": 2, "max_new_tokens": 4, "learning_rate": 1e-2}
    return JobConfig(
        policy=_policy_config(tmp_path / "policy"),
        engine=EngineConfig(dtype="float32"),
        task={"kind": "arithmetic", "prompts": 8},
        trainer={"kind": "trl", **settings, **trainer},
        output_dir=str(tmp_path / name),
        run_id=name,
    )


def _train(job: JobConfig, policy: Any) -> tuple[EngineClient, dict[str, Any]]:
    client = _client(policy)
    tracker = JsonlTracker(Path(str(job.output_dir)), run_id=str(job.run_id))
    assert run(job, client, tracker) == 0
    tracker.finish()
    return client, json.loads((Path(str(job.output_dir)) / "summary.json").read_text())


def test_a_resumed_run_draws_what_an_undisturbed_one_would_have(tmp_path: Path) -> None:
    policy = save_tiny_folder(tmp_path / "policy", "smollm2")
    whole, summary = _train(_job(tmp_path, "whole", steps=4), policy)
    _train(_job(tmp_path, "again", steps=2, checkpoint_steps=2), policy)
    resumed, total = _train(_job(tmp_path, "again", steps=4, checkpoint_steps=2), policy)
    assert resumed.versions == [3, 4]
    assert [c.token_ids for c in resumed.completions] == [c.token_ids for c in whole.completions[4:]]
    assert total["reward_by_step"] == summary["reward_by_step"]


def test_steps_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, run_id="r")
    tracker.record("steps", {"step": 1})
    tracker.finish()
    with pytest.raises(ConfigError, match=r"output_dir: .* no checkpoint"):
        earlier_run(tmp_path)


def test_a_task_with_too_few_prompts_for_a_step_is_refused(tmp_path: Path) -> None:
    # TRL would train no step at all and call that a success.
    job = JobConfig(task={"prompts": 3}, trainer={"prompts_per_step": 4})
    with pytest.raises(ConfigError, match=r"task\.prompts"):
        settings_of(job)


def _policy_config(folder: Path) -> Any:
    from rollout.config import PolicyConfig

    return PolicyConfig(source=str(folder))
