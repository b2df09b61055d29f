"""The weights of a compiled decoder: where every tensor lives, and how a state dict gets there.

All panels stand in one block of memory whose addresses never change: loading writes in place, so decoders
that share weights, and drafters that read panels, see the new ones at once.

Shapes: N out features, K in features, V vocabulary, D hidden.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from drafters.types import QuantizedLinear
from rollout.policy.layout import GATE_BIAS, GATE_WEIGHT
from rollout.policy.spec import ModelSpec

PANEL = 16
"""Out features per panel; ``bf16_panels.h`` has the layout."""

_ALIGN_ELEMENTS = 32
"""A cache line of bf16: where a linear may start."""


def whole_panels(features: int) -> int:
    """Return how many panels ``features`` columns fill."""
    return -(-features // PANEL)


@dataclass(kw_only=True, slots=True)
class PackedLinear:
    """One linear of the policy in panels. ``gate_up`` holds, in turn, a panel of gate rows and the panel of
    the same up rows, each padded with zero rows to 16; its out features and ``rows()`` are in that order."""

    name: str
    out_features: int
    in_features: int
    panels: Tensor
    """bf16, (panels, K, 16), live: changes when weights are loaded."""

    bias: Tensor | None
    """float32, whole panels."""

    def rows(self) -> Tensor:
        """Return the weight as (N, K) bf16, a copy."""
        count, k, _ = self.panels.shape
        # Slot 2j + h of a panel's row holds column j + 8h.
        columns = self.panels.view(count, k, PANEL // 2, 2).permute(0, 3, 2, 1)
        return columns.reshape(count * PANEL, k)[: self.out_features].contiguous()


@runtime_checkable
class PackedCodes(Protocol):
    """What the kernels need of a ``QuantizedLinear``: codes, and scales where they are not inside."""

    name: str
    out_features: int
    in_features: int
    bits: int
    packed: Tensor
    scales: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Write:
    """One tensor of a state dict on its way to its place."""

    name: str
    shape: tuple[int, ...]
    put: Callable[[Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer: its linears are found by name, its norms are here (float32)."""

    input_norm: Tensor
    post_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_out_norm: Tensor | None
    mlp_out_norm: Tensor | None


