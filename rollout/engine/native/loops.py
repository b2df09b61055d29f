"""Which loops and layers a forward runs, where it starts, and which states of it can be looked at.

Shapes: M rows, D hidden, N states.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine.native.rows import RowBatch
from rollout.policy.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What a forward runs: whole loops, or some layers of one."""

    loops: range
    layers: range
    """Of each of these loops."""

    whole_loops: bool
    """Whether these are all of a loop's layers."""

    ends_loops: bool
    """Whether the last layer is one of them: only then has a loop a state that the next one, the head and the
    exit gate read. Else rows end with the residual stream, which the layer after goes on from."""


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


def tap_place(name: str, course: Course) -> TapPlace:
    """Return the place of a tap's name in a forward. Raises ``ValueError`` where there is none.

    Names are ``embed``, ``final``, ``loop.T``, ``loop.T.layer.L``, and ``layer.L`` of the last loop run.
    """
    match name.split("."):
        case ["embed"]:
            return EMBED
        case ["final"]:
            place = FINAL
        case ["layer", layer] if layer.isdecimal():
            place = TapPlace(loop=course.loops.stop - 1, layer=int(layer))
        case ["loop", loop] if loop.isdecimal():
            place = TapPlace(loop=int(loop))
        case ["loop", loop, "layer", layer] if loop.isdecimal() and layer.isdecimal():
            place = TapPlace(loop=int(loop), layer=int(layer))
        case _:
            raise ValueError(f"there is no tap {name!r}")
    in_loop = place.final or place.loop in course.loops
    after = course.ends_loops if place.layer is None else place.layer in course.layers
    if not in_loop or not after:
        raise ValueError(
            f"there is no tap {name!r} in a forward of loops {course.loops}, layers {course.layers}"
        )
    return place


def checked_course(
    spec: ModelSpec,
    batch: RowBatch,
    *,
    loops: range | None,
    layers: range | None,
    hidden_MD: Tensor | None,
) -> Course:
    """Return the loops and layers to run, all by default.

    Raises ``ValueError`` for those the policy does not have, for some layers of several loops, for head rows
    without the last layer, and when the states to start at are missing, mis-shaped, or given although the
    first layer of loop 0 starts at the tokens.
    """
    loops = _plain(loops, spec.loops, "loops")
    layers = _plain(layers, spec.layers, "layers")
    course = Course(
        loops=loops,
        layers=layers,
        whole_loops=len(layers) == spec.layers,
        ends_loops=layers.stop == spec.layers,
    )
    if len(loops) > 1 and not course.whole_loops:
        raise ValueError(f"layers {layers} are some of a loop's {spec.layers}, and loops {loops} are several")
    if len(batch.head_rows_R) and not course.ends_loops:
        raise ValueError(
            f"the head reads what the last of {spec.layers} layers leaves: layers {layers} "
            f"have no logits for {len(batch.head_rows_R)} head rows"
        )
    at_tokens = loops.start == layers.start == 0
    if (hidden_MD is None) != at_tokens:
        raise ValueError(
            f"loops {loops}, layers {layers} start at {'the tokens' if at_tokens else 'given states'}, "
            f"and states were {'not ' if hidden_MD is None else ''}given"
        )
    if hidden_MD is not None:
        check_states(spec, hidden_MD, rows=batch.rows)
    return course


def _plain(wanted: range | None, count: int, name: str) -> range:
    """Return the wanted ones of ``count``, all by default."""
    if wanted is None:
        return range(count)
    if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= count:
        raise ValueError(f"{name} must be a plain range within {count}, got {wanted}")
    return wanted


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
