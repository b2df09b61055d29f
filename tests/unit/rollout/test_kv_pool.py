"""A KV pool that could serve nothing is a wrong setting, not a start that fails later for another reason."""

import pytest

from rollout.config import KV_BYTES_LEAST, EngineConfig
from rollout.errors import ConfigError
from rollout.testing import TINY_POSITIONS, tiny_policy
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


def test_a_pool_of_one_sequence_serves() -> None:
    config = EngineConfig(max_batch=4, max_context_tokens=TINY_POSITIONS, kv_bytes=KV_BYTES_LEAST)
    assert tiny_engine(tiny_policy(), config=config).traits.max_context_tokens == TINY_POSITIONS
