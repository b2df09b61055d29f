"""Lanes: tokens of one sequence on their way through the loops, and what a pass does to them.

``wavefront.py`` says what they are for and what keeps them exact. What is written here for one chain at a
time, ``compiled_forward/kernels/lanes.h`` does for all of them without Python between two passes.

Shapes: M lanes, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout.engine.native.decoder import Decoder
from rollout.engine.native.sequence import LiveSequence
from rollout.engine.target import Choice, TargetRow
from rollout.tokens import Origin


@dataclass(kw_only=True, slots=True)
class Lane:
    """One token on its way through the loops."""

    token: int
    loops_run: int = 0
    successor: int | None = None
    """What its readout proposes to follow; None before it was read, and where it was not finite."""


@dataclass(kw_only=True, slots=True)
class Chain:
    """The lanes of one sequence in a round: consecutive positions, the deepest first."""

    sequence: LiveSequence
    lanes: list[Lane]
    most_lanes: int
    room: int
    """Positions beyond the last committed token, as the round began, that lanes may stand on."""

    tokens: list[tuple[Choice, Origin]] = field(default_factory=list)
    """What the target chose in this round."""

    drafts: list[int] = field(default_factory=list)
    """Tokens of lanes that were compared with the target's choice."""

    accepted: int = 0
    over: bool = False
    """Whether nothing it still computes could be committed."""

    @property
    def first_position(self) -> int:
        """Position of the deepest lane."""
        return len(self.sequence.tokens) - 1 + len(self.tokens)

    def target_row(self, index: int) -> TargetRow:
        """Return what shapes the choice of the token after lane ``index``."""
        chosen = [choice.token for choice, _ in self.tokens]
        ahead = [lane.token for lane in self.lanes[1 : index + 1]]
        return self.sequence.target_row(chosen + ahead, seed=None)

    def reads(self, index: int) -> bool:
        """Whether a successor of lane ``index`` could still be used: its choice must be allowed as well."""
        return len(self.tokens) + index + 1 < self.sequence.remaining_tokens

    def enter(self) -> None:
        """Let the last lane's successor in, where there is one and room for it."""
        successor = self.lanes[-1].successor
        offset = len(self.tokens) + len(self.lanes)
        if successor is not None and len(self.lanes) < self.most_lanes and offset <= self.room:
            self.lanes.append(Lane(token=successor))

    def commit(self, choice: Choice) -> None:
        """Take the target's choice after the deepest lane, which ends it and decides about the next."""
        self.lanes.pop(0)
        origin: Origin = "plain"
        if self.lanes:
            draft = self.lanes[0].token
            kept = choice.finite and choice.token == draft
            origin = "accepted" if kept else "corrected"
            self.drafts.append(draft)
            self.accepted += kept
        if origin != "accepted":
            self.lanes = [Lane(token=choice.token)]
        self.tokens.append((choice, origin))
        sequence = self.sequence
        stops = choice.token in sequence.stop_ids or choice.token in sequence.eos_ids
        self.over = stops or not choice.finite or len(self.tokens) == sequence.remaining_tokens


@dataclass(kw_only=True, slots=True)
class Spent:
    """What a round's passes came to."""

    passes: int = 0
    rows: int = 0
    context_tokens: int = 0
    unread: set[int] = field(default_factory=set)
    """Keys of sequences a readout of which was not finite."""


class LaneStates:
    """The hidden states of all lanes, between passes and between rounds.

    A lane's place follows from its sequence's slot and its position, so nothing keeps track of places: lanes
    of a sequence stand on consecutive positions, no more of them than a slot has places.
    """

    def __init__(self, decoder: Decoder, *, slots: int, lanes_each: int) -> None:
        self.lanes_each = lanes_each
        like_1D = decoder.embed(torch.zeros(1, dtype=torch.int32))
        self.states_ND = like_1D.new_zeros(slots * lanes_each, like_1D.shape[1])

    def places(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return where lanes of these slots and positions stand, (M,)."""
        each = self.lanes_each
        numbers = [slot * each + position % each for slot, position in zip(slots, positions, strict=True)]
        return torch.tensor(numbers, device=self.states_ND.device)
