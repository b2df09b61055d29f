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
gets a token, and its lanes wait for its next round where they stand. Where nothing else is in the round it
runs more (``PartShape.passes_of``), until a sequence is over, whose place others may want. Only ``coupled``
verification has a target's own choice to compare with, so the other modes are refused.

A round's passes are one compiled call for all sequences whose target distribution nothing edits
(``compiled_lanes.py``), and run one by one for the others and for other decoders (``lane_passes.py``). Both
leave the same bits: tokens, logprobs, keys and lanes.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from controller.types import Assignment, DraftCost
from drafters.wavefront import WAVEFRONT, WavefrontDrafter
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder
from rollout.engine.native.drafts.drafting import Drafted, Drafting
from rollout.engine.native.drafts.view import EngineState
from rollout.engine.native.lanes.chain import Chain, Lane, LaneStates, Spent
from rollout.engine.native.lanes.compiled_lanes import CompiledLanes
from rollout.engine.native.lanes.lane_passes import LanePasses
from rollout.engine.native.pass_clock import wait_for
from rollout.engine.native.rows import RowBatch
from rollout.engine.native.sequence import LiveSequence
from rollout.engine.native.shapes import lane_shape
from rollout.engine.target import needs_edits
from rollout.engine.verify import Verdict
from rollout.errors import ConfigError


class Wavefront:
    """The lanes of an engine. They outlive a round only for sequences that ran in it."""

    def __init__(self, state: EngineState, drafting: Drafting) -> None:
        """Raises ``ConfigError`` when the drafter is there but verification has no own choice to compare."""
        slot = drafting.slots.get(WAVEFRONT)
        drafter = slot.drafter if slot and isinstance(slot.drafter, WavefrontDrafter) else None
        self._depth = drafter.depth if drafter else 0
        self._shape = lane_shape(state.decoder.spec, drafter) if drafter else None
        if self._depth and state.verify != "coupled":
            raise ConfigError(
                f"engine.verify={state.verify} cannot verify the drafter wavefront, whose lanes live or fall "
                "by the target's own choice: use verify=coupled, or leave wavefront out of drafter.names"
            )
        self._engine = state
        self._drafting = drafting
        self._loops = state.decoder.spec.loops
        self._passes = LanePasses(state, depth=self._depth)
        self._compiled = _compiled(state, depth=self._depth)
        self._lanes: dict[int, list[Lane]] = {}
        """By sequence key, between rounds."""
        self._states: LaneStates | None = None
        """None before the first round with lanes: few engines have any."""

    # ---- what a plan may ask -------------------------------------------------------------------

    @property
    def most_lanes(self) -> int:
        """Lanes of one sequence in a full pipeline: one per ``depth`` loops."""
        return -(-self._loops // self._depth)

    def takes(self, assignment: Assignment) -> bool:
        """Whether a sequence so assigned runs here; a drafter that is off leaves it to plain decoding."""
        return self._depth > 0 and assignment.drafter == WAVEFRONT and self._drafting.works(WAVEFRONT)

    def passes(self, sequences: int, *, alone: bool) -> int:
        """Return the most passes of a round with so many sequences in lanes, ``alone`` in it or not."""
        return self._shape.passes_of(sequences, alone=alone) if self._shape and sequences else self._loops

    def reach(self, assignment: Assignment, passes: int) -> int:
        """Return how many positions beyond the last token a round may write, limits of the request aside.

        That many lanes may be ahead of the first one, and one commits every ``depth`` passes meanwhile.
        """
        return min(assignment.gamma, self.most_lanes - 1) + -(-passes // self._depth)

    def time_pass(self, batch: RowBatch) -> float:
        """Run one pass over these rows as full pipelines would, on borrowed pages; return its seconds.

        They are the decoder's own where it tells them: a round's passes have no Python between them then.
        """
        decoder = self._engine.decoder
        loop_M = torch.arange(batch.rows, dtype=torch.int32) % self._loops
        # Of a sequence's lanes two come to a readout every ``depth`` passes: the last choice, and a proposal.
        heads = max(1, round(2 * batch.rows / (self._depth * self.most_lanes)))
        states_MD = decoder.embed(batch.token_ids_M)
        rows = replace(batch, head_rows_R=batch.head_rows_R[:heads])
        started = time.perf_counter()
        result = decoder.advance(states_MD, rows, self._engine.storage, loop_M=loop_M)
        wait_for(result.logits_RV)
        return result.seconds.total_s if result.seconds is not None else time.perf_counter() - started

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
        self, sequences: Sequence[LiveSequence], assignments: Mapping[int, Assignment], *, passes: int
    ) -> tuple[list[Verdict], dict[int, Drafted], DraftCost | None]:
        """Run a round's passes; return a verdict per sequence, the drafts it speaks of, and what it cost.

        Positions up to ``reach`` beyond each last token must be reserved for so many ``passes``. Lanes of all
        other sequences are dropped: those decode plainly, wait, or are over.
        """
        waiting, self._lanes = self._lanes, {}
        if not sequences:
            return [], {}, None
        started = time.perf_counter()
        chains = [self._chain(s, waiting.get(s.key), assignments[s.key], passes) for s in sequences]
        spent = self._run_passes(chains, passes)
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

    def _chain(
        self, sequence: LiveSequence, waiting: list[Lane] | None, assignment: Assignment, passes: int
    ) -> Chain:
        lanes = waiting or [Lane(token=sequence.tokens[-1])]
        assert lanes[0].token == sequence.tokens[-1], "lanes follow the committed tokens"
        return Chain(
            sequence=sequence,
            lanes=lanes,
            most_lanes=min(assignment.gamma + 1, self.most_lanes),
            room=min(self.reach(assignment, passes), sequence.remaining_tokens - 1),
        )

    def _run_passes(self, chains: Sequence[Chain], passes: int) -> Spent:
        """Take the chains through a round's passes, those that can in one call."""
        if self._states is None:
            slots = self._engine.scheduler.page_table.shape[0]
            self._states = LaneStates(self._engine.decoder, slots=slots, lanes_each=self.most_lanes)
        spent = Spent()
        singly: list[Chain] = []
        together: list[Chain] = []
        for chain in chains:
            alone = self._compiled is None or needs_edits(chain.target_row(0))
            (singly if alone else together).append(chain)
        if self._compiled is not None and together:
            self._compiled.run(together, self._states, spent, passes=passes)
        if singly:
            self._passes.run(singly, self._states, spent, passes=passes)
        return spent


def _compiled(state: EngineState, *, depth: int) -> CompiledLanes | None:
    """Return what runs all passes in one call; None where decoder or chooser only answer Python."""
    port = state.chooser.port
    if not depth or port is None or not isinstance(state.decoder, CompiledDecoder):
        return None
    return CompiledLanes(state, state.decoder, port, depth=depth)
