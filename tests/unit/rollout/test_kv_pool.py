"""A KV pool that could serve nothing is a wrong setting, not a start that fails later for another reason."""

from pathlib import Path

import pytest

from rollout.config import KV_BYTES_LEAST, EngineConfig
from rollout.engine.native.build import live_weights
from rollout.errors import ConfigError
from rollout.policy.source import Policy
from rollout.testing import TINY_POSITIONS, tiny_config, tiny_policy
from rollout.testing_native import tiny_engine

TOKEN_BYTES = 40 * 2 * 2 * 2 * 16
"""Keys and values of 40 layers, two bytes a number, two heads of 16."""


def test_a_pool_below_one_sequence_is_refused_with_the_bytes_it_takes() -> None:
    policy = tiny_policy(layers=40)
    assert (policy.spec.kv_heads, policy.spec.head_dim) == (2, 16)
    whole = TINY_POSITIONS * TOKEN_BYTES
    assert whole > KV_BYTES_LEAST
    config = EngineConfig(max_batch=4, max_context_tokens=TINY_POSITIONS, kv_bytes=whole - 1)
    with pytest.raises(ConfigError, match=rf"^engine\.kv_bytes={whole - 1} cannot .* takes {whole}:"):
        tiny_engine(policy, config=config)


def test_it_is_refused_before_a_weight_is_packed() -> None:
    """The policy has no weights: to pack them, or to run a forward, would fail for another reason."""
    spec = tiny_policy(layers=40).spec
    weightless = Policy(
        spec=spec,
        config=tiny_config(spec),
        tokenizer=None,
        state={},
        eos_ids=(),
        checksum="",
        folder=Path(),
    )
    config = EngineConfig(max_context_tokens=TINY_POSITIONS, kv_bytes=KV_BYTES_LEAST, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"^engine\.kv_bytes=.* cannot hold one sequence"):
        live_weights(weightless, config)


def test_a_pool_of_one_sequence_serves() -> None:
    config = EngineConfig(max_batch=4, max_context_tokens=TINY_POSITIONS, kv_bytes=KV_BYTES_LEAST)
    assert tiny_engine(tiny_policy(), config=config).traits.max_context_tokens == TINY_POSITIONS
