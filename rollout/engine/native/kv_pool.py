"""How large the KV pool of an engine is, by its settings and its policy's shape. No memory is taken here."""

from rollout.config import EngineConfig
from rollout.engine.native.pages import pages_for
from rollout.engine.native.rows import PAGE_TOKENS
from rollout.engine.native.shapes import kv_bytes_per_token
from rollout.errors import ConfigError
from rollout.policy.spec import ModelSpec


def context_limit(config: EngineConfig, spec: ModelSpec) -> int:
    """Return how many tokens a sequence may have, prompt included."""
    return min(config.max_context_tokens, spec.max_positions)


def pool_pages(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the pages of the KV pool. Raises ``ConfigError`` when ``kv_bytes`` cannot hold one sequence."""
    if config.kv_tokens:
        return pages_for(config.kv_tokens)
    limit = context_limit(config, spec)
    page_bytes, each = kv_bytes_per_token(spec) * PAGE_TOKENS, pages_for(limit)
    if config.kv_bytes < each * page_bytes:
        raise ConfigError(
            f"engine.kv_bytes={config.kv_bytes} cannot hold one sequence of {limit} tokens of this "
            f"policy, which takes {each * page_bytes}: raise it, or lower engine.max_context_tokens"
        )
    return min(config.max_batch * each, config.kv_bytes // page_bytes)
