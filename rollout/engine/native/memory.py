"""What an engine keeps in memory, part by part."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes of one engine's parts: weights, KV and the states and logits of forwards, each once."""

    weights: int
    """The policy's, each kept once."""

    drafters: int
    """Weights that drafters keep beside the policy's. What they share with it (a head, the loops of a looped
    policy) is the policy's."""

    kv_used: int
    """Pages that hold something now. The pool may be larger; a page takes memory once it is written."""

    scratch: int
    """Hidden states and logits of the widest forward so far, of the policy and of each drafter's model that
    has memory of its own for them."""
