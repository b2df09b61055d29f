"""Which loops a forward runs, where it starts, and which states of it can be looked at.

Shapes: M rows, D hidden, N states.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.policy.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TapPlace:
    """A place in a forward whose hidden states may be wanted."""

    loop: int | None = None
    """None: the input, or what the head reads."""

    layer: int | None = None
    """None: after the whole loop; else after this layer of it."""

    final: bool = False
    """Without a loop: what the head reads, and not the input."""


EMBED = TapPlace()
FINAL = TapPlace(final=True)


def tap_place(name: str, loops: range, layers: int) -> TapPlace:
    """Return the place of a tap's name in a forward of ``loops``. Raises ``ValueError`` where there is none.

    Names are ``embed``, ``final``, ``loop.T``, ``loop.T.layer.L``, and ``layer.L`` of the last loop run.
    """
    if name in ("embed", "final"):
        return FINAL if name == "final" else EMBED
    match name.split("."):
        case ["layer", layer] if layer.isdecimal():
            place = TapPlace(loop=loops.stop - 1, layer=int(layer))
        case ["loop", loop] if loop.isdecimal():
            place = TapPlace(loop=int(loop))
        case ["loop", loop, "layer", layer] if loop.isdecimal() and layer.isdecimal():
            place = TapPlace(loop=int(loop), layer=int(layer))
        case _:
            raise ValueError(f"there is no tap {name!r}")
    if place.loop not in loops or (place.layer or 0) >= layers:
        raise ValueError(f"there is no tap {name!r} in a forward of loops {loops} of {layers} layers")
    return place


def checked_loops(spec: ModelSpec, loops: range | None, *, rows: int, hidden_MD: Tensor | None) -> range:
    """Return the loops to run, all by default.

    Raises ``ValueError`` for loops the policy does not have, and when the states to start at are missing,
    mis-shaped, or given although loop 0 starts at the tokens.
    """
    if loops is None:
        loops = range(spec.loops)
    if loops.step != 1 or not 0 <= loops.start < loops.stop <= spec.loops:
        raise ValueError(f"loops must be a plain range within {spec.loops}, got {loops}")
    if (hidden_MD is None) != (loops.start == 0):
        raise ValueError(
            f"loops {loops} start at {'given states' if loops.start else 'the tokens'}, "
            f"and states were {'not ' if hidden_MD is None else ''}given"
        )
    if hidden_MD is not None:
        check_states(spec, hidden_MD, rows=rows)
    return loops


def check_states(spec: ModelSpec, hidden_MD: Tensor, *, rows: int) -> None:
    """Raise ``ValueError`` unless ``hidden_MD`` has a state for each of ``rows`` rows."""
    if hidden_MD.shape != (rows, spec.hidden_size) or not hidden_MD.dtype.is_floating_point:
        raise ValueError(
            f"hidden states must be floats ({rows}, {spec.hidden_size}), "
            f"got {hidden_MD.dtype} {tuple(hidden_MD.shape)}"
        )


def check_kept_states(spec: ModelSpec, states_ND: Tensor) -> None:
    """Raise ``ValueError`` unless ``states_ND`` are states as compiled code reads them."""
    if states_ND.dtype != torch.float32 or not states_ND.is_contiguous():
        raise ValueError("states must be contiguous float32")
    check_states(spec, states_ND, rows=len(states_ND))


def checked_standing(
    depths: Sequence[int], numbers: Sequence[int], *, states: int, rows: int
) -> "tuple[array[int], array[int]]":
    """Return depths and numbers of states, int32, as compiled code reads them.

    Raises ``ValueError`` unless each of ``rows`` rows has one of each, and every number names one of so many
    ``states``.
    """
    depth_M, number_M = array("i", depths), array("i", numbers)
    if not rows == len(depth_M) == len(number_M):
        raise ValueError("depths and numbers must name every row")
    if not 0 <= min(numbers) <= max(numbers) < states:
        raise ValueError(f"numbers must name rows of {states} states")
    return depth_M, number_M


def check_loop_rows(spec: ModelSpec, loop_M: Tensor, *, rows: int) -> None:
    """Raise ``ValueError`` unless ``loop_M`` names a loop for each of ``rows`` rows."""
    if loop_M.shape != (rows,) or loop_M.dtype != torch.int32:
        raise ValueError(f"loop_M must be int32 ({rows},), got {loop_M.dtype} {tuple(loop_M.shape)}")
    if rows and not 0 <= int(loop_M.min()) <= int(loop_M.max()) < spec.loops:
        raise ValueError(f"loop_M must lie in 0..{spec.loops - 1}, got {loop_M.tolist()}")
