"""Which Ouro configs can be trained here, and the options of training that ride along in them.

Settings that ask for another computation than ``model.py`` has are refused by name, never approximated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import UnsupportedError

LOSS_WEIGHTS = "loop_loss_weights"
"""Name in a config, not published: the weight of each loop's cross entropy where labels are given."""

DISTILLATION_WEIGHT = "loop_distillation_weight"
"""Name in a config, not published: the weight of the mean KL(last loop || earlier loop)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopLosses:
    """The losses of loops a config asks for."""

    weights: tuple[float, ...]
    """Of the cross entropies, loop by loop."""

    distillation: float
    """0: the shallow loops are not held to the deepest."""


def loop_losses(config: Any) -> LoopLosses:
    """Return what ``config`` asks for; where it says nothing, the last loop's cross entropy alone.

    Read at every pass, so a trainer may set the options on the config of a loaded model.
    """
    loops = int(config.total_ut_steps)
    given: Sequence[float] | None = getattr(config, LOSS_WEIGHTS, None)
    weights = tuple(map(float, given)) if given is not None else (0.0,) * (loops - 1) + (1.0,)
    if len(weights) != loops:
        raise UnsupportedError(f"{LOSS_WEIGHTS} has {len(weights)} values for {loops} loops")
    return LoopLosses(weights=weights, distillation=float(getattr(config, DISTILLATION_WEIGHT, None) or 0.0))


def check_trainable(config: Any) -> None:
    """Raise ``UnsupportedError`` with everything in an Ouro config that ``model.py`` does not compute."""
    problems = []
    threshold = getattr(config, "early_exit_threshold", None)
    step = getattr(config, "early_exit_step", None)
    if step is not None or (threshold is not None and threshold < 1.0):
        problems.append(
            f"early_exit_threshold={threshold}, early_exit_step={step}: only a fixed depth is trained"
        )
    if config.hidden_act != "silu":
        problems.append(f"hidden_act={config.hidden_act!r} is not computed, only 'silu'")
    if getattr(config, "attention_dropout", 0.0):
        problems.append(f"attention_dropout={config.attention_dropout} is not computed")
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind != "default":
        problems.append(f"rope_type={kind!r} is not computed, only 'default'")
    if getattr(config, "use_sliding_window", False):
        problems.append("use_sliding_window is not computed")
    if config.num_attention_heads % config.num_key_value_heads:
        problems.append(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if problems:
        raise UnsupportedError(f"ouro config: {'; '.join(problems)}")
    loop_losses(config)
