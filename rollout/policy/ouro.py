"""What an Ouro config adds to a Llama's: loops, norms and a gate, and which of its settings are refused.

Every token runs every loop, and every (loop, layer) keeps keys and values of its own. Only then do keys
read at a loop depend on no later loop, so that loops drafted with may be kept when the rest verifies.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_LOOPS = 256
"""Loops a config may ask for: published policies have 4. A start computes test forwards of all loops, so a
number that is none would be found out minutes later, by a KV pool that cannot hold its planes."""

_SHARING_WORDS = ("shar", "reuse", "first_step", "last_step", "first_loop", "last_loop")
_CACHE_WORDS = ("kv", "cache", "key_value", "plane", "cross_loop")


def ouro_properties(config: "PretrainedConfig") -> dict[str, Any]:
    """Return the fields of a ``ModelSpec`` that make it an Ouro."""
    return {
        "loops": config.total_ut_steps,
        "sandwich_norms": True,
        "recurrent_norm": True,
        "exit_gate": True,
    }


def ouro_problems(config: "PretrainedConfig") -> list[str]:
    """Return what a looped config asks for and the engine does not compute, each with its reason."""
    problems = []
    loops = config.total_ut_steps
    if isinstance(loops, bool) or not isinstance(loops, int) or loops < 1:
        problems.append(f"total_ut_steps={loops!r} is no number of loops")
    elif loops > MOST_LOOPS:
        problems.append(f"total_ut_steps={loops} is more than the {MOST_LOOPS} loops that are supported")
    threshold = getattr(config, "early_exit_threshold", None)
    if threshold is not None and not _at_least_one(threshold):
        problems.append(
            f"early_exit_threshold={threshold!r} lets tokens leave early: speculation and KV planes per loop "
            "need every token to run every loop (1.0)"
        )
    step = getattr(config, "early_exit_step", None)
    if step is not None:
        problems.append(
            f"early_exit_step={step!r} lets tokens leave early: speculation and KV planes per loop need "
            "every token to run every loop (null)"
        )
    problems += [
        f"{name}={value!r} shares keys and values between loops: what a drafted token reads would then "
        "depend on loops it has not run"
        for name, value in _kv_sharing(config)
    ]
    if getattr(config, "use_sliding_window", False):
        problems.append("use_sliding_window=True is not supported with loops")
    problems += [
        f"{name}=True is not part of the family"
        for name in ("attention_bias", "mlp_bias")
        if getattr(config, name, False)
    ]
    return problems


def _at_least_one(threshold: object) -> bool:
    return isinstance(threshold, int | float) and threshold >= 1


def _kv_sharing(config: "PretrainedConfig") -> list[tuple[str, Any]]:
    """Return the settings by which some variant keeps fewer KV planes, whatever it calls them."""
    found = []
    for name, value in config.to_dict().items():
        if not value or not any(word in name.lower() for word in _CACHE_WORDS):
            continue
        if any(word in f"{name} {value}".lower() for word in _SHARING_WORDS):
            found.append((name, value))
    return found
