"""Ways to draft that are put to the test: a drafter, the loops after which drafts are read out, lengths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controller.types import EngineTraits
from drafters.config import DrafterConfig
from drafters.wavefront import WAVEFRONT
from rollout.evaluation.cost_law import depth_of
from rollout.evaluation.sweep import draft_lengths

SHALLOWEST = 1
"""Where lanes are tested beside the depth that is set: the most of them travel there, and the most fall."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftWay:
    """One drafter at one depth."""

    drafter: str
    depth: int
    """Of the policy's loops; 0 for drafts that are no readout of it."""

    gammas: tuple[int, ...]

    @property
    def name(self) -> str:
        """The drafter's, which tells its depth, or is told it."""
        return f"{self.drafter} at depth {self.depth}" if self.drafter == WAVEFRONT else self.drafter

    def config(self, given: DrafterConfig) -> DrafterConfig:
        """Return settings under which the drafter drafts this way."""
        return replace(given, wavefront_depth=self.depth) if self.drafter == WAVEFRONT else given


def ways_of(
    drafters: Sequence[str],
    gammas: Sequence[int],
    *,
    config: DrafterConfig,
    traits: EngineTraits,
    loops: int,
) -> tuple[DraftWay, ...]:
    """Return every drafter at its depth, ``wavefront`` first at that of ``config`` and then at the least."""
    ways = []
    for drafter in drafters:
        depths = [depth_of(drafter)]
        if drafter == WAVEFRONT:
            depths = [config.wavefront_depth, SHALLOWEST]
        for depth in dict.fromkeys(depths):
            lanes = -(-loops // depth) if depth else 1
            lengths = draft_lengths(drafter, gammas, traits=traits, most_lanes=lanes)
            ways.append(DraftWay(drafter=drafter, depth=depth, gammas=lengths))
    return tuple(ways)
