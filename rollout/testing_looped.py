"""What looped policies are tested with: their forward written out, and a decoder that counts its work.

The plain forward is dense, unpaged, float64, one sequence at a time. It shares no code with the decoders:
what they compute is tested against it.

Shapes: T tokens, D hidden, V vocabulary, N query heads, H head dimension, P planes, J KV heads.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.types import LinearWeight, QuantizedLinear
from rollout.engine.native.decoder import Decoder, ForwardResult, KVStorage
from rollout.engine.native.decoder_work import DecoderWork
from rollout.engine.native.rows import RowBatch
from rollout.policy.spec import ModelSpec
from rollout.policy.stored import SelectedTensors

PUBLISHED_OURO: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_ouro.OuroConfig",
        "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM",
    },
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "early_exit_threshold": 1.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "layer_types": ["full_attention"] * 24,
    "max_position_embeddings": 65536,
    "max_window_layers": 24,
    "model_type": "ouro",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "total_ut_steps": 4,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 49152,
}
"""The fields of Ouro-1.4B, rotary base given flat as transformers 4 wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseRun:
    """One sequence through all loops, everything kept."""

    states: tuple[Tensor, ...]
    """After each loop, (T, D), normalised: what the head, the gate and the next loop read."""

    logits: tuple[Tensor, ...]
    """Of the head after each loop, (T, V)."""

    gates: tuple[Tensor, ...]
    """The exit gate after each loop, (T,), before the sigmoid."""

    keys_PTJH: Tensor
    """Rotated, by plane ``loop * layers + layer``."""

    values_PTJH: Tensor


