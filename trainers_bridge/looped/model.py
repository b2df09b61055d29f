"""The Ouro architecture for trainers: one block of layers, passed several times, with the loops' own losses.

Importing this module lets ``AutoConfig`` and ``AutoModelForCausalLM`` know ``model_type`` "ouro". Tensor
names are the published ones, so a saved folder is what the native engine loads. Nothing here is tuned for
generation: rollouts come from the engine, and a cache of another layout is refused.

Shapes: B sequences, T tokens of this pass, S tokens a row may attend to, C hidden size, A heads, H head
dimension, V vocabulary, D loops. Plane ``loop * layers + layer`` of a cache is that loop's keys and values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from rollout.errors import UnsupportedError
from rollout.policy.ouro_config import OuroConfig
from trainers_bridge.looped.configuration import check_trainable, loop_losses
from trainers_bridge.looped.loss import (
    IGNORED,
    cross_entropy_by_loop,
    distillation,
    gate_loss,
    with_gradient_of,
)

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each BTH."""


@dataclass(kw_only=True, slots=True)
class LoopCache:
    """Keys and values of what was computed, one growing pair (each BAxH) per plane."""

    planes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def extend(self, plane: int, keys_BATH: Tensor, values_BATH: Tensor) -> tuple[Tensor, Tensor]:
        """Append to a plane and return all of it, each BASH."""
        if plane in self.planes:
            old_keys, old_values = self.planes[plane]
            keys_BATH = torch.cat([old_keys, keys_BATH], dim=2)
            values_BATH = torch.cat([old_values, values_BATH], dim=2)
        self.planes[plane] = (keys_BATH, values_BATH)
        return keys_BATH, values_BATH

    def keep(self, rows: Tensor) -> None:
        """Forget all sequences but those at the indices ``rows``, which take their order."""
        self.planes = {p: (keys[rows], values[rows]) for p, (keys, values) in self.planes.items()}


@dataclass
class LoopedOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """What the body returns: ``last_hidden_state`` is the last loop's."""

    loop_hidden_states: tuple[Tensor, ...] | None = None
    """After every loop, normed: what the head reads and the next loop starts from."""

    exit_gates: tuple[Tensor, ...] | None = None
    """Per loop, BT: the logit of leaving here. Reported, never acted on."""


@dataclass
class LoopedCausalOutput(CausalLMOutputWithPast):  # type: ignore[misc]
    """The last loop's logits, and where labels were given the losses they are made of."""

    loop_losses: Tensor | None = None
    """Mean cross entropy per loop, shape D."""

    distillation_loss: Tensor | None = None
    gate_loss: Tensor | None = None
    """Of the exit gates alone, which read the states without moving them; not part of ``loss``."""


class RMSNorm(nn.Module):
    """Root mean square norm: statistics in float32 or better, scaled in the dtype of the input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normed input, same shape."""
        if hidden.dtype in (torch.float32, torch.float64):
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(hidden.float(), self.weight.shape, None, self.eps).to(hidden.dtype) * self.weight


