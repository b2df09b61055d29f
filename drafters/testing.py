"""Drafters for tests: one that says what it is told to, and one that fails. Both are whole ``Drafter``s."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from drafters.types import DraftError, DraftModel, DraftRequest, PolicyView, Proposal

Script = Callable[[DraftRequest], Sequence[int]]
"""What to draft for one request; more than its gamma is cut."""

ProbsScript = Callable[[DraftRequest, Sequence[int]], Tensor]
"""The rows (len(tokens), V) to report for these drafts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request as it stood when it was asked."""

    key: int
    gamma: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    prompt_uid: str


def continue_from(texts: Mapping[str, Sequence[int]], *, wrong_at: Collection[int] = ()) -> Script:
    """Return a script that drafts each prompt's own known output, by ``prompt_uid``.

    Output indices in ``wrong_at`` are drafted one too high, so that verification rejects exactly there.
    """

    def script(request: DraftRequest) -> list[int]:
        done = len(request.tokens) - request.prompt_tokens
        following = enumerate(texts[request.prompt_uid][done : done + request.gamma], start=done)
        return [token + (index in wrong_at) for index, token in following]

    return script


def in_order(calls: Sequence[Sequence[Sequence[int]]]) -> Script:
    """Return a script that answers each ``propose`` call with the next list of ``calls``, one per request.

    After the last call it drafts nothing.
    """
    answers = iter([tokens for call in calls for tokens in call])
    return lambda _request: next(answers, ())


class _Quiet:
    """What drafters that run no model share."""

    name: str
    weight_bytes = 0
    held_bytes = 0
    switch_tokens_per_sequence = 0
    model: DraftModel | None = None

    def __init__(self, *, name: str, max_gamma: int) -> None:
        self.name = name
        self.max_gamma = max_gamma
        self.drafter_version = -1
        self.ended: list[int] = []
        """Keys heard to have finished."""
        self.forgotten: list[int] = []

    def rebuild(self, view: PolicyView) -> None:
        """Take the version and nothing else."""
        self.drafter_version = view.policy_version

    def ready(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        """Return None: only drafting can tell."""
        return None

    def finished(self, request: DraftRequest) -> None:
        """Note a finished sequence."""
        self.ended.append(request.key)

    def forget(self, key: int) -> None:
        """Note forgotten sequences."""
        self.forgotten.append(key)


class ScriptedDrafter(_Quiet):
    """Drafts what its script says, with the distributions its second script says (point masses without)."""

    def __init__(
        self, script: Script, *, probs: ProbsScript | None = None, name: str = "scripted", max_gamma: int = 8
    ) -> None:
        super().__init__(name=name, max_gamma=max_gamma)
        self._script = script
        self._probs = probs
        self.asked: list[tuple[Asked, ...]] = []
        """The requests of every ``propose`` call."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Ask the script once per request, in order."""
        self.asked.append(
            tuple(
                Asked(
                    key=r.key,
                    gamma=r.gamma,
                    tokens=tuple(r.tokens),
                    prompt_tokens=r.prompt_tokens,
                    prompt_uid=r.prompt_uid,
                )
                for r in requests
            )
        )
        tokens = [list(self._script(r))[: r.gamma] for r in requests]
        probs = None
        if self._probs is not None:
            probs = [self._probs(r, drafts) for r, drafts in zip(requests, tokens, strict=True)]
        return Proposal(tokens=tokens, probs=probs, passes=0, rows=0, context_tokens=0)


class FailingDrafter(_Quiet):
    """Raises in the calls it is told to, counted from 0; in others it drafts ``tokens``."""

    def __init__(
        self,
        *,
        failing_proposals: Collection[int] | None = None,
        failing_rebuilds: Collection[int] = (),
        tokens: Sequence[int] = (),
        name: str = "failing",
        max_gamma: int = 8,
    ) -> None:
        super().__init__(name=name, max_gamma=max_gamma)
        self._failing_proposals = failing_proposals
        """None: every one."""
        self._failing_rebuilds = failing_rebuilds
        self._tokens = list(tokens)
        self.proposals = 0
        self.rebuilds = 0

    def rebuild(self, view: PolicyView) -> None:
        """Raise ``DraftError`` when this rebuild is one that fails."""
        this, self.rebuilds = self.rebuilds, self.rebuilds + 1
        if this in self._failing_rebuilds:
            self.drafter_version = -1
            raise DraftError(f"{self.name}: rebuild {this} fails on purpose")
        super().rebuild(view)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Raise ``DraftError`` when this call is one that fails."""
        this, self.proposals = self.proposals, self.proposals + 1
        if self._failing_proposals is None or this in self._failing_proposals:
            raise DraftError(f"{self.name}: proposal {this} fails on purpose")
        return Proposal(
            tokens=[self._tokens[: r.gamma] for r in requests], probs=None, passes=0, rows=0, context_tokens=0
        )
