"""What a run charts of its loops is what their laws share, computed here from each depth's own logits."""

import pytest
import torch

from rollout.policy.ouro_config import OuroConfig
from trainers_bridge.looped.agreement import loop_overlaps
from trainers_bridge.looped.model import OuroForCausalLM

PROMPTS = [[3, 1, 4], [2]]
COMPLETIONS = [[1, 5, 9, 2, 6], [5, 3]]


def policy() -> OuroForCausalLM:
    torch.manual_seed(0)
    config = OuroConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        total_ut_steps=3,
        initializer_range=0.5,
    )
    return OuroForCausalLM(config).double()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_overlaps_are_those_of_each_depths_own_law_over_the_completions_tokens(temperature: float) -> None:
    model = policy()
    shared: dict[int, list[float]] = {1: [], 2: []}
    with torch.no_grad():
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
            for last in range(len(prompt), len(prompt) + len(completion)):
                ids = torch.tensor([(prompt + completion)[:last]])
                full, *others = (
                    torch.softmax(model(input_ids=ids, loops=n).logits[0, -1] / temperature, 0)
                    for n in (3, 1, 2)
                )
                for depth, law in enumerate(others, start=1):
                    shared[depth].append(float(torch.minimum(full, law).sum()))
    found = loop_overlaps(model, prompt_ids=PROMPTS, completion_ids=COMPLETIONS, temperature=temperature)
    assert sorted(found) == ["trainer/loop_overlap_1", "trainer/loop_overlap_2"]
    for depth, values in shared.items():
        mean = sum(values) / len(values)
        assert found[f"trainer/loop_overlap_{depth}"] == pytest.approx(mean, abs=1e-6)
        assert 0.05 < mean < 0.999


def test_a_policy_without_loops_charts_nothing() -> None:
    assert loop_overlaps(torch.nn.Linear(2, 2), prompt_ids=[], completion_ids=[], temperature=1.0) == {}