def dense_ouro(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    tokens: Sequence[int],
    *,
    theta: float,
    kv_dtype: torch.dtype = torch.float64,
) -> DenseRun:
    """Run ``tokens`` from position 0; keys and values are rounded to ``kv_dtype`` before they are read."""
    # Each for its use alone: all of a policy in float64 is four times what it takes in bfloat16.
    weights = SelectedTensors(state, list(state), torch.float64)
    length = len(tokens)

    def norm(x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + spec.norm_eps) * weights[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    # Angles are float32 by definition of the model, whatever else is computed in, and so is each step to
    # them: a power and its reciprocal differ by a last bit from a negative power.
    powers_H = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies_H = 1.0 / theta**powers_H
    angles_TH = torch.arange(length, dtype=torch.float32)[:, None] * frequencies_H
    cos_TH, sin_TH = angles_TH.cos().double(), angles_TH.sin().double()

    def turned(x_TH: Tensor) -> Tensor:
        """Rotate dimension h with dimension h + H / 2."""
        half = spec.head_dim // 2
        a, b = x_TH[:, :half], x_TH[:, half:]
        return torch.cat([a * cos_TH - b * sin_TH, b * cos_TH + a * sin_TH], dim=1)

    def heads(x_TK: Tensor) -> list[Tensor]:
        return list(x_TK.view(length, -1, spec.head_dim).unbind(1))

    future_TT = torch.ones(length, length).triu(1).bool()
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attention(x_TD: Tensor, name: str) -> Tensor:
        query = [turned(q_TH) for q_TH in heads(linear(x_TD, f"{name}.q_proj"))]
        key = [turned(k_TH).to(kv_dtype).double() for k_TH in heads(linear(x_TD, f"{name}.k_proj"))]
        value = [v_TH.to(kv_dtype).double() for v_TH in heads(linear(x_TD, f"{name}.v_proj"))]
        keys.append(torch.stack(key, dim=1))
        values.append(torch.stack(value, dim=1))
        group, out = spec.query_heads // spec.kv_heads, []
        for n, query_TH in enumerate(query):
            scores_TT = query_TH @ key[n // group].T / spec.head_dim**0.5
            weights_TT = scores_TT.masked_fill(future_TT, float("-inf")).softmax(dim=1)
            out.append(weights_TT @ value[n // group])
        return linear(torch.cat(out, dim=1), f"{name}.o_proj")

    def mlp(x_TD: Tensor, name: str) -> Tensor:
        gate_TI = linear(x_TD, f"{name}.gate_proj")
        return linear(gate_TI * gate_TI.sigmoid() * linear(x_TD, f"{name}.up_proj"), f"{name}.down_proj")

    states, logits, gates = [], [], []
    head = "model.embed_tokens" if spec.tie_embeddings else "lm_head"
    x_TD = weights["model.embed_tokens.weight"][list(tokens)]
    for _ in range(spec.loops):
        for layer in range(spec.layers):
            name = f"model.layers.{layer}"
            branch_TD = attention(norm(x_TD, f"{name}.input_layernorm"), f"{name}.self_attn")
            x_TD = x_TD + norm(branch_TD, f"{name}.input_layernorm_2")
            branch_TD = mlp(norm(x_TD, f"{name}.post_attention_layernorm"), f"{name}.mlp")
            x_TD = x_TD + norm(branch_TD, f"{name}.post_attention_layernorm_2")
        x_TD = norm(x_TD, "model.norm")
        states.append(x_TD)
        logits.append(linear(x_TD, head))
        gate_T1 = linear(x_TD, "model.early_exit_gate") + weights["model.early_exit_gate.bias"]
        gates.append(gate_T1[:, 0])
    return DenseRun(
        states=tuple(states),
        logits=tuple(logits),
        gates=tuple(gates),
        keys_PTJH=torch.stack(keys),
        values_PTJH=torch.stack(values),
    )


RowLoop = tuple[int, int, int]
"""Row of the page table, position, loop."""


class CountingDecoder:
    """A ``Decoder`` that counts how often each position is computed at each loop, and can be told to fail."""

    def __init__(self, inner: Decoder) -> None:
        self._inner = inner
        self._counts: Counter[RowLoop] = Counter()
        self.spec, self.compiled, self.row_invariant = inner.spec, inner.compiled, inner.row_invariant
        self.fail_from_loop: int | None = None
        """Forwards that start at this loop raise ``RuntimeError``."""

    @property
    def work(self) -> DecoderWork:
        """Of the counted decoder, as it counts itself."""
        return self._inner.work

    def take(self) -> Counter[RowLoop]:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def forward(
        self,
        batch: RowBatch,
        kv: KVStorage,
        *,
        taps: Sequence[str] = (),
        loops: range | None = None,
        layers: range | None = None,
        hidden_MD: Tensor | None = None,
        states: bool = True,
    ) -> ForwardResult:
        """Count and compute; of a loop's parts the one with its last layer counts."""
        if layers is None or layers.stop == self.spec.layers:
            for loop in range(self.spec.loops) if loops is None else loops:
                self._count(batch, [loop] * batch.rows)
        if loops is not None and loops.start == self.fail_from_loop:
            raise RuntimeError("planted: this forward fails")
        return self._inner.forward(
            batch, kv, taps=taps, loops=loops, layers=layers, hidden_MD=hidden_MD, states=states
        )

    def advance(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop_M: Tensor) -> ForwardResult:
        """Count and compute."""
        self._count(batch, loop_M.tolist())
        return self._inner.advance(hidden_MD, batch, kv, loop_M=loop_M)

    def block(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop: int) -> Tensor:
        """Count and compute."""
        self._count(batch, [loop] * batch.rows)
        return self._inner.block(hidden_MD, batch, kv, loop=loop)

    def _count(self, batch: RowBatch, loops: Sequence[int]) -> None:
        self._counts.update(zip(batch.table_M.tolist(), batch.positions_M.tolist(), loops, strict=True))

    def new_storage(self, pages: int) -> KVStorage:
        """Return the counted decoder's own."""
        return self._inner.new_storage(pages)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the counted decoder."""
        self._inner.load(state)

    def embed(self, token_ids_M: Tensor) -> Tensor:
        """Return the counted decoder's."""
        return self._inner.embed(token_ids_M)

    def head(self, hidden_RD: Tensor) -> Tensor:
        """Return the counted decoder's."""
        return self._inner.head(hidden_RD)

    def exit_gate(self, hidden_MD: Tensor) -> Tensor:
        """Return the counted decoder's."""
        return self._inner.exit_gate(hidden_MD)

    def linears(self) -> Iterator[LinearWeight]:
        """Yield the counted decoder's."""
        return self._inner.linears()

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> Decoder:
        """Return a decoder with other linears, whose work is not the policy's and not counted."""
        return self._inner.with_linears(linears)
