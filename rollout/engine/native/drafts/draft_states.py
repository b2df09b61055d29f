"""Hidden states that drafts of a looped policy left in this round: what verification may go on from.

A state stands for a row only while all it was computed from is what verification will compute: the same token
at its position, the same tokens at every drafted position before it, all run to the same depth, and nobody
else's keys written there since. Nothing outlives its round.

Shapes: M rows of a draft pass, D hidden, N states kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from drafters.types import DraftRequest

_CPU = torch.device("cpu")


@dataclass(kw_only=True, slots=True)
class _Chain:
    """Drafted rows of one sequence, without a gap."""

    start: int
    """Position of the first; where that is not the last committed token's, nothing may go on from here."""

    depth: int
    """Loops each of them has had."""

    tokens: list[int] = field(default_factory=list)
    """What was fed at each position."""

    states: list[int] = field(default_factory=list)
    """The number of each row's state."""


def _firsts(counts: Sequence[int], first: int) -> Sequence[int]:
    """Return the number of the first state of each pass; row i is in ``counts[i]`` of them, never rising."""
    if not counts:
        return ()
    if counts[0] == counts[-1]:
        return range(first, first + counts[0] * len(counts), len(counts))
    live = [sum([count > index for count in counts]) for index in range(counts[0])]
    return list(accumulate(live, initial=first))


class DraftStates:
    """The states of one round, by sequence and position. Empty between rounds."""

    def __init__(self) -> None:
        self._chains: dict[int, _Chain] = {}
        self._memory_ND = torch.empty(0, 0)
        """Used again in every round."""
        self._kind: tuple[int, torch.dtype, torch.device] | None = None
        self._capacity = 0
        """Rows of it: asking a tensor takes longer."""
        self._count = 0

    def clear(self) -> None:
        """Forget all: the round is over, or what it computed is not to be used."""
        self._chains.clear()
        self._count = 0

    def room(
        self, rows: int, width: int, *, dtype: torch.dtype = torch.float32, device: torch.device = _CPU
    ) -> tuple[Tensor, int]:
        """Return memory for states, and the number of the first of ``rows`` rows that are now the caller's.

        Rows before keep what they hold; the memory is valid until the next call.
        """
        needed, memory_ND, kind = self._count + rows, self._memory_ND, (width, dtype, device)
        if kind != self._kind or needed > self._capacity:
            self._memory_ND = torch.empty(2 * needed, width, dtype=dtype, device=device)
            self._kind, self._capacity = kind, 2 * needed
            if self._count:
                self._memory_ND[: self._count] = memory_ND[: self._count]
        first, self._count = self._count, needed
        return self._memory_ND, first

    def keep(
        self,
        requests: Sequence[DraftRequest],
        drafts: Sequence[Sequence[int]],
        hidden_MD: Tensor,
        *,
        depth: int,
    ) -> None:
        """Take the states of a pass that took each request's last draft, or its last token, through ``depth``
        loops; ``overwritten`` came before it.

        ``hidden_MD`` is copied. A row whose predecessors are not all known to have been computed just so gets
        no state: it is then computed from its token, as rows without drafts are.
        """
        rows, width = hidden_MD.shape
        memory_ND, first = self.room(rows, width, dtype=hidden_MD.dtype, device=hidden_MD.device)
        memory_ND[first : first + rows] = hidden_MD
        for number, (request, draft) in enumerate(zip(requests, drafts, strict=True), first):
            start, fed = len(request.tokens) - 1, [request.tokens[-1], *draft]
            if not draft:
                self._chains[request.key] = _Chain(start=start, depth=depth)
            chain = self._chains.get(request.key)
            if chain is None or (chain.start, chain.depth, chain.tokens) != (start, depth, fed[:-1]):
                continue
            chain.tokens.append(fed[-1])
            chain.states.append(number)

    def keep_chain(
        self,
        requests: Sequence[DraftRequest],
        fed: Sequence[list[int]],
        *,
        first: int,
        depth: int,
    ) -> None:
        """Take the states of a whole chain of passes through ``depth`` loops; ``overwritten`` came before it.

        Request i was fed ``fed[i]``, its last committed token first, one token per pass, and ``fed`` never
        gets longer from one request to the next; its lists are this object's from now on. Memory that
        ``room`` gave has a state per token from row ``first`` on, pass by pass.
        """
        counts = [len(tokens) for tokens in fed]
        firsts = _firsts(counts, first)
        for row, (request, tokens, count) in enumerate(zip(requests, fed, counts, strict=True)):
            self._chains[request.key] = _Chain(
                start=len(request.tokens) - 1,
                depth=depth,
                tokens=tokens,
                states=[start + row for start in firsts[:count]],
            )

    def overwritten(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> None:
        """Hear that a pass is about to write keys where these rows stand: states from there on are void."""
        if not self._chains:
            return
        for request, draft in zip(requests, drafts, strict=True):
            chain = self._chains.get(request.key)
            if chain is not None:
                left = max(0, len(request.tokens) - 1 + len(draft) - chain.start)
                del chain.tokens[left:], chain.states[left:]

    @property
    def any(self) -> bool:
        """Whether a draft left states."""
        return bool(self._chains)

    def standing(self, key: int, tokens: Sequence[int], *, start: int) -> tuple[int, list[int]]:
        """Return the depth and the numbers of the states of a sequence's first rows, as far as they hold.

        ``tokens`` are those of its rows to verify: the last committed one, at position ``start``, then its
        drafts.
        """
        chain = self._chains.get(key)
        if chain is None or chain.start != start:
            return 0, []
        count = len(chain.tokens)
        if chain.tokens == tokens[:count]:  # what verification was handed is what was drafted, nearly always
            return chain.depth, chain.states
        fed = zip(chain.tokens, tokens, strict=False)
        same = next((at for at, (old, new) in enumerate(fed) if old != new), min(count, len(tokens)))
        return chain.depth, chain.states[:same]

    def states(self) -> Tensor:
        """Return every state (N, D) by number; rows past the last number mean nothing."""
        return self._memory_ND
