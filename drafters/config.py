"""Settings of the drafters. Imports nothing heavy."""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Which drafters exist in an engine, and how they are built."""

    names: tuple[str, ...] = ("w4", "history")
    """From ``drafters/registry.py``; the controller chooses among them."""

    max_gamma: int = 8
    w4_group: int = 32
    """Weights along the in features that share a 4-bit scale; a multiple of 32."""

    w4_head_bits: Literal[8, 16] = 8
    w4_screen: Literal["auto", "on", "off"] = "auto"
    """Whether a 4-bit copy of the head ranks all tokens, so that the head looks at the first few only. Takes
    the memory of that copy; drafts stay what they were but for one in thousands. ``auto``: in the compiled
    decoder under ``verify=coupled``, from 8192 tokens on; elsewhere it would never be read. Passes beside
    requests with filters and those of requests with penalties, bias or bans do without."""

    w4_kernel: Literal["auto", "compiled", "aten", "int8", "nf4", "torch"] = "auto"
    """``compiled``: our own int4, and all that runs inside the compiled decoder; ``aten``: torch's int4pack;
    ``int8``: torch's integer product; ``nf4``: bitsandbytes (extra ``bnb``); ``torch``: the oracle. ``auto``
    in the torch decoder: by row count the fastest that can run here, timed once per machine and kept beside
    its calibrations. A kernel's weights are packed when rows that it is the fastest for first come."""

    history_min_match: int = 2
    """Shortest suffix that counts as a match."""

    history_max_match: int = 16
    history_prompts: int = 512
    """Prompts whose earlier rollouts are kept; the least recently used is dropped."""

    wavefront_depth: int = 1
    """Loops of a looped policy after which a token proposes its successor in ``wavefront``. The fewer, the
    more tokens travel at once: worth it as long as that readout is usually right."""

    wavefront_passes: int = 64
    """Most passes of a ``wavefront`` round in which nothing else is computed, divided among its sequences.
    More of them spare what a round costs beside its passes; whatever arrives meanwhile waits for their end. A
    policy whose passes are long runs fewer, none fewer than it has loops: what plain decoding takes."""

    failure_limit: int = 3
    """Failures in a row before a drafter is rebuilt, and again before it is switched off."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if get_origin(f.type) is Literal and value not in get_args(f.type):
                raise ValueError(f"drafter.{f.name} must be one of {get_args(f.type)}, got {value!r}")
            if f.type is int and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"drafter.{f.name} must be a whole number >= 1, got {value!r}")
        if len(set(self.names)) < len(self.names) or "" in self.names:
            raise ValueError(f"drafter.names must name each drafter once, got {list(self.names)}")
        if self.w4_group % 32:
            raise ValueError(f"drafter.w4_group must be a multiple of 32, got {self.w4_group}")
        if self.history_min_match > self.history_max_match:
            raise ValueError("drafter.history_min_match must be in 1..history_max_match")
