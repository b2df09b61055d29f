"""The policy's folder: published config fields, bfloat16 weights, tokenizer, generation settings, prompts."""

import json
from pathlib import Path
from typing import Any

import torch

from trainers_bridge.looped.model import OuroForCausalLM
from trainers_bridge.looped.questions import QUESTIONS_FILE, questions
from trainers_bridge.looped.tokenizer import END_ID, PAD_ID, build_tokenizer

WEIGHTS = "model.safetensors"
PUBLISHED = (
    "bos_token_id",
    "early_exit_threshold",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "tie_word_embeddings",
    "total_ut_steps",
    "vocab_size",
)
"""Settings a folder carries under their own names. Options of training belong to a training, not to it."""


def write_policy(model: OuroForCausalLM, folder: Path) -> None:
    """Write the folder; weights are rounded once, to nearest, from what was trained."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published_config(model.config), indent=2) + "\n")
    state = {
        name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
    }
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / QUESTIONS_FILE).write_text("".join(f"{question}\n" for question in questions()))
    build_tokenizer(max_tokens=model.config.max_position_embeddings).save_pretrained(folder)
    GenerationConfig(
        bos_token_id=END_ID, eos_token_id=END_ID, pad_token_id=PAD_ID, use_cache=False
    ).save_pretrained(folder)


def published_config(config: Any) -> dict[str, Any]:
    """Return the config as Ouro's folders write it, with the rotary base where those have it."""
    plain: dict[str, Any] = {name: getattr(config, name) for name in PUBLISHED}
    plain |= {
        "architectures": ["OuroForCausalLM"],
        "dtype": "bfloat16",
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
    }
    return dict(sorted(plain.items()))


def load_served(folder: Path) -> OuroForCausalLM:
    """Return a folder's policy in float32, its weights as rounded there, ready to be scored."""
    model: OuroForCausalLM = OuroForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model
