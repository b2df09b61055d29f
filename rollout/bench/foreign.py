"""Foreign engines as a benchmark sees them: told our lengths, they answer with seconds.

They sample other texts, so they replay lengths: no row ends at an end-of-sequence id, every row at its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rollout.bench.hf_arm import HfArm, Way

Prompts = Sequence[Sequence[int]]


class Foreign(Protocol):
    """A foreign engine within one cell."""

    def prepare(self, prompts: Prompts, lengths: Sequence[int], *, temperature: float) -> Mapping[str, Any]:
        """Warm up for this work and settle what a pilot chooses; return what the pilot found."""

    def replay(self, prompts: Prompts, lengths: Sequence[int], *, temperature: float) -> float:
        """Generate exactly ``lengths[i]`` tokens for prompt i; return seconds. Raises ``ReplayError``."""


@dataclass(kw_only=True, slots=True)
class HfReplay:
    """transformers, in the way that is fastest for a cell's work."""

    arm: HfArm
    way: Way | None = None
    """Chosen by ``prepare``."""

    def prepare(self, prompts: Prompts, lengths: Sequence[int], *, temperature: float) -> Mapping[str, Any]:
        """Time every way on a shortened work and keep the fastest."""
        pilot = self.arm.choose(prompts, lengths, temperature=temperature)
        self.way = pilot.chosen
        return asdict(pilot)

    def replay(self, prompts: Prompts, lengths: Sequence[int], *, temperature: float) -> float:
        """Replay in the chosen way."""
        assert self.way is not None, "prepare comes first"
        return self.arm.replay(prompts, lengths, temperature=temperature, way=self.way)
