"""Ouro folders as published are read without their remote code; variants of other semantics are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import PolicyConfig
from rollout.errors import UnsupportedError, WeightUpdateError
from rollout.policy.families import load_spec, rope_tables
from rollout.policy.ouro_config import OuroConfig
from rollout.policy.source import load_policy
from rollout.policy.spec import ModelSpec
from rollout.policy.weights import WeightStage, checksum, expected_tensors, manifest
from rollout.testing import TINY_THETA, save_tiny_folder, tiny_looped_policy
from rollout.testing_looped import PUBLISHED_OURO


def config_of(**changes: Any) -> OuroConfig:
    return OuroConfig(**{k: v for k, v in {**PUBLISHED_OURO, **changes}.items() if k != "model_type"})


def test_the_published_config_is_24_layers_run_4_times() -> None:
    assert load_spec(config_of()) == ModelSpec(
        family="ouro",
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        layers=24,
        query_heads=16,
        kv_heads=16,
        head_dim=128,
        norm_eps=1e-6,
        max_positions=65536,
        tie_embeddings=False,
        eos_ids=(0,),
        loops=4,
        sandwich_norms=True,
        recurrent_norm=True,
        exit_gate=True,
    )
    assert load_spec(config_of()).planes == 96


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_the_rotary_base_may_stand_flat_or_in_rope_parameters(rope: dict[str, Any]) -> None:
    flat = {k: v for k, v in rope.items() if v is not None}
    config = OuroConfig(
        **{k: v for k, v in PUBLISHED_OURO.items() if k not in ("model_type", "rope_theta")}, **flat
    )
    tables = rope_tables(config, 64)
    frequency = 5e5 ** (-2 / 128)
    assert torch.allclose(tables.cos_PH[:, 1], (torch.arange(64) * frequency).cos(), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"early_exit_threshold": 0.9}, "early_exit_threshold=0.9 lets tokens leave early"),
        ({"early_exit_step": 2}, "early_exit_step=2 lets tokens leave early"),
        ({"kv_cache_layout": "shared"}, "kv_cache_layout='shared' shares keys and values between loops"),
        ({"share_kv_across_loops": True}, "share_kv_across_loops=True shares keys"),
        ({"kv_mode": "last_step"}, "kv_mode='last_step' shares keys"),
        ({"shared_planes": True}, "shared_planes=True shares keys"),
        ({"cross_loop_sharing": True}, "cross_loop_sharing=True shares keys"),
        ({"total_ut_steps": 0}, "total_ut_steps=0 is no number of loops"),
        ({"total_ut_steps": 100_000}, "total_ut_steps=100000 is more than the 256 loops that are supported"),
        ({"total_ut_steps": 257}, "total_ut_steps=257 is more than the 256 loops"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more than the 4096 layers"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 12}, "layers differ in attention"),
        ({"attention_bias": True}, "attention_bias=True is not part of the family"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=lambda value: value.split("=")[0] if isinstance(value, str) else "",
)
def test_what_is_not_fixed_depth_with_planes_of_its_own_is_refused(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError) as refused:
        load_spec(config_of(**changes))
    assert named in str(refused.value)


def test_settings_that_change_nothing_are_accepted() -> None:
    harmless = {
        "early_exit_threshold": 1,
        "kv_cache_layout": "last_exited",
        "kv_sharing": False,
        "sliding_window": 4096,
    }
    assert load_spec(config_of(**harmless)) == load_spec(config_of())


def test_a_published_folder_is_read_without_its_remote_code(tmp_path: Path) -> None:
    saved = save_tiny_folder(tmp_path, "ouro")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    flat = {"rope_theta": TINY_THETA, "auto_map": PUBLISHED_OURO["auto_map"], "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config | flat))
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"auto_map": {}}))
    wide = {name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(wide, tmp_path / "model.safetensors")
    policy = load_policy(PolicyConfig(source=str(tmp_path)))
    assert policy.spec == saved.spec
    assert policy.checksum == checksum(saved.state)
    assert policy.tokenizer is not None
    assert len(policy.tokenizer("12 + 3")["input_ids"]) == 6
    assert torch.equal(rope_tables(policy.config, 256).cos_PH, saved.cos_PH)


def test_expected_tensors_are_those_of_the_published_folders() -> None:
    expected = expected_tensors(tiny_looped_policy(layers=1).spec)
    layer = "model.layers.0"
    norms = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
    linears = (*(f"self_attn.{c}_proj" for c in "qkvo"), *(f"mlp.{c}_proj" for c in ("gate", "up", "down")))
    names = {f"{layer}.{part}.weight" for part in (*norms, *linears)}
    names |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert set(expected) == names | {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    assert expected["model.early_exit_gate.weight"] == (1, 64)
    assert expected["model.early_exit_gate.bias"] == (1,)


def test_an_update_of_a_looped_policy_carries_its_gate_and_second_norms() -> None:
    old, new = tiny_looped_policy(seed=0), tiny_looped_policy(seed=1)
    stage = WeightStage(old.spec, "bfloat16", 0, manifest(new.state, 1))
    stage.add(new.state.items())
    assert checksum(stage.finish()) == checksum(new.state)
    for name in ("model.early_exit_gate.bias", "model.layers.1.input_layernorm_2.weight"):
        state = {n: t for n, t in new.state.items() if n != name}
        with pytest.raises(WeightUpdateError, match=f"{name} is missing"):
            WeightStage(old.spec, "bfloat16", 0, manifest(state, 1))
