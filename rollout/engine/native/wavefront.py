"""Loop-level pipelining: tokens of one sequence travel through the loops of a looped policy at once.

A *lane* is one token on its way through the loops. A pass takes every lane one loop further. A lane that
has run ``depth`` loops proposes its successor, chosen from its readout as the target would choose, with the
same noise; that token enters as a lane of its own, always at least ``depth`` loops behind. A lane that has
run all loops gets the target's own choice. The lane behind it lives if it holds that very token; else it
falls, with all lanes behind it, and the target's choice enters in its place.

What keeps it exact: position p + 1 reads plane t of position p only in a pass after the one in which p's
lane wrote it, because that lane is ahead; and the lane that stands at p when p + 1 reads is the one whose
token is committed, or else p + 1 falls as well. Keys of fallen lanes lie beyond the frontier, and the lane
that takes their place rewrites a plane before anything reads it there.

A round runs as many passes as the policy has loops, which is what plain decoding takes: so every sequence
gets a token, and its lanes wait for its next round where they stand. Only ``coupled`` verification has a
target's own choice to compare with, so the other modes are refused.

Shapes: M lanes, D hidden, V vocabulary.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from controller.types import Assignment, DraftCost
from drafters.wavefront import WAVEFRONT, WavefrontDrafter
from rollout.engine.native.drafting import Drafted, Drafting
from rollout.engine.native.rows import RowBatch
from rollout.engine.native.sequence import LiveSequence
from rollout.engine.native.view import EngineState
from rollout.engine.target import Choice, TargetRow
from rollout.engine.verify import Verdict
from rollout.errors import ConfigError
from rollout.types import Origin

ONE_CALL_VOCAB = 8192
"""Vocabulary up to which proposals are chosen in one call with the target's own choices: logprobs that nobody
asked for are cheaper there than a second call."""


@dataclass(kw_only=True, slots=True)
class Lane:
    """One token on its way through the loops."""

    token: int
    loops_run: int = 0
    state: int = 0
    """Its row among the states of the last pass; means nothing before its first loop."""

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
class _Spent:
    """What a round's passes came to."""

    passes: int = 0
    rows: int = 0
    context_tokens: int = 0
    unread: set[int] = field(default_factory=set)
    """Keys of sequences a readout of which was not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """What names the rows of a pass, in buffers that are used again: passes of small policies are short."""

    numbers: NDArray[np.int32]
    """The five below, one under the other."""

    token_ids_M: Tensor
    positions_M: Tensor
    table_M: Tensor
    loop_M: Tensor
    state_M: Tensor
    order_M: Tensor
    """0, 1, 2 and so on."""

    @classmethod
    def of(cls, rows: int) -> "_Frame":
        """Return buffers for ``rows`` rows."""
        numbers = np.zeros((5, rows), np.int32)
        token_ids_M, positions_M, table_M, loop_M, state_M = torch.from_numpy(numbers).unbind()
        return cls(
            numbers=numbers,
            token_ids_M=token_ids_M,
            positions_M=positions_M,
            table_M=table_M,
            loop_M=loop_M,
            state_M=state_M,
            order_M=torch.arange(rows, dtype=torch.int32),
        )


class Wavefront:
    """The lanes of an engine. They outlive a round only for sequences that ran in it."""

    def __init__(self, state: EngineState, drafting: Drafting) -> None:
        """Raises ``ConfigError`` when the drafter is there but verification has no own choice to compare."""
        slot = drafting.slots.get(WAVEFRONT)
        self._depth = slot.drafter.depth if slot and isinstance(slot.drafter, WavefrontDrafter) else 0
        if self._depth and state.verify != "coupled":
            raise ConfigError(
                f"engine.verify={state.verify} cannot verify the drafter wavefront, whose lanes live or fall "
                "by the target's own choice: use verify=coupled, or leave wavefront out of drafter.names"
            )
        self._engine = state
        self._drafting = drafting
        self._loops = state.decoder.spec.loops
        self._lanes: dict[int, list[Lane]] = {}
        """By sequence key, between rounds."""
        self._states_MD: Tensor | None = None
        """Of the last pass; None before the first, when every lane starts at its token."""
        self._frames: dict[int, _Frame] = {}

    # ---- what a plan may ask -------------------------------------------------------------------

    @property
    def most_lanes(self) -> int:
        """Lanes of one sequence in a full pipeline: one per ``depth`` loops."""
        return -(-self._loops // self._depth)

    def takes(self, assignment: Assignment) -> bool:
        """Whether a sequence so assigned runs here; a drafter that is off leaves it to plain decoding."""
        return self._depth > 0 and assignment.drafter == WAVEFRONT and self._drafting.works(WAVEFRONT)

    def reach(self, assignment: Assignment) -> int:
        """Return how many positions beyond the last token a round may write, limits of the request aside.

        That many lanes may be ahead of the first one, and at most a pipeline of them commits meanwhile.
        """
        return min(assignment.gamma, self.most_lanes - 1) + self.most_lanes

    def typical_pass(self, batch: RowBatch) -> Tensor:
        """Run one pass over these rows as full pipelines would: to be timed, on borrowed pages.

        Returns the logits of the lanes that come to a readout.
        """
        decoder = self._engine.decoder
        loop_M = torch.arange(batch.rows, dtype=torch.int32) % self._loops
        # Of a sequence's lanes two come to a readout every ``depth`` passes: the last choice, and a proposal.
        heads = max(1, round(2 * batch.rows / (self._depth * self.most_lanes)))
        states_MD = decoder.embed(batch.token_ids_M)
        rows = replace(batch, head_rows_R=batch.head_rows_R[:heads])
        return decoder.advance(states_MD, rows, self._engine.storage, loop_M=loop_M).logits_RV

    # ---- lanes between rounds ------------------------------------------------------------------

    def drop(self, keys: Iterable[int]) -> None:
        """Forget the lanes of sequences that are over."""
        for key in keys:
            self._lanes.pop(key, None)

    def clear(self) -> None:
        """Forget all lanes, which begin again at the frontier: the weights that computed them are gone."""
        self._lanes.clear()

    @property
    def lanes(self) -> int:
        """Lanes that wait for their sequences' next round."""
        return sum(len(lanes) for lanes in self._lanes.values())

    # ---- the passes of a round -----------------------------------------------------------------

    def run(
        self, sequences: Sequence[LiveSequence], assignments: Mapping[int, Assignment]
    ) -> tuple[list[Verdict], dict[int, Drafted], DraftCost | None]:
        """Run a round's passes; return a verdict per sequence, the drafts it speaks of, and what it cost.

        Positions up to ``reach`` beyond each last token must be reserved. Lanes of all other sequences are
        dropped: those decode plainly, wait, or are over.
        """
        waiting, self._lanes = self._lanes, {}
        if not sequences:
            return [], {}, None
        started = time.perf_counter()
        chains = [self._chain(s, waiting.get(s.key), assignments[s.key]) for s in sequences]
        spent = _Spent()
        for _ in range(self._loops):
            live = [chain for chain in chains if not chain.over]
            if not live:
                break
            self._advance(live, spent)
        self._lanes = {chain.sequence.key: chain.lanes for chain in chains if not chain.over}
        self._drafting.hear(WAVEFRONT, "a readout of its lanes is not finite" if spent.unread else "")
        cost = DraftCost(
            drafter=WAVEFRONT,
            passes=spent.passes,
            rows=spent.rows,
            context_tokens=spent.context_tokens,
            seconds=time.perf_counter() - started,
            failures=len(spent.unread),
        )
        verdicts = [Verdict(accepted=c.accepted, tokens=c.tokens) for c in chains]
        return verdicts, {c.sequence.key: Drafted(tokens=c.drafts) for c in chains}, cost

    def _chain(self, sequence: LiveSequence, waiting: list[Lane] | None, assignment: Assignment) -> Chain:
        lanes = waiting or [Lane(token=sequence.tokens[-1])]
        assert lanes[0].token == sequence.tokens[-1], "lanes follow the committed tokens"
        return Chain(
            sequence=sequence,
            lanes=lanes,
            most_lanes=min(assignment.gamma + 1, self.most_lanes),
            room=min(self.reach(assignment), sequence.remaining_tokens - 1),
        )

    def _advance(self, chains: Sequence[Chain], spent: _Spent) -> None:
        """Take every lane one loop further, and act on what those read that have come to a readout."""
        final: list[tuple[Chain, int]] = []
        shallow: list[tuple[Chain, int]] = []
        others: list[tuple[Chain, int]] = []
        for chain in chains:
            chain.enter()
            for index, lane in enumerate(chain.lanes):
                loops_run = lane.loops_run + 1
                if loops_run == self._loops:
                    final.append((chain, index))
                elif loops_run == self._depth and chain.reads(index):
                    shallow.append((chain, index))
                else:
                    others.append((chain, index))
        logits_RV = self._pass([*final, *shallow, *others], heads=len(final) + len(shallow), spent=spent)
        rows = [chain.target_row(index) for chain, index in (*final, *shallow)]
        choices = self._choices(logits_RV, rows, final=len(final))
        # Proposals first: a commit ends lanes and renumbers those behind.
        for (chain, index), choice in zip(shallow, choices[len(final) :], strict=True):
            if choice.finite:
                chain.lanes[index].successor = choice.token
            else:
                spent.unread.add(chain.sequence.key)
        for (chain, _), choice in zip(final, choices, strict=False):
            chain.commit(choice)

    def _choices(self, logits_RV: Tensor, rows: Sequence[TargetRow], *, final: int) -> list[Choice]:
        """Return the choice of each row; the first ``final`` are the target's own and get their logprobs.

        A proposal is chosen exactly as the target would choose from these logits, noise included.
        """
        choose = self._engine.chooser.choose
        if logits_RV.shape[1] <= ONE_CALL_VOCAB or final in (0, len(rows)):
            return choose(logits_RV, rows, logprobs=final > 0) if rows else []
        proposals = choose(logits_RV[final:], rows[final:], logprobs=False)
        return choose(logits_RV[:final], rows[:final]) + proposals

    def _pass(self, placed: Sequence[tuple[Chain, int]], *, heads: int, spent: _Spent) -> Tensor:
        """Take these lanes one loop further; return the logits of the first ``heads`` of them."""
        engine = self._engine
        lanes = [chain.lanes[index] for chain, index in placed]
        positions = [chain.first_position + index for chain, index in placed]
        frame = self._frame(len(lanes))
        frame.numbers[:] = (
            [lane.token for lane in lanes],
            positions,
            [chain.sequence.slot for chain, _ in placed],
            [lane.loops_run for lane in lanes],
            [lane.state for lane in lanes],
        )
        batch = RowBatch(
            token_ids_M=frame.token_ids_M,
            positions_M=frame.positions_M,
            table_M=frame.table_M,
            page_table_SP=torch.from_numpy(engine.scheduler.page_table),
            head_rows_R=frame.order_M[:heads],
        )
        if self._states_MD is None:
            states_MD = engine.decoder.embed(batch.token_ids_M)
        else:
            states_MD = self._states_MD.index_select(0, frame.state_M.to(self._states_MD.device))
        result = engine.clock.advance(engine.decoder, states_MD, batch, engine.storage, loop_M=frame.loop_M)
        self._states_MD = result.hidden_MD
        for row, lane in enumerate(lanes):
            lane.loops_run += 1
            lane.state = row
        spent.passes += 1
        spent.rows += len(lanes)
        spent.context_tokens += sum(positions) + len(positions)
        return result.logits_RV

    def _frame(self, rows: int) -> _Frame:
        """Return the buffers of a pass of so many rows."""
        frame = self._frames.get(rows)
        if frame is None:
            frame = self._frames[rows] = _Frame.of(rows)
        return frame