class Attention(nn.Module):
    """Causal attention over one plane, split-half rotary positions, no biases."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, int(config.num_key_value_heads or 0)
        self.head_dim = int(config.head_dim or 0)
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self, hidden_BTC: Tensor, rotation: Rotation, mask: Tensor | None, cache: LoopCache | None, plane: int
    ) -> Tensor:
        """Return the block's attention output, BTC. Without a mask attention is causal."""
        batch, length, _ = hidden_BTC.shape
        query_BATH = self.q_proj(hidden_BTC).view(batch, length, self.heads, -1).transpose(1, 2)
        key_BATH = self.k_proj(hidden_BTC).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        value_BATH = self.v_proj(hidden_BTC).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        query_BATH, key_BATH = rotated(query_BATH, rotation), rotated(key_BATH, rotation)
        if cache is not None:
            key_BATH, value_BATH = cache.extend(plane, key_BATH, value_BATH)
        mixed_BATH = F.scaled_dot_product_attention(
            query_BATH,
            key_BATH,
            value_BATH,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        out: Tensor = self.o_proj(mixed_BATH.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """Gated feed-forward layer with SiLU."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        """Return the layer's output, BTC."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_BTC)) * self.up_proj(hidden_BTC))
        return out


class Layer(nn.Module):
    """One layer of the block: each half is normed before and after, then added (sandwich norms)."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.input_layernorm_2 = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm_2 = RMSNorm(size, eps)

    def forward(
        self, hidden_BTC: Tensor, rotation: Rotation, mask: Tensor | None, cache: LoopCache | None, plane: int
    ) -> Tensor:
        """Return the hidden states after this layer, BTC."""
        attended_BTC = self.self_attn(self.input_layernorm(hidden_BTC), rotation, mask, cache, plane)
        hidden_BTC = hidden_BTC + self.input_layernorm_2(attended_BTC)
        fed_BTC = self.mlp(self.post_attention_layernorm(hidden_BTC))
        summed_BTC: Tensor = hidden_BTC + self.post_attention_layernorm_2(fed_BTC)
        return summed_BTC


class OuroPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What body and policy share with every transformers model."""

    config_class = OuroConfig
    base_model_prefix = "model"
    _no_split_modules = ("Layer",)
    _supports_sdpa = True


class OuroModel(OuroPreTrainedModel):
    """Embedding, the shared block, the final norm inside the loop, and the exit gate."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        check_trainable(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.score_loops: Callable[[Sequence[Tensor]], Tensor] | None = None
        """Set by the policy that owns this body: the distillation loss of the loops' states (each NC)."""

        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: LoopCache | None = None,
        use_cache: bool | None = None,
        loops: int | None = None,
        auxiliary: bool = True,
        **_: Any,
    ) -> LoopedOutput:
        """Return the hidden states after each of the first ``loops`` loops (None: all).

        ``attention_mask`` (BS) is 0 at padding; positions count what it leaves. Cached passes need the mask
        of all S tokens or none. In a training pass whoever differentiates through ``last_hidden_state`` also
        trains the config's distillation loss, unless ``auxiliary`` is off. Raises ``UnsupportedError`` for a
        cache other than ``LoopCache``.
        """
        if past_key_values is not None and not isinstance(past_key_values, LoopCache):
            raise UnsupportedError(
                f"a {type(past_key_values).__name__} has no plane per loop: use_cache=False, or a LoopCache"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden_BTC = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        length = hidden_BTC.shape[1]
        past = past_key_values.planes[0][0].shape[2] if past_key_values and past_key_values.planes else 0
        if position_ids is None:
            position_ids = positions_of(attention_mask, past, length, device=hidden_BTC.device)
        mask = allowed(attention_mask, past, length, device=hidden_BTC.device)
        rotation = self._rotation(position_ids, hidden_BTC.dtype)
        states: list[Tensor] = []
        for loop in range(self.config.total_ut_steps if loops is None else loops):
            for index, layer in enumerate(self.layers):
                plane = loop * len(self.layers) + index
                hidden_BTC = layer(hidden_BTC, rotation, mask, past_key_values, plane)
            hidden_BTC = self.norm(hidden_BTC)
            states.append(hidden_BTC)
        weight = loop_losses(self.config).distillation
        if auxiliary and weight and self.training and torch.is_grad_enabled() and self.score_loops:
            real_BT = torch.ones_like(position_ids) if attention_mask is None else attention_mask[:, past:]
            real_BT = real_BT.bool().expand(hidden_BTC.shape[:2])
            loss = weight * self.score_loops([state[real_BT] for state in states])
            hidden_BTC = with_gradient_of(hidden_BTC, loss)
        return LoopedOutput(
            last_hidden_state=hidden_BTC,
            loop_hidden_states=tuple(states),
            exit_gates=tuple(self.early_exit_gate(state).squeeze(-1) for state in states),
        )

    def _rotation(self, position_ids_BT: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotary tables. Angles in float32 at least, whatever the weights are."""
        wide = torch.promote_types(dtype, torch.float32)
        size, theta = self.config.head_dim, float(self.config.rope_parameters["rope_theta"])
        exponent_H = torch.arange(0, size, 2, dtype=wide, device=position_ids_BT.device) / size
        angles_BTH = position_ids_BT[..., None].to(wide) * theta**-exponent_H
        both_BTH = torch.cat([angles_BTH, angles_BTH], dim=-1)
        return both_BTH.cos().to(dtype), both_BTH.sin().to(dtype)


class OuroForCausalLM(OuroPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The looped policy with its head, as trainers of causal language models call it."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - read by transformers

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Some trainers run the body and a head of their own: then only the body sees every pass.
        self.model.score_loops = self._distillation_of
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        train_gates: bool = False,
        **kwargs: Any,
    ) -> LoopedCausalOutput:
        """Return the last loop's logits (B, kept T, V), and with ``labels`` (BT, unshifted) the loss.

        The loss is the config's: ``loop_loss_weights`` over cross entropies plus ``loop_distillation_weight``
        times the distillation; where ``loops`` cuts the depth, the last weights count. ``train_gates`` adds
        ``gate_loss``. ``logits_to_keep``: that many last positions, or an index of them; 0: all.
        """
        body = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            auxiliary=labels is None,
            **kwargs,
        )
        if isinstance(logits_to_keep, int):
            kept_BTC = body.last_hidden_state[:, -logits_to_keep:]  # -0 keeps all
        else:
            kept_BTC = body.last_hidden_state[:, logits_to_keep]
        output = LoopedCausalOutput(logits=self.lm_head(kept_BTC))
        if labels is not None:
            self._score(output, body.loop_hidden_states, labels, train_gates=train_gates)
        return output

    def _score(
        self, output: LoopedCausalOutput, states: Sequence[Tensor], labels_BT: Tensor, *, train_gates: bool
    ) -> None:
        """Fill in the losses. Only scored positions reach the head."""
        scored_BT = labels_BT[:, 1:] != IGNORED
        labels_N = labels_BT[:, 1:][scored_BT]
        scored = [state[:, :-1][scored_BT] for state in states]
        logits = [self.lm_head(state_NC) for state_NC in scored]
        losses = cross_entropy_by_loop(logits, labels_N)
        asked = loop_losses(self.config)
        weighted = [w * ce for w, ce in zip(asked.weights[-len(losses) :], losses, strict=True)]
        loss = torch.stack(weighted).sum()
        output.loop_losses = torch.stack(losses).detach()
        if asked.distillation:
            output.distillation_loss = distillation(logits)
            loss = loss + asked.distillation * output.distillation_loss
        if train_gates:
            gates = [self.model.early_exit_gate(state_NC.detach()).squeeze(-1) for state_NC in scored]
            output.gate_loss = gate_loss(gates, logits, labels_N)
        output.loss = loss

    def _distillation_of(self, states: Sequence[Tensor]) -> Tensor:
        """Return the distillation loss of the loops' hidden states, each NC."""
        return distillation([self.lm_head(state_NC) for state_NC in states])


def rotated(heads_BATH: Tensor, rotation: Rotation) -> Tensor:
    """Return queries or keys rotated: dimension h together with h + H / 2."""
    cosine_BTH, sine_BTH = rotation
    first, second = heads_BATH.chunk(2, dim=-1)
    turned_BATH = torch.cat([-second, first], dim=-1)
    return heads_BATH * cosine_BTH[:, None] + turned_BATH * sine_BTH[:, None]


def positions_of(mask_BS: Tensor | None, past: int, length: int, *, device: torch.device) -> Tensor:
    """Return the position of each token of this pass, BT or 1T: how many unmasked tokens precede it."""
    if mask_BS is None:
        return torch.arange(past, past + length, device=device)[None]
    return (mask_BS.long().cumsum(-1) - 1).clamp(min=0)[:, past:]


def allowed(mask_BS: Tensor | None, past: int, length: int, *, device: torch.device) -> Tensor | None:
    """Return which keys a row may attend to, B1TS or 11TS, or None where plain causality says it all.

    A padding row sees itself, so that no row is left without keys.
    """
    padded = mask_BS is not None and not bool(mask_BS.all())
    if not padded and past == 0:
        return None
    rows_T = torch.arange(past, past + length, device=device)
    columns_S = torch.arange(past + length, device=device)
    causal_TS = columns_S[None, :] <= rows_T[:, None]
    if mask_BS is None or not padded:
        return causal_TS[None, None]
    own_TS = columns_S[None, :] == rows_T[:, None]
    return ((causal_TS & mask_BS[:, None, :].bool()) | own_TS)[:, None]


AutoConfig.register(OuroConfig.model_type, OuroConfig, exist_ok=True)
AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)
