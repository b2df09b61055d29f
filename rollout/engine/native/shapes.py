"""What forwards of the policy and of its drafters move and compute: the controller's view of a model."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from controller.types import POLICY, PartShape
from drafters.types import Drafter
from drafters.wavefront import WavefrontDrafter
from rollout.engine.native.drafts.view import NativeDraftModel
from rollout.policy.spec import ModelSpec

LANE_ROUND_BYTES = 128_000_000
"""Weights that the passes of a pipeline's own round read together, at most: some five milliseconds of a CPU.
What a round costs beside them, some tenths of one, is little then; longer ones would only let others wait."""


def part_shapes(spec: ModelSpec, drafters: Iterable[Drafter]) -> Mapping[str, PartShape]:
    """Return the shape of the policy and of each drafter, by name."""
    shapes = {POLICY: _shape(spec, POLICY, weight_bytes=2 * _params(spec, spec.loops), loops=spec.loops)}
    for drafter in drafters:
        if isinstance(drafter, WavefrontDrafter) and drafter.depth < spec.loops:
            shapes[drafter.name] = lane_shape(spec, drafter)
            continue
        model = drafter.model if isinstance(drafter.model, NativeDraftModel) else None
        shapes[drafter.name] = _shape(
            spec,
            drafter.name,
            weight_bytes=drafter.weight_bytes,
            loops=spec.loops if model is None else len(model.loops),
            reused_loops=0 if model is None else model.reused_loops,
        )
    return shapes


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Return the bytes of keys and values one token takes over all planes, at two bytes a number."""
    return 2 * spec.planes * spec.kv_heads * spec.head_dim * 2


def _params(spec: ModelSpec, loops: int) -> int:
    """Return the weights that ``loops`` loops and the head read, those of the block once per loop."""
    return spec.body_linear_params * loops + spec.head_params


def lane_shape(spec: ModelSpec, drafter: WavefrontDrafter) -> PartShape:
    """Return the shape of one pass of lanes: each of its rows runs one loop and reads its planes."""
    one_loop = _shape(spec, drafter.name, weight_bytes=2 * _params(spec, 1), loops=1)
    return replace(
        one_loop,
        lane_loops=spec.loops,
        lane_depth=drafter.depth,
        lane_passes=min(drafter.most_passes, LANE_ROUND_BYTES // one_loop.weight_bytes),
    )


def _shape(spec: ModelSpec, name: str, *, weight_bytes: int, loops: int, reused_loops: int = 0) -> PartShape:
    attention_flops = 4.0 * spec.planes * spec.query_heads * spec.head_dim
    return PartShape(
        name=name,
        weight_bytes=weight_bytes,
        flops_per_row=2.0 * _params(spec, loops),
        kv_bytes_per_token=kv_bytes_per_token(spec) * loops // spec.loops,
        flops_per_context_token=attention_flops * loops / spec.loops,
        rows_per_draft_token=1 if weight_bytes else 0,
        reuse_frac=reused_loops * spec.body_linear_params / _params(spec, spec.loops),
    )
