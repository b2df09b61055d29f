"""The drafters of one engine and their health: the only place where speculation falls back to AR.

A drafter can only cost time. Whatever one of its calls raises, and whatever it answers that means nothing,
makes the sequences concerned decode plainly for the round; failures are counted and their causes logged,
after some in a row it is rebuilt, then switched off. What its numbers say is checked here as well.
"""

import logging
import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import SupportsIndex, TypeVar

from torch import Tensor

from controller.types import DraftCost, DrafterTraits
from drafters.types import Drafter, DraftError, DraftRequest, PolicyView, Proposal
from rollout.engine.verify import usable_drafts

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class DrafterSlot:
    """One drafter, and how it has behaved."""

    drafter: Drafter
    version: int = -1
    """The policy version it was last built from; -1 while it is not built."""

    enabled: bool = True
    failures_in_a_row: int = 0
    """Of all its calls, since a proposal was sound and nothing failed since the one before it."""

    failures: int = 0
    failures_at_last_proposal: int = 0
    rebuilds: int = 0
    build_s: float = 0.0
    last_error: str = ""


@dataclass(kw_only=True, slots=True)
class Drafted:
    """What one sequence may be verified with; empty means it decodes plainly."""

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None


NO_DRAFTS = Drafted()
"""What everyone has who decodes plainly; nobody writes to it."""


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
            slot.enabled = name in names and slot.version >= 0

    def works(self, name: str) -> bool:
        """Whether there is such a drafter, built and switched on."""
        slot = self.slots.get(name)
        return slot is not None and slot.enabled and slot.version >= 0

    @property
    def any_enabled(self) -> bool:
        """Whether there is a drafter to ask."""
        return any(slot.enabled for slot in self.slots.values())

    def finished(self, request: DraftRequest) -> None:
        """Tell the drafters that work that a sequence ended whole."""
        for slot in self.slots.values():
            if slot.enabled:
                self._guarded(slot, partial(slot.drafter.finished, request))

    def forget(self, key: int) -> None:
        """Tell every drafter, those that are off too, that a sequence is over."""
        for slot in self.slots.values():
            self._guarded(slot, partial(slot.drafter.forget, key))

    def versions(self) -> dict[str, int]:
        """Return the policy version each drafter was last built from; -1 for one that is not built."""
        return {name: slot.version for name, slot in self.slots.items()}

    def rebuild(self, name: str) -> None:
        """Rebuild one drafter now and give it another chance."""
        slot = self.slots[name]
        slot.enabled, slot.failures_in_a_row, slot.last_error = True, 0, ""
        self._rebuild(slot)

    def _rebuild(self, slot: DrafterSlot) -> None:
        assert self._view is not None, "rebuild_all comes first"
        started = time.perf_counter()
        try:
            slot.drafter.rebuild(self._view)
            slot.version = operator.index(slot.drafter.drafter_version)
        except Exception as error:  # noqa: BLE001 - weights are live and stay so, whatever ails a drafter
            slot.enabled, slot.version, slot.last_error = False, -1, _cause(error)
            slot.failures += 1
            log.warning("ALARM drafter %s cannot be built and is off: %s", slot.drafter.name, slot.last_error)
        slot.build_s = time.perf_counter() - started
        slot.rebuilds += 1

    def ready(self, requests: Sequence[DraftRequest]) -> list[dict[str, int]]:
        """Return per request how many draft tokens each drafter has that can tell without drafting."""
        out: list[dict[str, int]] = [{} for _ in requests]
        for name, slot in self.slots.items():
            if slot.enabled:
                counts = self._guarded(slot, partial(_ready, slot.drafter, requests))
                for told, count in zip(out, counts or (), strict=False):
                    told[name] = count
        return out

    def propose(self, name: str, requests: Sequence[DraftRequest]) -> tuple[dict[int, Drafted], DraftCost]:
        """Return checked drafts by sequence key, and what they cost."""
        started = time.perf_counter()
        slot = self.slots.get(name)
        proposal: Proposal | None = None
        if slot is not None and slot.enabled:
            answer = self._guarded(slot, lambda: self._checked(slot.drafter.propose(requests), requests))
            if answer is not None:
                proposal, drafted, problem = answer
                self._heard(slot, problem)
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

    def hear(self, name: str, problem: str) -> None:
        """Note how it went with a drafter that the engine itself runs; no problem means all was sound."""
        self._heard(self.slots[name], problem)

    def _checked(
        self, proposal: Proposal, requests: Sequence[DraftRequest]
    ) -> tuple[Proposal, dict[int, Drafted], str]:
        """Return the proposal, what of it may be verified, and what was wrong with the rest.

        Drafts before an unsound one are kept: whether row i is sound depends on the drafts before it, so
        dropping those as well would discard them for what they are, which is not exact in ``block``.
        Raises, whatever the type, for an answer that cannot be read at all.
        """
        for answers in (proposal.tokens, proposal.probs):
            if answers is not None and len(answers) != len(requests):
                raise DraftError(f"it answered {len(answers)} of {len(requests)} requests")
        if min(map(operator.index, (proposal.passes, proposal.rows, proposal.context_tokens))) < 0:
            raise DraftError("it says that it ran fewer than no rows")
        drafted: dict[int, Drafted] = {}
        problem = proposal.problem
        for i, request in enumerate(requests):
            tokens, unread = _token_ids(proposal.tokens[i], request.gamma, self._vocab_size)
            probs = None if proposal.probs is None else proposal.probs[i]
            usable, unsound = self._usable(tokens, probs)
            problem = unsound or unread or problem
            rows = None if probs is None or not usable else probs[:usable]
            drafted[request.key] = Drafted(tokens=tokens[:usable], probs=rows)
        return proposal, drafted, problem

    def _usable(self, tokens: list[int], probs: Tensor | None) -> tuple[int, str]:
        """Return how many leading drafts may be verified, and what is wrong with the next one."""
        if probs is None or not tokens:
            return len(tokens), ""
        if not isinstance(probs, Tensor) or probs.dim() != 2 or probs.shape[1] != self._vocab_size:
            said = tuple(probs.shape) if isinstance(probs, Tensor) else type(probs).__name__
            return 0, f"draft distributions are {said}, not rows over {self._vocab_size} tokens"
        return usable_drafts(tokens, probs[: len(tokens)])

    def _guarded(self, slot: DrafterSlot, call: Callable[[], T]) -> T | None:
        """Return what a call of a drafter returns, or None when it raised: that is counted and told."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a drafter can only cost time, whatever it raises
            self._failed(slot, _cause(error))
            return None

    def _heard(self, slot: DrafterSlot, problem: str) -> None:
        """Note a proposal. It ends a row of failures only if no other call failed since the last one."""
        if problem:
            self._failed(slot, problem)
        elif slot.failures == slot.failures_at_last_proposal:
            slot.failures_in_a_row = 0
        slot.failures_at_last_proposal = slot.failures

    def _failed(self, slot: DrafterSlot, cause: str) -> None:
        name = slot.drafter.name
        slot.failures += 1
        slot.failures_in_a_row += 1
        if cause != slot.last_error:  # the count tells how often; a cause is told once
            log.warning("drafter %s failed, what it was asked for decodes plainly: %s", name, cause)
        slot.last_error = cause
        if not slot.enabled:
            return
        if slot.failures_in_a_row == self._failure_limit:
            log.warning("drafter %s failed %d times in a row: rebuilding", name, self._failure_limit)
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
            out[f"drafter/{name}_version"] = float(slot.version)
        return out


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, DraftError) else f"{type(error).__name__}: {error}"


def _ready(drafter: Drafter, requests: Sequence[DraftRequest]) -> list[int] | None:
    told = drafter.ready(requests)
    if told is None:
        return None
    counts = [operator.index(count) for count in told]
    if len(counts) != len(requests):
        raise DraftError(f"it told what it has ready for {len(counts)} of {len(requests)} requests")
    if min(counts, default=0) < 0:
        raise DraftError(f"it has {min(counts)} draft tokens ready")
    return [min(count, r.gamma, drafter.max_gamma) for count, r in zip(counts, requests, strict=True)]


def _token_ids(answer: Iterable[SupportsIndex], gamma: int, vocab_size: int) -> tuple[list[int], str]:
    """Return the ids before the first that is none, at most ``gamma``, and what is wrong with that one."""
    if type(answer) is list and 0 < len(answer) <= gamma and set(map(type, answer)) == {int}:
        # What a model of ours answers: looked at as a whole.
        tokens = list(answer)
        if min(tokens) >= 0 and max(tokens) < vocab_size:
            return tokens, ""
    tokens = []
    try:
        for token in islice(answer, gamma):
            number = operator.index(token)
            if not 0 <= number < vocab_size:
                return tokens, f"draft {number} is outside the vocabulary of {vocab_size}"
            tokens.append(number)
    except (TypeError, ValueError, RuntimeError) as error:
        return tokens, f"its drafts are no token ids: {_cause(error)}"
    return tokens, ""
