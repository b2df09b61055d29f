"""The passes of lanes one by one from Python: for any decoder and any target distribution.

What ``compiled_lanes.py`` does in one call is tested against this.

Shapes: M lanes, R head rows, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.engine.native.drafts.view import EngineState
from rollout.engine.native.lanes.chain import Chain, LaneStates, Spent
from rollout.engine.native.rows import RowBatch
from rollout.engine.target import Choice, TargetRow

ONE_CALL_VOCAB = 8192
"""Vocabulary up to which proposals are chosen in one call with the target's own choices: logprobs that nobody
asked for are cheaper there than a second call."""


class LanePasses:
    """Takes lanes through the loops, a pass at a time."""

    def __init__(self, state: EngineState, *, depth: int) -> None:
        self._engine = state
        self._depth = depth
        self._loops = state.decoder.spec.loops

    def run(self, chains: Sequence[Chain], states: LaneStates, spent: Spent, *, passes: int) -> None:
        """Run so many passes, but none beyond the first ``loops`` once a chain is over."""
        for passed in range(passes):
            live = [chain for chain in chains if not chain.over]
            if not live or (passed >= self._loops and len(live) < len(chains)):
                break
            self._advance(live, states, spent)

    def _advance(self, chains: Sequence[Chain], states: LaneStates, spent: Spent) -> None:
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
        placed = [*final, *shallow, *others]
        logits_RV = self._pass(placed, states, heads=len(final) + len(shallow), spent=spent)
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

    def _pass(
        self, placed: Sequence[tuple[Chain, int]], states: LaneStates, *, heads: int, spent: Spent
    ) -> Tensor:
        """Take these lanes one loop further; return the logits of the first ``heads`` of them."""
        engine = self._engine
        lanes = [chain.lanes[index] for chain, index in placed]
        slots = [chain.sequence.slot for chain, _ in placed]
        positions = [chain.first_position + index for chain, index in placed]
        batch = RowBatch(
            token_ids_M=torch.tensor([lane.token for lane in lanes], dtype=torch.int32),
            positions_M=torch.tensor(positions, dtype=torch.int32),
            table_M=torch.tensor(slots, dtype=torch.int32),
            page_table_SP=torch.from_numpy(engine.scheduler.page_table),
            head_rows_R=torch.arange(heads, dtype=torch.int32),
        )
        loop_M = torch.tensor([lane.loops_run for lane in lanes], dtype=torch.int32)
        place_M = states.places(slots, positions)
        states_MD = states.states_ND[place_M]
        result = engine.clock.advance(engine.decoder, states_MD, batch, engine.storage, loop_M=loop_M)
        states.states_ND[place_M] = result.hidden_MD
        for lane in lanes:
            lane.loops_run += 1
        spent.passes += 1
        spent.rows += len(lanes)
        spent.context_tokens += sum(positions) + len(positions)
        return result.logits_RV
