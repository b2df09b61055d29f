"""What the native engine shows a drafter of itself: live weights, and forwards over its own KV pages."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from controller.types import VerifyMode
from drafters.types import (
    DraftChain,
    DraftError,
    DraftModel,
    DraftRequest,
    DraftStep,
    LinearWeight,
    QuantizedLinear,
)
from rollout.engine import noise
from rollout.engine.chooser_call import PortStruct
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder
from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.drafts.draft_chain import ChainRow, DraftChains
from rollout.engine.native.drafts.draft_states import DraftStates
from rollout.engine.native.pass_clock import PassClock, TimedChooser, wait_for
from rollout.engine.native.rows import RowBatch, int32
from rollout.engine.native.scheduler import Scheduler
from rollout.engine.native.sequence import LiveSequence
from rollout.engine.target import needs_edits


@dataclass(kw_only=True, slots=True)
class EngineState:
    """The engine's parts a draft forward reads. One object, shared by reference: a woken engine puts its new
    KV memory here and every draft model sees it."""

    decoder: Decoder
    storage: KVStorage
    scheduler: Scheduler
    chooser: TimedChooser
    verify: VerifyMode
    clock: PassClock
    """Counts every forward and choice; ``chooser`` reports to it."""
    draft_states: DraftStates = field(default_factory=DraftStates)
    """Where verification may go on from; of the current round alone."""


def noise_seed(sequence: LiveSequence, verify: VerifyMode) -> int | None:
    """Return the seed that replaces the request's own, or None.

    Coupled noise belongs to the position alone. In block and token mode a rejected draft's noise has been
    looked at, so drawing that position again needs fresh noise: the round is part of the key.
    """
    return None if verify == "coupled" else sequence.round_seed


class NativePolicyView:
    """Implements ``drafters.types.PolicyView`` on the native engine."""

    def __init__(self, state: EngineState, *, policy_version: int) -> None:
        self._state = state
        self.policy_version = policy_version
        self.vocab_size = state.decoder.spec.vocab_size
        self.compiled = state.decoder.compiled
        self.chains = _port_of_chains(state, state.decoder) is not None
        self.loops = state.decoder.spec.loops

    def linears(self) -> Iterator[LinearWeight]:
        """Yield every linear of the body, then the head."""
        return self._state.decoder.linears()

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> DraftModel:
        """Return a forward with other linears over the policy's KV pages."""
        return NativeDraftModel(self._state, self._state.decoder.with_linears(linears))

    def shallow(self, depth: int) -> DraftModel:
        """Return the policy's own first ``depth`` loops and head, over its KV pages."""
        if not 0 < depth < self.loops:
            raise ValueError(f"depth must lie in 1..{self.loops - 1}, got {depth}")
        return NativeDraftModel(self._state, self._state.decoder, reused_loops=depth)


