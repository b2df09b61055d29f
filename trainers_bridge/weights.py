"""The trainer's weights as the service takes them: whole, by Hugging Face name, ties sent once."""

from typing import Any

import torch
from torch import Tensor

from trainers_bridge.contract import PolicyPushError


def policy_state(model: Any, *, dtype: torch.dtype, stochastic_seed: int | None = None) -> dict[str, Tensor]:
    """Return detached CPU copies of all weights of an unwrapped model, floats rounded to ``dtype``.

    Rounding is to nearest even, as the engine's own would be; with a seed, float32 to bfloat16 is
    stochastic instead for weights that are trained (see ``round_stochastically``).

    Raises ``PolicyPushError`` for a model whose state dict is not its weights: adapters would have to be
    merged in float32 first, packed weights unpacked.
    """
    if getattr(model, "peft_config", None):
        raise PolicyPushError(
            "the policy has adapters, which the service does not take; merge them in float32 and train the "
            "merged model, or push merged weights yourself"
        )
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise PolicyPushError(
            "the policy's weights are packed; train a model with plain floating-point weights"
        )
    tied = _tied_names(model)
    moving = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    generator = None if stochastic_seed is None else torch.Generator().manual_seed(stochastic_seed)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name in tied:
            continue
        plain = value.detach().to(device="cpu", copy=True)
        fine = plain.dtype == torch.float32 and dtype == torch.bfloat16
        if generator is not None and fine and name in moving:
            state[name] = round_stochastically(plain, generator)
        else:
            state[name] = plain.to(dtype) if plain.is_floating_point() else plain
    return state


def round_stochastically(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 ``value`` in bfloat16, up or down with the odds that keep its mean.

    A trainer's step moves a weight by less than half the spacing of bfloat16, so rounding to nearest
    serves the old policy for many steps and then jumps. Rounded this way, the served policy moves with
    the trained one. A value bfloat16 holds exactly stays as it is; infinities and NaN stay what they are.
    """
    bits = value.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32)
    up = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(torch.isfinite(value), up, value).to(torch.bfloat16)


def _tied_names(model: Any) -> set[str]:
    """Names that are another name's storage in this model, the input embedding's own excepted."""
    first_name: dict[int, str] = {}
    tied: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_name.setdefault(id(parameter), name) != name:
            tied.add(name)
    return tied


def check_pushable(trainer: Any) -> None:
    """Raise ``PolicyPushError`` when no process of ``trainer`` holds the whole policy."""
    for flag, name in (("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DeepSpeed")):
        if getattr(trainer, flag, False):
            raise PolicyPushError(
                f"{name} shards the policy; this bridge pushes weights held whole by one process"
            )