@dataclass(kw_only=True, slots=True)
class Weights:
    """All weights of one policy, allocated once."""

    spec: ModelSpec
    library: ctypes.CDLL
    team: int
    """Handle of the thread team that packs."""

    loaded: bool = False
    """Whether ``load`` has succeeded once."""

    linears: dict[str, PackedLinear] = field(init=False)
    embedding_VD: Tensor | None = field(init=False)
    """None where it is the head as well: its rows are read out of the head's panels."""

    final_norm_D: Tensor = field(init=False)
    gate_1D: Tensor | None = field(init=False)
    """The exit gate. It is reported only, so it stands outside the panels."""

    gate_bias: Tensor | None = field(init=False)
    layers: list[LayerWeights] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        shapes = list(_linear_shapes(spec))
        sizes = [whole_panels(n) * PANEL * k for _, n, k, _ in shapes]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS)
        block = torch.empty(starts[-1], dtype=torch.bfloat16)
        self.library.taildraft_advise(block.data_ptr(), block.nbytes)
        self.linears = {}
        for (name, n, k, has_bias), start, size in zip(shapes, starts, sizes, strict=False):
            count = whole_panels(n)
            self.linears[name] = PackedLinear(
                name=name,
                out_features=n,
                in_features=k,
                panels=block[start : start + size].zero_().view(count, k, PANEL),
                bias=torch.zeros(count * PANEL) if has_bias else None,
            )
        self.embedding_VD = (
            None
            if spec.tie_embeddings
            else torch.zeros(spec.vocab_size, spec.hidden_size, dtype=torch.bfloat16)
        )
        self.final_norm_D = torch.zeros(spec.hidden_size)
        self.gate_1D = torch.zeros(1, spec.hidden_size) if spec.exit_gate else None
        self.gate_bias = torch.zeros(1) if spec.exit_gate else None
        self.layers = [
            LayerWeights(
                input_norm=torch.zeros(spec.hidden_size),
                post_norm=torch.zeros(spec.hidden_size),
                query_norm=torch.zeros(spec.head_dim) if spec.qk_norm else None,
                key_norm=torch.zeros(spec.head_dim) if spec.qk_norm else None,
                attention_out_norm=torch.zeros(spec.hidden_size) if spec.sandwich_norms else None,
                mlp_out_norm=torch.zeros(spec.hidden_size) if spec.sandwich_norms else None,
            )
            for _ in range(spec.layers)
        ]

    @property
    def nbytes(self) -> int:
        """Memory the policy's weights take: every one once."""
        norms: list[Tensor | None] = [getattr(layer, f.name) for layer in self.layers for f in fields(layer)]
        others = [self.embedding_VD, self.final_norm_D, *norms, *(w.bias for w in self.linears.values())]
        others += [self.gate_1D, self.gate_bias]
        return sum(w.panels.nbytes for w in self.linears.values()) + sum(
            t.nbytes for t in others if t is not None
        )

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Write a state dict in place, rounded to bf16. Raises ``ValueError``, before the first write, when a
        tensor is missing or has another shape; names it does not know are ignored."""
        writes = list(self._writes())
        for write in writes:
            if write.name not in state:
                raise ValueError(f"the state has no {write.name}")
            shape = tuple(state[write.name].shape)
            if shape != write.shape:
                raise ValueError(f"{write.name} has shape {shape}, expected {write.shape}")
        for write in writes:
            write.put(state[write.name].detach().to(device="cpu", dtype=torch.bfloat16).contiguous())
        self.loaded = True

    def _writes(self) -> Iterator[_Write]:
        spec = self.spec
        if self.embedding_VD is not None:
            shape = (spec.vocab_size, spec.hidden_size)
            yield _Write(name="model.embed_tokens.weight", shape=shape, put=_into(self.embedding_VD))
        for index, layer in enumerate(self.layers):
            yield from self._layer_writes(index, layer)
        yield _Write(name="model.norm.weight", shape=(spec.hidden_size,), put=_into(self.final_norm_D))
        for name, tensor in ((GATE_WEIGHT, self.gate_1D), (GATE_BIAS, self.gate_bias)):
            if tensor is not None:
                yield _Write(name=name, shape=tuple(tensor.shape), put=_into(tensor))
        head = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
        yield self._pack(head, "head", rows=spec.vocab_size)

    def _layer_writes(self, index: int, layer: LayerWeights) -> Iterator[_Write]:
        spec = self.spec
        prefix, name = f"model.layers.{index}", f"layers.{index}"
        norms = {
            "input_layernorm": layer.input_norm,
            "post_attention_layernorm": layer.post_norm,
            "self_attn.q_norm": layer.query_norm,
            "self_attn.k_norm": layer.key_norm,
            "input_layernorm_2": layer.attention_out_norm,
            "post_attention_layernorm_2": layer.mlp_out_norm,
        }
        for norm, tensor in norms.items():
            if tensor is None:
                continue
            yield _Write(name=f"{prefix}.{norm}.weight", shape=tuple(tensor.shape), put=_into(tensor))
        query, key = spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        first = 0
        for letter, rows in (("q", query), ("k", key), ("v", key)):
            source = f"{prefix}.self_attn.{letter}_proj"
            yield self._pack(f"{source}.weight", f"{name}.qkv", rows=rows, first=first)
            if spec.qkv_bias:
                yield self._bias(f"{source}.bias", f"{name}.qkv", rows=rows, first=first)
            first += rows // PANEL
        inner = spec.intermediate_size
        plain = (
            (f"{prefix}.self_attn.o_proj", f"{name}.o", spec.hidden_size, 0, 1, spec.output_bias),
            (f"{prefix}.mlp.gate_proj", f"{name}.gate_up", inner, 0, 2, spec.mlp_bias),
            (f"{prefix}.mlp.up_proj", f"{name}.gate_up", inner, 1, 2, spec.mlp_bias),
            (f"{prefix}.mlp.down_proj", f"{name}.down", spec.hidden_size, 0, 1, spec.mlp_bias),
        )
        for source, linear, rows, first, every, has_bias in plain:
            yield self._pack(f"{source}.weight", linear, rows=rows, first=first, every=every)
            if has_bias:
                yield self._bias(f"{source}.bias", linear, rows=rows, first=first, every=every)

    def _pack(self, source: str, linear: str, *, rows: int, first: int = 0, every: int = 1) -> _Write:
        target = self.linears[linear]
        k = target.in_features

        def put(weight_NK: Tensor) -> None:
            pack = self.library.taildraft_pack
            if pack(self.team, weight_NK.data_ptr(), rows, k, target.panels.data_ptr(), first, every) != 0:
                raise RuntimeError("the process was forked after the decoder was made")

        return _Write(name=source, shape=(rows, k), put=put)

    def _bias(self, source: str, linear: str, *, rows: int, first: int, every: int = 1) -> _Write:
        bias = self.linears[linear].bias
        assert bias is not None
        panels = bias.view(-1, PANEL)[first::every]

        def put(bias_N: Tensor) -> None:
            whole = rows // PANEL
            panels[:whole].copy_(bias_N[: whole * PANEL].view(whole, PANEL))
            if rows % PANEL:
                panels[whole, : rows % PANEL].copy_(bias_N[whole * PANEL :])

        return _Write(name=source, shape=(rows,), put=put)


def _into(target: Tensor) -> Callable[[Tensor], None]:
    def put(value: Tensor) -> None:
        target.copy_(value)

    return put


def _linear_shapes(spec: ModelSpec) -> Iterator[tuple[str, int, int, bool]]:
    """Yield name, out features, in features and whether there is a bias, in the order of ``linears()``."""
    hidden, attended = spec.hidden_size, spec.query_heads * spec.head_dim
    gate_up = 2 * PANEL * whole_panels(spec.intermediate_size)
    for index in range(spec.layers):
        yield f"layers.{index}.qkv", spec.qkv_features, hidden, spec.qkv_bias
        yield f"layers.{index}.o", hidden, attended, spec.output_bias
        yield f"layers.{index}.gate_up", gate_up, hidden, spec.mlp_bias
        yield f"layers.{index}.down", hidden, spec.intermediate_size, spec.mlp_bias
    yield "head", spec.vocab_size, hidden, False


def checked_linear(linear: QuantizedLinear, own: PackedLinear) -> PackedCodes:
    """Return a linear that may stand for the policy's ``own``. Raises ``ValueError`` for any other."""
    if not isinstance(linear, PackedCodes) or linear.bits not in (4, 8):
        raise ValueError(f"{linear.name} is not packed in 4 or 8 bits")
    if (linear.out_features, linear.in_features) != (own.out_features, own.in_features):
        raise ValueError(f"{linear.name} has another shape than the policy's")
    if linear.bits == 8 and linear.scales is None:
        raise ValueError(f"{linear.name} has 8 bits but no scales")
    return linear