class NativeDraftModel:
    """One row per sequence beyond the frontier.

    A model of other linears runs all loops, and verification rewrites every position it wrote. With
    ``reused_loops`` it is the policy's own first loops and no more: verification goes on from their states,
    and computes from the token every row that has none.
    """

    def __init__(self, state: EngineState, decoder: Decoder, *, reused_loops: int = 0) -> None:
        self._state = state
        self.decoder = decoder
        self.reused_loops = reused_loops
        self.loops = range(reused_loops or decoder.spec.loops)
        self._chains = _chains(state, decoder, self.loops)

    def time_pass(self, batch: RowBatch) -> float:
        """Return the seconds of one pass's forward, as passes of most requests run it."""
        if self._chains is not None:
            return self._chains.forward_s(batch, self._state.storage)
        started = time.perf_counter()
        wait_for(self.decoder.forward(batch, self._state.storage, loops=self.loops).logits_RV)
        return time.perf_counter() - started

    def chain(self, requests: Sequence[DraftRequest], gammas: Sequence[int]) -> DraftChain | None:
        """Implements ``drafters.types.DraftModel.chain``: in ``coupled``, compiled, where nothing edits
        the logits."""
        state, chains = self._state, self._chains
        if chains is None:
            return None
        order = sorted((i for i, gamma in enumerate(gammas) if gamma), key=lambda i: -gammas[i])
        sequences = [state.scheduler.running[requests[i].key] for i in order]
        targets = [s.target_row([], seed=None) for s in sequences]
        if any(s.edits_logits and needs_edits(t) for s, t in zip(sequences, targets, strict=True)):
            return None
        asked = [requests[i] for i in order]
        states = state.draft_states
        states.overwritten(asked, [()] * len(asked))
        address, first = None, 0
        if self.reused_loops:
            width = self.decoder.spec.hidden_size
            memory_ND, first = states.room(sum(gammas), width)
            address = memory_ND.data_ptr() + first * width * memory_ND.element_size()
        scheduler = state.scheduler
        run = chains.run(
            [
                ChainRow(request.tokens[-1], s.slot, gammas[i], target)
                for i, request, s, target in zip(order, asked, sequences, targets, strict=True)
            ],
            kv=state.storage,
            page_table=(scheduler.page_table_address, *scheduler.page_table.shape),
            states_address=address,
        )
        if self.reused_loops:
            states.keep_chain(asked, run.fed, first=first, depth=self.reused_loops)
        state.clock.chained(run.split, run.choose_s)
        drafts: list[list[int]] = [[] for _ in requests]
        for i, tokens in zip(order, run.drafts, strict=True):
            drafts[i] = tokens
        return DraftChain(tokens=drafts, problem=run.error)

    def step(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> DraftStep:
        """Implements ``drafters.types.DraftModel.step``."""
        state = self._state
        sequences = [state.scheduler.running[r.key] for r in requests]
        tokens = [d[-1] if d else r.tokens[-1] for r, d in zip(requests, drafts, strict=True)]
        positions = [len(r.tokens) - 1 + len(d) for r, d in zip(requests, drafts, strict=True)]
        batch = RowBatch(
            token_ids_M=int32(tokens),
            positions_M=int32(positions),
            table_M=int32([s.slot for s in sequences]),
            page_table_SP=torch.from_numpy(state.scheduler.page_table),
            head_rows_R=torch.arange(len(tokens), dtype=torch.int32),
        )
        state.draft_states.overwritten(requests, drafts)
        result = state.clock.forward(self.decoder, batch, state.storage, loops=self.loops)
        if self.reused_loops:
            state.draft_states.keep(requests, drafts, result.hidden_MD, depth=self.reused_loops)
        rows = [
            s.target_row(list(d), seed=noise_seed(s, state.verify))
            for s, d in zip(sequences, drafts, strict=True)
        ]
        coupled = state.verify == "coupled"
        stream = noise.COUPLED_STREAM if coupled else noise.DRAFT_STREAM
        choices = state.chooser.choose(result.logits_RV, rows, stream=stream, logprobs=False)
        if not all(c.finite for c in choices):
            raise DraftError("the drafter's logits are not finite")
        probs_RV = None if coupled else state.chooser.probs(result.logits_RV, rows)
        return DraftStep(
            tokens=[c.token for c in choices], probs=None if probs_RV is None else list(probs_RV)
        )


def _chains(state: EngineState, decoder: Decoder, loops: range) -> DraftChains | None:
    """Return what drafts in one call; None where passes must be run one by one whatever is asked for."""
    port = _port_of_chains(state, decoder)
    if port is None or not isinstance(decoder, CompiledDecoder):
        return None
    return DraftChains(decoder, port, loops=loops)


def _port_of_chains(state: EngineState, decoder: Decoder) -> PortStruct | None:
    """Return the chooser's address where draft passes may run in one call, None where they never do."""
    may = state.verify == "coupled" and isinstance(decoder, CompiledDecoder)
    return state.chooser.port if may else None
