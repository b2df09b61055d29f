"""The seam between whatever decides and whatever computes: one round at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from controller.types import EngineTraits, InFlight, PartShape, RoundFacts, RoundLoad, RoundPlan
from rollout.policy.manifest import UpdateManifest
from rollout.tokens import Tokens
from rollout.types import Completion, Request

if TYPE_CHECKING:  # whoever only passes requests on need not load torch
    from torch import Tensor


class Emission(NamedTuple):
    """Tokens one request committed in a round, for streams.

    A tuple: one of each sequence is made in every round.
    """

    key: tuple[str, int]
    attempt: int
    first_index: int
    """Index of ``tokens[0]`` among the tokens of the completion to come; ``prefix_ids`` do not count."""

    tokens: Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOutcome:
    """What a round produced."""

    facts: RoundFacts
    emissions: tuple[Emission, ...]
    completions: tuple[Completion, ...]
    """Requests that ended in this round, each exactly once."""


LookUp = Callable[[RoundLoad], bool]


def always(_load: RoundLoad) -> bool:
    """Answer yes: the ``look_up`` of whoever reads all that drafters have ready."""
    return True


class Engine(Protocol):
    """One replica. Not thread-safe: one loop owns it, and weights change only between rounds."""

    policy_version: int
    fingerprint: str

    @property
    def traits(self) -> EngineTraits:
        """What it can do, and the limits it does it within."""
        ...

    def add(self, request: Request, *, resumed: bool = False) -> None:
        """Queue a request. Raises a ``RequestError`` for this item alone.

        ``resumed``: its prefix was made under the live weights and must not go on under others unseen, so
        updates treat it as running from the start: ``drain`` lets it in and waits for it, ``abort`` ends it.
        """
        ...

    def abort(self, key: tuple[str, int], *, reason: str = "") -> Completion | None:
        """End a request now with what it has; None when it is unknown or already over. Idempotent."""
        ...

    def load(self, *, look_up: LookUp = always) -> RoundLoad:
        """Admit what fits and say what the next round will decode.

        ``look_up`` says, of that, whether it is worth asking drafters what they have ready for free.
        """
        ...

    def run_round(self, plan: RoundPlan) -> RoundOutcome:
        """Draft, verify and commit once for the running batch, with prompt chunks mixed in."""
        ...

    def untold(self) -> Sequence[Emission]:
        """Return committed tokens that no round has emitted yet, and count them as emitted."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        ...

    @property
    def running(self) -> int:
        """Sequences whose text has begun, ``resumed`` ones included; ``drain`` waits until there are none."""
        ...

    def begin_update(self, manifest: UpdateManifest, *, in_flight: InFlight) -> None:
        """Open a weight update. Raises ``WeightUpdateError`` or ``UnsupportedError``."""
        ...

    def stage(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take one bucket of the open update."""
        ...

    def check_update(self) -> None:
        """Check everything that was staged; after this, ``commit_update`` cannot fail on its tensors.

        Raises ``WeightUpdateError`` and closes the update. Several hosts check before any commits.
        """
        ...

    def settle_running(self) -> list[Completion]:
        """Do to what is ``running`` as the open update's mode asks (abort, recompute), before its commit."""
        ...

    def commit_update(self) -> int:
        """Check, switch, clear caches of the old version, rebuild drafters; return the live version."""
        ...

    def discard_update(self) -> None:
        """Drop an open update; the live version is untouched."""
        ...

    def part_shapes(self) -> Mapping[str, PartShape]:
        """Return the cost shapes of the policy and of each drafter."""
        ...

    def time_forward(self, part: str, *, rows: int, context_tokens: int, sequences: int = 0) -> float:
        """Return the seconds of one forward of ``part`` with every row at ``context_tokens`` of context.

        ``sequences`` (default ``rows``) says how many sequences the rows belong to. Only when idle.
        """
        ...

    def gauges(self) -> Mapping[str, float]:
        """Return loggable numbers, ``area/what_unit``."""
        ...

    def close(self) -> None:
        """Free everything; running requests are dropped."""
        ...
