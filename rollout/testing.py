"""Tiny real policies for tests: random weights of every family, in memory or as a Hugging Face folder.

Not fakes: engines, drafters and verifiers run them as they run any policy. They are made so that the
distributions they give are neither flat nor one-hot, whatever the family.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout.policy.families import default_inverse_frequencies, tables_of
from rollout.policy.layout import GATE_BIAS, GATE_WEIGHT
from rollout.policy.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

TINY_POSITIONS = 256
TINY_THETA = 10000.0
PAD_ID = 0
EOS_ID = 1
"""End of sequence in every tiny policy and in the character tokenizer."""

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +-*/=?."
"""What the character tokenizer knows, from id 3 on; the rest is ``<unk>``."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ' ' + message['content'] + '. ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)
"""Role initial, content, full stop: all of it characters the tokenizer knows."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ouro": "OuroForCausalLM",
}

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
"""By the name tests ask for; ``smollm2`` is a tied Llama with three query heads on one KV head. Transformers
computes all of these families as well."""

LOOPED_SPECS: dict[str, ModelSpec] = {
    "ouro": replace(
        _BASE,
        family="ouro",
        norm_eps=1e-6,
        loops=4,
        sandwich_norms=True,
        recurrent_norm=True,
        exit_gate=True,
    ),
}
"""Looped families, which transformers does not compute."""

KEPT_WIDTH = 256
"""Random weights of policies up to so wide a hidden state are kept: many tests ask for the same few."""

BRANCH_GAIN = 0.1
"""Gain of the norms before a residual add: a loop moves the state, but not to somewhere else, so a shallow
loop is often and not always of the deepest one's opinion."""


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
    """Return a random policy of ``SPECS`` or ``LOOPED_SPECS``; same seed, same weights, held in ``dtype``."""
    spec = replace({**SPECS, **LOOPED_SPECS}[family], vocab_size=vocab, layers=layers)
    return random_policy(spec, seed=seed, dtype=dtype)


def tiny_looped_policy(
    seed: int = 0,
    vocab: int = 48,
    *,
    loops: int = 4,
    layers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> TinyPolicy:
    """Return a random Ouro policy; same seed and layers, same weights whatever the number of loops."""
    spec = replace(LOOPED_SPECS["ouro"], vocab_size=vocab, layers=layers, loops=loops)
    return random_policy(spec, seed=seed, dtype=dtype)


def random_policy(spec: ModelSpec, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> TinyPolicy:
    """Return a policy of any spec with random weights; same seed, same weights, rounded to ``dtype``."""
    tables = tables_of(
        default_inverse_frequencies(head_dim=spec.head_dim, theta=TINY_THETA), positions=spec.max_positions
    )
    weights = (_kept_state if spec.hidden_size <= KEPT_WIDTH else _random_state)(spec, seed)
    # A copy each time: an update may write into what it was given.
    state = {name: value.to(dtype, copy=True) for name, value in weights.items()}
    return TinyPolicy(spec=spec, cos_PH=tables.cos_PH, sin_PH=tables.sin_PH, state=state)


@functools.cache
def _kept_state(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    return _random_state(spec, seed)


def _random_state(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Return float64 weights. Gains keep every sublayer's output near the size of the residual stream."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * std

    def norm(size: int, gain: float = 1.0) -> Tensor:
        return gain * (1.0 + normal(size, std=0.1))

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
        if spec.sandwich_norms:
            state[f"{prefix}input_layernorm_2.weight"] = norm(hidden, BRANCH_GAIN)
            state[f"{prefix}post_attention_layernorm_2.weight"] = norm(hidden, BRANCH_GAIN)
        state[f"{prefix}mlp.gate_proj.weight"] = normal(inner, hidden, std=1.5 * hidden**-0.5)
        state[f"{prefix}mlp.up_proj.weight"] = normal(inner, hidden, std=1.5 * hidden**-0.5)
        state[f"{prefix}mlp.down_proj.weight"] = normal(hidden, inner, std=1.5 * inner**-0.5)
    state["model.norm.weight"] = norm(hidden)
    if spec.exit_gate:
        state[GATE_WEIGHT] = normal(1, hidden, std=hidden**-0.5)
        state[GATE_BIAS] = normal(1, std=0.3)
    if not spec.tie_embeddings:
        state["lm_head.weight"] = normal(spec.vocab_size, hidden, std=2.0 * hidden**-0.5)
    return state


def tiny_config(spec: ModelSpec) -> "PretrainedConfig":
    """Return the transformers config of a tiny policy."""
    from transformers import AutoConfig

    settings: dict[str, object] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.query_heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": TINY_THETA},
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
    }
    if spec.family == "mistral":
        settings["sliding_window"] = spec.sliding_window
    if spec.family == "ouro":
        from rollout.policy.ouro_config import OuroConfig

        return OuroConfig(total_ut_steps=spec.loops, **settings)
    return AutoConfig.for_model(spec.family, **settings)


def char_tokenizer(vocab: int = 48) -> "PreTrainedTokenizerBase":
    """Return a tokenizer of single characters with a chat template, for ``vocab`` ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    if vocab < len(names):
        raise ValueError(f"the character tokenizer has {len(names)} tokens, more than {vocab}")
    names += [f"<unused{i}>" for i in range(vocab - len(names))]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_folder(
    path: Path, family: str = "llama", *, seed: int = 0, vocab: int = 48, layers: int = 2
) -> TinyPolicy:
    """Write a policy as a Hugging Face folder (config, weights, tokenizer) and return what was written."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    policy = tiny_policy(seed, vocab, family, layers)
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(policy.spec)
    config.architectures = [ARCHITECTURES[policy.spec.family]]
    config.dtype = torch.bfloat16
    config.save_pretrained(path)
    save_file(policy.state, path / "model.safetensors", metadata={"format": "pt"})
    char_tokenizer(vocab).save_pretrained(path)
    GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID).save_pretrained(path)
    return policy
