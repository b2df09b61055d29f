"""TRL's trainer on the looped module: it trains it as any policy, and the teaching loss rides along."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from controller.types import AR, Assignment, RoundLoad, RoundPlan
from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.config import PolicyConfig
from rollout.errors import ConfigError
from rollout.job_config import JobConfig
from rollout.report.journal import read_journal
from rollout.settings import load_config
from rollout.testing import save_tiny_folder
from rollout.testing_native import ar_plan, tiny_engine
from rollout.tracking.jsonl import JsonlTracker
from trainers_bridge.config import TrainerConfig
from trainers_bridge.looped.loss import distillation
from trainers_bridge.looped.model import OuroForCausalLM
from trainers_bridge.looped.pretraining import Pretraining, Shape, new_policy
from trainers_bridge.looped.tokenizer import build_tokenizer, prompt_ids
from trainers_bridge.mismatch import trainer_logprobs
from trainers_bridge.testing import EngineClient
from trainers_bridge.trl import run, teach_loops, trainer_args

pytestmark = [pytest.mark.trl]

MODEL = new_policy(Pretraining(shape=Shape(hidden_size=32, intermediate_size=32, layers=1, heads=2)))
PROMPT = prompt_ids("sort 21")
REPLIES = [[5, 9, 14, 0], [7, 7, 0], [30, 2, 4, 6, 0], [11, 0]]


def shallow_kl(model: OuroForCausalLM) -> float:
    model.eval()
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([[*PROMPT, *REPLIES[0]]])).loop_hidden_states
        return float(distillation([model.lm_head(state[0]) for state in states]))


def trained(folder: Path, *, weight: float, rewards: list[float]) -> OuroForCausalLM:
    """Return the policy after three steps whose four samples are given."""
    torch.set_num_threads(1)
    model = copy.deepcopy(MODEL)
    model.config.loop_loss_weights = None
    model.config.loop_distillation_weight = 0.0
    teach_loops(model, weight)
    config = TrainerConfig(
        steps=3, prompts_per_step=1, num_generations=4, max_new_tokens=8, learning_rate=1e-3
    )

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        prompt = [PROMPT] * len(prompts)
        logprobs = trainer_logprobs(model, prompt_ids=prompt, completion_ids=REPLIES, temperature=1.0)
        return {"prompt_ids": prompt, "completion_ids": REPLIES, "logprobs": logprobs}

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: rewards,
        args=trainer_args(config, folder=folder),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "sort 21"}]}]),
        processing_class=build_tokenizer(max_tokens=64),
        rollout_func=rollouts,
    )
    trainer.train()
    return model


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_trainer_scales_rewards_as_it_is_told(tmp_path: Path, scale: str) -> None:
    config = load_config({"reward_scale": scale}, TrainerConfig, path="trainer")
    assert trainer_args(config, folder=tmp_path).scale_rewards == scale


def test_rewards_move_the_looped_policy(tmp_path: Path) -> None:
    model = trained(tmp_path, weight=0.0, rewards=[1.0, 0.0, 0.0, 0.0])
    best, worst = (
        sum(trainer_logprobs(m, prompt_ids=[PROMPT], completion_ids=[REPLIES[0]], temperature=1.0)[0])
        for m in (model, MODEL)
    )
    assert best > worst + 0.01


def test_with_equal_rewards_the_teaching_loss_alone_moves_it(tmp_path: Path) -> None:
    """Equal rewards give TRL's loss no gradient: what moves the weights is the loss it never sees."""
    still = trained(tmp_path / "still", weight=0.0, rewards=[1.0] * 4)
    for name, value in still.state_dict().items():
        assert torch.equal(value, MODEL.state_dict()[name]), name
    taught = trained(tmp_path / "taught", weight=1.0, rewards=[1.0] * 4)
    assert shallow_kl(taught) < 0.98 * shallow_kl(copy.deepcopy(MODEL))


def drafts_of_all_kinds(load: RoundLoad) -> RoundPlan:
    """Give every sequence another looped drafter, changing from round to round."""
    names = ("shallow_loop_1", "wavefront", "shallow_loop_2", AR)
    chosen = {s.key: names[(s.key + load.round_index) % len(names)] for s in load.sequences}
    drafted = {key: Assignment(drafter=name, gamma=3) for key, name in chosen.items() if name != AR}
    return RoundPlan(assignments=drafted, reason="all kinds")


def test_a_training_run_is_the_same_run_without_speculation(tmp_path: Path) -> None:
    """Same ids in every step, so same rewards, same gradients and, after all steps, the same weights."""
    torch.set_num_threads(1)
    policy = save_tiny_folder(tmp_path / "policy", "ouro")
    summaries, weights = [], []
    for name, plan in (("plain", ar_plan), ("drafted", drafts_of_all_kinds)):
        folder = tmp_path / name
        drafters = [build(n, DrafterConfig()) for n in ("shallow_loop_1", "shallow_loop_2", "wavefront")]
        client = EngineClient(tiny_engine(policy, drafters, compiled=True), plan)
        job = JobConfig(
            policy=PolicyConfig(source=str(tmp_path / "policy")),
            task={"kind": "arithmetic", "prompts": 8},
            trainer={
                "kind": "trl",
                "steps": 8,
                "prompts_per_step": 1,
                "num_generations": 4,
                "max_new_tokens": 12,
                "learning_rate": 1e-3,
                "loop_distillation_weight": 0.3,
                "beta": 0.02,  # so that the trainer holds a second copy, loaded from the folder
                "save_policy": True,
            },
            output_dir=str(folder),
            run_id=name,
        )
        tracker = JsonlTracker(folder, run_id=name)
        assert run(job, client, tracker) == 0
        tracker.finish()
        summaries.append(json.loads((folder / "summary.json").read_text()))
        weights.append(load_file(folder / "policy" / "model.safetensors"))
        overlaps = [v["trainer/loop_overlap_1"] for v in read_journal(folder).step_metrics.values()]
        assert len(overlaps) == 8
    plain, drafted = summaries
    assert drafted["ids_digest_by_step"] == plain["ids_digest_by_step"]
    assert len(set(plain["ids_digest_by_step"])) == 8
    assert drafted["reward_by_step"] == plain["reward_by_step"]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert plain["drafters"] == {}
    assert sorted(drafted["drafters"]) == ["shallow_loop_1", "shallow_loop_2", "wavefront"]
    assert all(told["accepted"] > 0 for told in drafted["drafters"].values())


def test_a_policy_without_loops_has_none_to_teach(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    teach_loops(model, 0.0)
    with pytest.raises(ConfigError, match=r"trainer\.loop_distillation_weight: a llama policy has no loops"):
        teach_loops(model, 0.1)
