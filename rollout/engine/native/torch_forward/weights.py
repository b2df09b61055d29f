"""The policy's weights as the torch decoder runs them: fused, in buffers whose addresses never change.

Shapes: V vocabulary, D hidden size, N out features, K in features.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rollout.policy.layout import GATE_BIAS, GATE_WEIGHT, fused_linears, norm_weights
from rollout.policy.spec import ModelSpec


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
        self.gate_D = zeros(spec.hidden_size) if spec.exit_gate else None
        self.gate_bias = zeros(1) if spec.exit_gate else None

    @property
    def nbytes(self) -> int:
        """Memory of all weights; a tied head is none of its own."""
        own = [t for n, t in self.linears.items() if n != "head" or not self._spec.tie_embeddings]
        gate = [t for t in (self.gate_D, self.gate_bias) if t is not None]
        others = (*self.biases.values(), *self.norms.values(), *gate)
        return sum(t.nbytes for t in (self.embedding_VD, *own, *others))

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
        if self.gate_D is not None and self.gate_bias is not None:
            self.gate_D.copy_(state[GATE_WEIGHT][0])
            self.gate_bias.copy_(state[GATE_BIAS])

    @staticmethod
    def _stack(buffer: Tensor, parts: list[Tensor]) -> None:
        start = 0
        for part in parts:
            buffer[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
