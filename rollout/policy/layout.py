"""Which Hugging Face tensors make up a policy: its linears as an engine fuses them, its norms, its gate."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollout.policy.spec import ModelSpec

GATE_WEIGHT = "model.early_exit_gate.weight"
"""(1, hidden), where the spec has an exit gate."""

GATE_BIAS = "model.early_exit_gate.bias"
"""(1,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """One fused linear: Hugging Face modules stacked along the out features."""

    name: str
    modules: tuple[str, ...]
    sizes: tuple[int, ...]
    in_features: int
    bias: bool


def fused_linears(spec: ModelSpec) -> Iterator[Fused]:
    """Yield the body's fused linears in order, the head not included."""
    query, key = spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    for layer in range(spec.layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        yield Fused(
            name=f"layers.{layer}.qkv",
            modules=tuple(f"{attention}{x}_proj" for x in "qkv"),
            sizes=(query, key, key),
            in_features=hidden,
            bias=spec.qkv_bias,
        )
        yield Fused(
            name=f"layers.{layer}.o",
            modules=(f"{attention}o_proj",),
            sizes=(hidden,),
            in_features=query,
            bias=spec.output_bias,
        )
        yield Fused(
            name=f"layers.{layer}.gate_up",
            modules=(f"{mlp}gate_proj", f"{mlp}up_proj"),
            sizes=(inner, inner),
            in_features=hidden,
            bias=spec.mlp_bias,
        )
        yield Fused(
            name=f"layers.{layer}.down",
            modules=(f"{mlp}down_proj",),
            sizes=(hidden,),
            in_features=inner,
            bias=spec.mlp_bias,
        )


def norm_weights(spec: ModelSpec) -> Iterator[tuple[str, str, int]]:
    """Yield our name, the Hugging Face name and the size of every norm."""
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        yield f"layers.{layer}.input", f"{prefix}input_layernorm.weight", spec.hidden_size
        yield f"layers.{layer}.post", f"{prefix}post_attention_layernorm.weight", spec.hidden_size
        if spec.sandwich_norms:
            yield f"layers.{layer}.attention_out", f"{prefix}input_layernorm_2.weight", spec.hidden_size
            yield f"layers.{layer}.mlp_out", f"{prefix}post_attention_layernorm_2.weight", spec.hidden_size
        if spec.qk_norm:
            yield f"layers.{layer}.q", f"{prefix}self_attn.q_norm.weight", spec.head_dim
            yield f"layers.{layer}.k", f"{prefix}self_attn.k_norm.weight", spec.head_dim
    yield "final", "model.norm.weight", spec.hidden_size
