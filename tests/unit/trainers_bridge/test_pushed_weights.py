import math

import pytest
import torch

from rollout.testing import tiny_config, tiny_policy
from trainers_bridge.contract import PolicyPushError
from trainers_bridge.weights import policy_state, round_stochastically


def _model(family: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_config(tiny_config(tiny_policy(family=family).spec))
    return model.float()


@pytest.mark.parametrize("family", ["smollm2", "llama"])
def test_a_push_carries_every_tensor_once_under_its_own_name(family: str) -> None:
    state = policy_state(_model(family), dtype=torch.bfloat16)
    expected = tiny_policy(family=family).state
    assert {n: tuple(t.shape) for n, t in state.items()} == {n: tuple(t.shape) for n, t in expected.items()}
    assert {t.dtype for t in state.values()} == {torch.bfloat16}


def test_a_push_is_a_copy_that_training_does_not_reach() -> None:
    model = _model("smollm2")
    state = policy_state(model, dtype=torch.float32)
    before = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert not any(t.requires_grad for t in state.values())


def test_packed_weights_and_adapters_are_refused() -> None:
    """A29: merging into packed weights would round them, so neither is pushed."""
    for name in ("peft_config", "hf_quantizer"):
        model = _model("smollm2")
        setattr(model, name, {"default": object()})
        with pytest.raises(PolicyPushError):
            policy_state(model, dtype=torch.float32)


def test_stochastic_rounding_keeps_the_mean_where_rounding_to_nearest_loses_the_step() -> None:
    old = torch.full((1 << 16,), 0.0625)
    spacing = 2.0**-11
    moved = old + 0.1 * spacing
    assert torch.equal(moved.to(torch.bfloat16).float(), old), "to nearest, the step is gone"
    rounded = round_stochastically(moved, torch.Generator().manual_seed(0)).float()
    assert set(rounded.tolist()) == {0.0625, 0.0625 + spacing}
    # Standard deviation of the mean is 0.3 / 256 spacings; 5.5 of them leave odds of 4e-8 for a false alarm.
    assert (rounded - old).mean().item() / spacing == pytest.approx(0.1, abs=5.5 * 0.3 / 256)


def test_stochastic_rounding_leaves_what_bfloat16_holds_and_what_is_not_finite() -> None:
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).float()
    generator = torch.Generator().manual_seed(2)
    assert torch.equal(round_stochastically(exact, generator).float(), exact)
    odd = round_stochastically(torch.tensor([math.inf, -math.inf, math.nan, -1.0]), generator)
    assert odd[:2].tolist() == [math.inf, -math.inf]
    assert odd[2].isnan()
    assert odd[3] == -1.0


def test_the_same_seed_pushes_the_same_weights_and_frozen_ones_are_rounded_to_nearest() -> None:
    model = _model("smollm2")
    frozen = model.get_parameter("model.norm.weight")
    with torch.no_grad():
        frozen.add_(torch.rand(frozen.shape, generator=torch.Generator().manual_seed(3)))
    frozen.requires_grad_(False)
    first, again, other = (
        policy_state(model, dtype=torch.bfloat16, stochastic_seed=seed) for seed in (5, 5, 6)
    )
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not all(torch.equal(first[n], other[n]) for n in first)
    assert torch.equal(first["model.norm.weight"], frozen.detach().to(torch.bfloat16))
