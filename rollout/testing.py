"""Tiny real policies for tests: random weights of every family, in memory or as a Hugging Face folder.

Not fakes: engines, drafters and verifiers run them as they run any policy. They are made so that the
distributions they give are neither flat nor one-hot, whatever the family.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout.engine.native.families import default_inverse_frequencies, tables_of
from rollout.engine.native.spec import ModelSpec

TINY_POSITIONS = 256
TINY_THETA = 10000.0
EOS_ID = 1
"""End of sequence in every tiny policy and in the character tokenizer."""

_BASE = ModelSpec(
    family="llama",
    vocab_size=48,
    hidden_size=64,
    intermediate_size=128,
    layers=2,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    max_positions=TINY_POSITIONS,
    tie_embeddings=False,
    eos_ids=(EOS_ID,),
)

SPECS: dict[str, ModelSpec] = {
    "llama": _BASE,
    "smollm2": replace(_BASE, hidden_size=96, query_heads=3, kv_heads=1, head_dim=32, tie_embeddings=True),
    "qwen2": replace(_BASE, family="qwen2", tie_embeddings=True, qkv_bias=True, norm_eps=1e-6),
    "qwen3": replace(
        _BASE, family="qwen3", tie_embeddings=True, qk_norm=True, head_dim=32, kv_heads=1, norm_eps=1e-6
    ),
    "mistral": replace(_BASE, family="mistral", sliding_window=24),
}
"""By the name tests ask for; ``smollm2`` is a tied Llama with three query heads on one KV head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyPolicy:
    """A random policy small enough for float64 and for enumeration."""

    spec: ModelSpec
    cos_PH: Tensor
    """float32; H is half of the head dimension."""

    sin_PH: Tensor
    state: dict[str, Tensor]
    """By Hugging Face name. A tied policy has no ``lm_head.weight``."""


def tiny_policy(
    seed: int = 0,
    vocab: int = 48,
    family: str = "llama",
    layers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> TinyPolicy:
    """Return a random policy of one of ``SPECS``; the same seed gives the same weights, rounded to ``dtype``."""
    spec = replace(SPECS[family], vocab_size=vocab, layers=layers)
    tables = tables_of(
        default_inverse_frequencies(head_dim=spec.head_dim, theta=TINY_THETA), positions=spec.max_positions
    )
    state = {name: value.to(dtype) for name, value in _random_state(spec, seed).items()}
    return TinyPolicy(spec=spec, cos_PH=tables.cos_PH, sin_PH=tables.sin_PH, state=state)


def _random_state(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Return float64 weights. Gains keep every sublayer's output near the size of the residual stream."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * std

    def norm(size: int) -> Tensor:
        return 1.0 + normal(size, std=0.1)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    widths = {"q": spec.query_heads * spec.head_dim, "k": spec.kv_heads * spec.head_dim}
    widths["v"] = widths["k"]
    # Logits of a unit-size hidden state get a deviation of 2: clear favourites, all tokens possible.
    state = {"model.embed_tokens.weight": normal(spec.vocab_size, hidden, std=2.0 * hidden**-0.5)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        state[f"{prefix}input_layernorm.weight"] = norm(hidden)
        for letter, width in widths.items():
            state[f"{attention}{letter}_proj.weight"] = normal(width, hidden, std=1.5 * hidden**-0.5)
            if spec.qkv_bias:
                state[f"{attention}{letter}_proj.bias"] = normal(width, std=0.3)
        state[f"{attention}o_proj.weight"] = normal(hidden, widths["q"], std=1.5 * widths["q"] ** -0.5)
        if spec.qk_norm:
            state[f"{attention}q_norm.weight"] = norm(spec.head_dim)
            state[f"{attention}k_norm.weight"] = norm(spec.head_dim)
        state[f"{prefix}post_attention_layernorm.weight"] = norm(hidden)
        state[f"{prefix}mlp.gate_proj.weight"] = normal(inner, hidden, std=1.5 * hidden**-0.5)
        state[f"{prefix}mlp.up_proj.weight"] = normal(inner, hidden, std=1.5 * hidden**-0.5)
        state[f"{prefix}mlp.down_proj.weight"] = normal(hidden, inner, std=1.5 * inner**-0.5)
    state["model.norm.weight"] = norm(hidden)
    if not spec.tie_embeddings:
        state["lm_head.weight"] = normal(spec.vocab_size, hidden, std=2.0 * hidden**-0.5)
    return state
