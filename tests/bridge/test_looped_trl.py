"""TRL's trainer on the looped module: it trains it as any policy, and the teaching loss rides along."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from rollout.errors import ConfigError
from rollout.testing import save_tiny_folder
from trainers_bridge.config import TrainerConfig
from trainers_bridge.looped.loss import distillation
from trainers_bridge.looped.model import OuroForCausalLM
from trainers_bridge.looped.pretraining import Pretraining, Shape, new_policy
from trainers_bridge.looped.tokenizer import build_tokenizer, prompt_ids
from trainers_bridge.mismatch import trainer_logprobs
from trainers_bridge.trl import teach_loops, trainer_args

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


def test_a_policy_without_loops_has_none_to_teach(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    teach_loops(model, 0.0)
    with pytest.raises(ConfigError, match=r"trainer\.loop_distillation_weight: a llama policy has no loops"):
        teach_loops(model, 0.1)
