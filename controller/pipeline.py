"""What a pipeline over the loops of a looped policy brings, and when it is the best a round can do.

A token runs ``loops`` passes to the target's choice. After ``depth`` of them it proposes its successor, which
travels behind it. A right proposal is done ``depth`` passes after the token before it; after a wrong one the
next token starts afresh and takes all ``loops``. With right proposals at a rate of alpha a token takes
alpha * depth + (1 - alpha) * loops passes. A round runs ``loops`` of them, and more where nothing else is in
it (``PartShape.passes_of``).

Shapes in this file: B sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from controller.allocate import Allocation, Batch
from controller.candidates import Candidates
from controller.cost import CostModel
from controller.types import POLICY, PartShape

Floats = NDArray[np.float64]
Number = TypeVar("Number", float, Floats)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One drafter of that kind."""

    shape: PartShape

    @property
    def depth(self) -> int:
        """Passes after which a token proposes the next one."""
        return self.shape.lane_depth

    @property
    def loops(self) -> int:
        """Passes of a token."""
        return self.shape.lane_loops

    def passes_per_token(self, alpha: Number) -> Number:
        """Return the passes after which a sequence commits its next token, in a steady state."""
        return alpha * self.depth + (1.0 - alpha) * self.loops

    def mean_lanes(self, alpha: float) -> float:
        """Return the tokens of one sequence under way, over all passes.

        Afresh, they are 1 for ``depth`` passes, then 2 and so on. A full pipeline holds every token for
        ``loops`` passes and ends one every ``depth``, until a proposal was wrong.
        """
        filling = sum(1 + passed // self.depth for passed in range(self.loops))
        full_passes = alpha * self.depth
        fresh_passes = (1.0 - alpha) * self.loops
        full = self.loops / self.depth
        return ((1.0 - alpha) * filling + full * full_passes) / (fresh_passes + full_passes)


def pipelines_of(shapes: Mapping[str, PartShape]) -> dict[str, Pipeline]:
    """Return the parts that are pipelines."""
    return {name: Pipeline(shape=shape) for name, shape in shapes.items() if shape.lane_loops}


def allocate_lanes(batch: Batch, candidates: Candidates, cost: CostModel, pipeline: Pipeline) -> Allocation:
    """Return the round in which every sequence that can travels in lanes, priced as it will go on.

    Sequences with room for no draft decode plainly beside them.
    """
    in_lanes_B = candidates.cap_B > 0
    in_lanes = int(np.count_nonzero(in_lanes_B))
    plain = batch.size - in_lanes
    alpha_B = candidates.survival_BP[:, 0]
    # A round that has it all to itself ends with the first sequence that is over.
    over_passes = ((batch.room_B + 1.0) * pipeline.passes_per_token(alpha_B))[in_lanes_B].min()
    most = pipeline.shape.passes_of(in_lanes, alone=plain == 0)
    passes = max(float(pipeline.loops), min(float(most), float(over_passes)))
    tokens_B: Floats = np.where(
        in_lanes_B, np.minimum(passes / pipeline.passes_per_token(alpha_B), batch.room_B + 1.0), 1.0
    )
    seconds = cost.lanes_s(
        candidates.label,
        lanes=pipeline.mean_lanes(float(alpha_B[in_lanes_B].mean())),
        sequences=in_lanes,
        read_tokens=float(batch.context_B[in_lanes_B].sum()),
        passes=passes,
    )
    if plain:
        read = float(batch.context_B[~in_lanes_B].sum())
        seconds += cost.forward_s(POLICY, rows=plain, sequences=plain, read_tokens=read, context_tokens=read)
    base_s, per_row_s = cost.other_line_s(speculates=True)
    seconds += base_s + per_row_s * plain
    gains_B = np.log(tokens_B) if batch.tail else tokens_B - 1.0
    speed = float(batch.speed(np.asarray((gains_B * batch.worth_B).sum())))
    return Allocation(
        candidates=candidates,
        gamma_B=candidates.cap_B,
        worth_per_s=speed / seconds,
        tokens=float(tokens_B.sum()),
        seconds=seconds,
    )
