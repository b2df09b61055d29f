"""The policy's weights as the torch decoder runs them: fused, in buffers whose addresses never change.

Shapes: V vocabulary, D hidden size, N out features, K in features.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine.native.spec import ModelSpec


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
        if spec.qk_norm:
            yield f"layers.{layer}.q", f"{prefix}self_attn.q_norm.weight", spec.head_dim
            yield f"layers.{layer}.k", f"{prefix}self_attn.k_norm.weight", spec.head_dim
    yield "final", "model.norm.weight", spec.hidden_size


class TorchWeights:
    """Buffers of one policy. A tied head is the embedding's own storage, never a copy."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._spec = spec
        self.embedding_VD = zeros(spec.vocab_size, spec.hidden_size)
        self.linears: dict[str, Tensor] = {}
        self.biases: dict[str, Tensor] = {}
        for fused in fused_linears(spec):
            self.linears[fused.name] = zeros(sum(fused.sizes), fused.in_features)
            if fused.bias:
                self.biases[fused.name] = zeros(sum(fused.sizes))
        self.linears["head"] = (
            self.embedding_VD if spec.tie_embeddings else zeros(spec.vocab_size, spec.hidden_size)
        )
        self.norms = {name: zeros(size) for name, _, size in norm_weights(spec)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy a checked state dict, by Hugging Face names, into the buffers."""
        self.embedding_VD.copy_(state["model.embed_tokens.weight"])
        if not self._spec.tie_embeddings:
            self.linears["head"].copy_(state["lm_head.weight"])
        for fused in fused_linears(self._spec):
            self._stack(self.linears[fused.name], [state[f"{m}.weight"] for m in fused.modules])
            if fused.bias:
                self._stack(self.biases[fused.name], [state[f"{m}.bias"] for m in fused.modules])
        for name, source, _ in norm_weights(self._spec):
            self.norms[name].copy_(state[source])

    @staticmethod
    def _stack(buffer: Tensor, parts: list[Tensor]) -> None:
        start = 0
        for part in parts:
            buffer[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
