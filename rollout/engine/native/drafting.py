"""The drafters of one engine and their health: the only place where speculation falls back to AR.

A drafter can only cost time. Whatever goes wrong in it makes the sequences concerned decode plainly for
the round; failures are counted and logged, after some in a row it is rebuilt, then switched off.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from controller.types import DraftCost, DrafterTraits
from drafters.types import Drafter, DraftError, DraftRequest, PolicyView, Proposal
from rollout.engine.verify import usable_drafts

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class DrafterSlot:
    """One drafter, and how it has behaved."""

    drafter: Drafter
    enabled: bool = True
    failures_in_a_row: int = 0
    failures: int = 0
    rebuilds: int = 0
    build_s: float = 0.0
    last_error: str = ""


@dataclass(kw_only=True, slots=True)
class Drafted:
    """What one sequence may be verified with; empty means it decodes plainly."""

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None


class Drafting:
    """Asks drafters for proposals and checks every answer before anything is verified with it."""

    def __init__(self, drafters: Sequence[Drafter], *, vocab_size: int, failure_limit: int) -> None:
        self.slots = {d.name: DrafterSlot(drafter=d) for d in drafters}
        self._vocab_size = vocab_size
        self._failure_limit = failure_limit
        self._view: PolicyView | None = None

    def traits(self) -> tuple[DrafterTraits, ...]:
        """Return what the controller may ask of the drafters that work."""
        return tuple(
            DrafterTraits(
                name=name,
                max_gamma=slot.drafter.max_gamma,
                switch_tokens_per_sequence=slot.drafter.switch_tokens_per_sequence,
            )
            for name, slot in self.slots.items()
            if slot.enabled
        )

    def rebuild_all(self, view: PolicyView) -> None:
        """Rebuild every drafter from the live policy; one that refuses is switched off, and said so."""
        self._view = view
        for name in self.slots:
            self.rebuild(name)

    def use_only(self, names: Collection[str]) -> None:
        """Switch every other drafter off, until the next rebuild; one that was never built stays off.

        Raises ``ValueError`` for an unknown name.
        """
        unknown = sorted(set(names) - set(self.slots))
        if unknown:
            raise ValueError(f"no drafter {', '.join(unknown)}; there are: {', '.join(self.slots) or 'none'}")
        for name, slot in self.slots.items():
            slot.enabled = name in names and slot.drafter.drafter_version >= 0

    def committed(self, request: DraftRequest, *, finished: bool) -> None:
        """Tell the drafters that a sequence grew; one that is off costs nothing and catches up later."""
        for slot in self.slots.values():
            if slot.enabled:
                slot.drafter.committed(request, finished=finished)

    def rebuild(self, name: str) -> None:
        """Rebuild one drafter now and give it another chance."""
        slot = self.slots[name]
        slot.enabled, slot.failures_in_a_row = True, 0
        self._rebuild(slot)

    def _rebuild(self, slot: DrafterSlot) -> None:
        assert self._view is not None, "rebuild_all comes first"
        started = time.perf_counter()
        try:
            slot.drafter.rebuild(self._view)
        except DraftError as error:
            slot.enabled, slot.last_error = False, str(error)
            log.warning("ALARM drafter %s cannot be built and is off: %s", slot.drafter.name, error)
        slot.build_s = time.perf_counter() - started
        slot.rebuilds += 1

    def ready(self, request: DraftRequest) -> dict[str, int]:
        """Return, per drafter that can tell without drafting, how many draft tokens it has."""
        out: dict[str, int] = {}
        for name, slot in self.slots.items():
            if slot.enabled:
                count = slot.drafter.ready(replace(request, gamma=min(request.gamma, slot.drafter.max_gamma)))
                if count is not None:
                    out[name] = count
        return out

    def propose(self, name: str, requests: Sequence[DraftRequest]) -> tuple[dict[int, Drafted], DraftCost]:
        """Return checked drafts by sequence key, and what they cost."""
        started = time.perf_counter()
        slot = self.slots.get(name)
        proposal: Proposal | None = None
        if slot is not None and slot.enabled:
            try:
                proposal = slot.drafter.propose(requests)
                drafted, problem = self._checked(name, requests, proposal)
                if problem:
                    self._failed(slot, DraftError(problem))
                else:
                    slot.failures_in_a_row = 0
            except DraftError as error:
                self._failed(slot, error)
                proposal = None
        if proposal is None:
            drafted = {r.key: Drafted() for r in requests}
        return drafted, DraftCost(
            drafter=name,
            passes=proposal.passes if proposal else 0,
            rows=proposal.rows if proposal else 0,
            context_tokens=proposal.context_tokens if proposal else 0,
            seconds=time.perf_counter() - started,
            failures=0 if proposal else len(requests),
        )

    def _checked(
        self, name: str, requests: Sequence[DraftRequest], proposal: Proposal
    ) -> tuple[dict[int, Drafted], str]:
        """Return what may be verified, and what was wrong with the rest.

        Drafts before an unsound one are kept: whether row i is sound depends on the drafts before it, so
        dropping those as well would discard them for what they are, which is not exact in ``block``.
        """
        if len(proposal.tokens) != len(requests):
            raise DraftError(f"{name} answered {len(proposal.tokens)} of {len(requests)} requests")
        drafted: dict[int, Drafted] = {}
        problem = proposal.problem
        for i, request in enumerate(requests):
            tokens = list(proposal.tokens[i])[: request.gamma]
            probs = None if proposal.probs is None else proposal.probs[i][: len(tokens)]
            inside = next((j for j, t in enumerate(tokens) if not 0 <= t < self._vocab_size), len(tokens))
            if inside < len(tokens):
                problem = f"draft {tokens[inside]} is outside the vocabulary of {self._vocab_size}"
                tokens, probs = tokens[:inside], None if probs is None else probs[:inside]
            usable, unsound = usable_drafts(tokens, probs)
            problem = unsound or problem
            tokens, probs = tokens[:usable], None if probs is None else probs[:usable]
            drafted[request.key] = Drafted(tokens=tokens, probs=probs if tokens else None)
        return drafted, problem

    def _failed(self, slot: DrafterSlot, error: DraftError) -> None:
        name = slot.drafter.name
        slot.failures += 1
        slot.failures_in_a_row += 1
        slot.last_error = str(error)
        log.warning("drafter %s failed, this round decodes plainly: %s", name, error)
        if slot.failures_in_a_row == self._failure_limit:
            log.warning(
                "drafter %s failed %d times in a row: rebuilding", slot.drafter.name, self._failure_limit
            )
            self._rebuild(slot)
        elif slot.failures_in_a_row >= 2 * self._failure_limit:
            slot.enabled = False
            log.warning("ALARM drafter %s still fails after a rebuild and is off", name)

    def gauges(self) -> Mapping[str, float]:
        """Return loggable numbers per drafter."""
        out: dict[str, float] = {}
        for name, slot in self.slots.items():
            out[f"drafter/{name}_failures"] = float(slot.failures)
            out[f"drafter/{name}_enabled"] = float(slot.enabled)
            out[f"drafter/{name}_build_s"] = slot.build_s
            out[f"drafter/{name}_version"] = float(slot.drafter.drafter_version)
        return out
