"""From a Hugging Face config to what the native engine computes: the spec and the rotary tables.

What a config asks for and the engine does not compute is refused here by name, never approximated.
No weights here, and transformers is not imported: a config is only read.

Shapes: P positions, H half of the head dimension.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.errors import UnsupportedError
from rollout.policy.ouro import ouro_problems, ouro_properties
from rollout.policy.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "ouro")
"""Values of ``model_type`` that are computed. SmolLM2 is a ``llama``."""

FOREIGN_FEATURES = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "embedding_multiplier",
    "residual_multiplier",
    "no_rope_layers",
    "attention_chunk_size",
    "quantization_config",
)
"""Settings other architectures put beside the ones read here; any that is set changes the forward."""


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
"""Counts that every family has."""

MOST_LAYERS = 4096
"""Layers a config may have: names and shapes of all their tensors are listed before any weight is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeTables:
    """Rotary angles by position. Dimension h of a head is rotated with dimension h + head_dim / 2."""

    cos_PH: Tensor
    sin_PH: Tensor


def check_family(family: object) -> None:
    """Raise ``UnsupportedError`` for a ``model_type`` that is not computed."""
    if family not in FAMILIES:
        raise UnsupportedError(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")


def load_spec(config: "PretrainedConfig") -> ModelSpec:
    """Return the shape of a model. Raises ``UnsupportedError`` naming every setting not computed."""
    family = config.model_type
    check_family(family)
    sizes = _size_problems(config)
    if sizes:  # nothing else can be read from them
        raise UnsupportedError(f"{family} config: {'; '.join(sizes)}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    problems = _foreign_settings(config, head_dim)
    window = _sliding_window(config, problems)
    _rope_problems(config, problems)
    if family == "ouro":
        problems += ouro_problems(config)
    if problems:
        raise UnsupportedError(f"{family} config: {'; '.join(problems)}")
    attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelSpec(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        tie_embeddings=bool(config.tie_word_embeddings),
        eos_ids=eos_ids_of(config.eos_token_id),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        sliding_window=window,
        **(ouro_properties(config) if family == "ouro" else {}),
    )


def _size_problems(config: "PretrainedConfig") -> list[str]:
    """Return what in ``config`` is no size of anything."""
    problems = []
    for name in SIZES:
        value = getattr(config, name, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{name}={value!r} is no whole number >= 1")
        elif name == "num_hidden_layers" and value > MOST_LAYERS:
            problems.append(f"{name}={value} is more than the {MOST_LAYERS} layers that are supported")
    eps = config.rms_norm_eps
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        problems.append(f"rms_norm_eps={eps!r} is no number >= 0")
    return problems


def eos_ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    """Return end-of-sequence ids from any of the forms configs write them in."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(int(v) for v in value)


def _foreign_settings(config: "PretrainedConfig", head_dim: int) -> list[str]:
    """Return what in ``config`` would change the forward beyond what is computed."""
    problems = []
    for name in FOREIGN_FEATURES:
        value = getattr(config, name, None)
        if value is not None and value != 1.0:
            problems.append(f"{name}={value!r} is not supported")
    if config.hidden_act != "silu":
        problems.append(f"hidden_act={config.hidden_act!r} is not supported, only 'silu'")
    if head_dim % 2:
        problems.append(f"head_dim={head_dim} is odd")
    if config.num_attention_heads % config.num_key_value_heads:
        problems.append(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    return problems


def _sliding_window(config: "PretrainedConfig", problems: list[str]) -> int | None:
    """Return the one window all layers have; layers that differ are a problem."""
    window: int | None = getattr(config, "sliding_window", None)
    if config.model_type in ("llama", "ouro"):
        # These have no window; a stray setting that their own code would ignore is ignored as well.
        window = None
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        return window
    kinds = set(layer_types)
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        problems.append(f"layers differ in attention: layer_types has {', '.join(sorted(kinds))}")
    return window


def _rope_settings(config: "PretrainedConfig") -> Mapping[str, Any]:
    settings: Mapping[str, Any] | None = getattr(config, "rope_parameters", None)
    return settings or {}


def _rope_problems(config: "PretrainedConfig", problems: list[str]) -> None:
    settings = _rope_settings(config)
    if any(isinstance(value, Mapping) for value in settings.values()):
        problems.append("rope_parameters that differ by layer are not supported")
        return
    kind = settings.get("rope_type", "default")
    if kind not in _SCALINGS:
        problems.append(f"rope_type={kind!r} is not one of {', '.join(_SCALINGS)}")
    if (settings.get("partial_rotary_factor") or 1.0) != 1.0:
        problems.append(f"partial_rotary_factor={settings['partial_rotary_factor']} is not supported")
    theta = settings.get("rope_theta")
    if theta is None:
        problems.append("rope_parameters has no rope_theta")
    elif not isinstance(theta, int | float) or not 0 < theta < math.inf:
        problems.append(f"rope_theta={theta!r} is no number above 0")


def rope_tables(
    config: "PretrainedConfig", positions: int, *, dtype: torch.dtype = torch.float32
) -> RopeTables:
    """Return the rotary tables of positions 0..positions-1, equal to transformers' float32 ones.

    Raises ``UnsupportedError`` for a scaling that is not computed.
    """
    problems: list[str] = []
    _rope_problems(config, problems)
    if problems:
        raise UnsupportedError("; ".join(problems))
    settings = _rope_settings(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain_H = default_inverse_frequencies(head_dim=head_dim, theta=float(settings["rope_theta"]))
    scaled_H = _SCALINGS[settings.get("rope_type", "default")](plain_H, settings)
    return tables_of(scaled_H, positions=positions, dtype=dtype)


def default_inverse_frequencies(*, head_dim: int, theta: float) -> Tensor:
    """Return theta^(-2h / head_dim), float32, shape H."""
    exponents_H = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return 1.0 / (theta**exponents_H)


def tables_of(
    inverse_frequencies_H: Tensor, *, positions: int, dtype: torch.dtype = torch.float32
) -> RopeTables:
    """Return the tables of positions 0..positions-1.

    Angles, sines and cosines are float32 whatever ``dtype`` is, as in transformers: a float64 table
    holds the same numbers, so that a float64 forward agrees with transformers' far below 1e-9.
    """
    positions_P = torch.arange(positions, dtype=torch.float32)
    angles_PH = positions_P[:, None] * inverse_frequencies_H.to(torch.float32)[None, :]
    return RopeTables(cos_PH=angles_PH.cos().to(dtype), sin_PH=angles_PH.sin().to(dtype))


def _unscaled(plain_H: Tensor, settings: Mapping[str, Any]) -> Tensor:
    return plain_H


def _linear(plain_H: Tensor, settings: Mapping[str, Any]) -> Tensor:
    return plain_H / float(settings["factor"])


def _llama3(plain_H: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Slow waves are stretched by ``factor``, fast ones kept, those between blended (Llama 3.1)."""
    factor = settings["factor"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    trained = settings["original_max_position_embeddings"]
    wavelength_H = 2 * math.pi / plain_H
    # The blend divides the kept wave by ``factor`` in float32 in this order: transformers' last bit.
    share_H = (trained / wavelength_H - low) / (high - low)
    blended_H = (1 - share_H) * plain_H / factor + share_H * plain_H
    slow_H, fast_H = wavelength_H > trained / low, wavelength_H < trained / high
    return torch.where(slow_H, plain_H / factor, torch.where(fast_H, plain_H, blended_H))


_SCALINGS: dict[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
}
