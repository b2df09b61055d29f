"""What is computed agrees with transformers; what is not computed is refused by name."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rollout.errors import UnsupportedError
from rollout.policy.families import load_spec, rope_tables
from rollout.testing import LOOPED_SPECS, SPECS, TINY_POSITIONS, tiny_config, tiny_policy

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_of(family: str = "llama", **changes: Any) -> Any:
    config = tiny_config(SPECS[family]).to_dict()
    del config["model_type"]
    return AutoConfig.for_model(family, **{**config, **changes})


@pytest.mark.parametrize("family", sorted({**SPECS, **LOOPED_SPECS}))
def test_a_spec_survives_the_round_trip_through_a_transformers_config(family: str) -> None:
    spec = {**SPECS, **LOOPED_SPECS}[family]
    assert load_spec(tiny_config(spec)) == spec


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        LLAMA3,
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_tables_are_bitwise_those_of_transformers(rope: dict[str, Any]) -> None:
    config = config_of(head_dim=64, rope_parameters=rope, max_position_embeddings=3000)
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1, dtype=torch.float64), torch.arange(3000)[None])
    tables = rope_tables(config, 3000, dtype=torch.float64)
    assert tables.cos_PH.shape == (3000, 32)
    for ours, full in ((tables.cos_PH, cos[0]), (tables.sin_PH, sin[0])):
        assert torch.equal(ours, full[:, :32])
        assert torch.equal(ours, full[:, 32:])


def test_tiny_policies_carry_the_tables_of_their_config() -> None:
    policy = tiny_policy(family="qwen3")
    tables = rope_tables(tiny_config(policy.spec), TINY_POSITIONS)
    assert torch.equal(tables.cos_PH, policy.cos_PH)
    assert torch.equal(tables.sin_PH, policy.sin_PH)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GPT2Config(), "model_type 'gpt2'"),
        (AutoConfig.for_model("mixtral"), "model_type 'mixtral'"),
        (AutoConfig.for_model("gemma2"), "model_type 'gemma2'"),
        (config_of(hidden_act="gelu"), "hidden_act='gelu'"),
        (config_of(num_local_experts=8), "num_local_experts=8"),
        (config_of(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
        (config_of(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (config_of(num_attention_heads=4, num_key_value_heads=3), "num_key_value_heads=3"),
        (
            config_of(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type='dynamic'",
        ),
        (
            config_of(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type='yarn'",
        ),
        (
            config_of(
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            ),
            "partial_rotary_factor=0.5",
        ),
        (
            config_of(
                "qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=1, layer_types=None
            ),
            "full_attention, sliding_attention",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_computed_is_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        load_spec(config)
    assert named in str(refused.value)


def test_every_problem_of_a_config_is_named_at_once() -> None:
    with pytest.raises(UnsupportedError, match=r"num_experts=4.*hidden_act='relu'"):
        load_spec(config_of(num_experts=4, hidden_act="relu"))


def test_windows_that_are_off_or_everywhere_are_read_as_such() -> None:
    off = config_of("qwen2", use_sliding_window=False, sliding_window=16, layer_types=None)
    everywhere = config_of(
        "qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0, layer_types=None
    )
    assert load_spec(off).sliding_window is None
    assert load_spec(everywhere).sliding_window == 16
    assert load_spec(config_of("mistral", sliding_window=None)).sliding_window is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {"attention_bias": True})],
)
def test_biases_are_where_transformers_has_them(family: str, changes: dict[str, bool]) -> None:
    from rollout.policy.weights import expected_tensors

    config = config_of(family, **changes)
    model = AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert expected_tensors(load_spec(config)) == theirs
