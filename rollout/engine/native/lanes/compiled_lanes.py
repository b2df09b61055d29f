"""The passes of lanes in one compiled call: ``kernels/lanes.h``, its structs, and what goes in and comes out.

For sequences whose target distribution nothing edits: penalties, bias and bans are known to Python alone.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import ClassVar

from rollout.engine.chooser_call import COLUMNS, PortStruct
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, seconds_of
from rollout.engine.native.compiled_forward.kernels import abi
from rollout.engine.native.drafts.view import EngineState
from rollout.engine.native.lanes.chain import Chain, Lane, LaneStates, Spent
from rollout.engine.target import Choice
from rollout.types import Origin

_NONE = -1
_ORIGINS: tuple[Origin, ...] = ("plain", "accepted", "corrected")
"""``lanes::Origin``, in its order."""

_MASK_64 = (1 << 64) - 1
_MAX_TOP_K = (1 << 31) - 1


class LaneStruct(ctypes.Structure):
    """``lanes::Lane``."""

    _fields_: ClassVar = [("token", c_int32), ("loops_run", c_int32), ("successor", c_int32)]


class ChainStruct(ctypes.Structure):
    """``lanes::Chain``."""

    _fields_: ClassVar = [
        ("seed", c_int64),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("top_k", c_int32),
        ("table", c_int32),
        ("position", c_int32),
        ("most_lanes", c_int32),
        ("room", c_int32),
        ("remaining", c_int32),
        ("stops", c_int32),
        ("stops_end", c_int32),
        ("lanes", c_int32),
        ("committed", c_int32),
        ("over", c_int32),
        ("unread", c_int32),
    ]


class CommitStruct(ctypes.Structure):
    """``lanes::Commit``."""

    _fields_: ClassVar = [
        ("logprobs", c_double * COLUMNS),
        ("token", c_int32),
        ("finite", c_int32),
        ("origin", c_int32),
        ("draft", c_int32),
    ]


class LanesStruct(ctypes.Structure):
    """``lanes::Call``."""

    _fields_: ClassVar = [
        ("forward", abi.CallStruct),
        ("port", PortStruct),
        ("chain", c_void_p),
        ("lane", c_void_p),
        ("commit", c_void_p),
        ("stops", c_void_p),
        ("states", c_void_p),
        ("phase_s", c_void_p),
        ("choose_s", c_double),
        ("rows", c_int64),
        ("context_tokens", c_int64),
        ("chains", c_int32),
        ("lanes_each", c_int32),
        ("loops", c_int32),
        ("depth", c_int32),
        ("filters", c_int32),
        ("most_passes", c_int32),
        ("passes", c_int32),
    ]


class CompiledLanes:
    """Takes lanes through the loops, all passes of a round in one call."""

    def __init__(self, state: EngineState, decoder: CompiledDecoder, port: PortStruct, *, depth: int) -> None:
        self._engine = state
        self._decoder = decoder
        self._port = port
        self._depth = depth

    def run(self, chains: Sequence[Chain], states: LaneStates, spent: Spent, *, passes: int) -> None:
        """Run so many passes, but none beyond the first ``loops`` once a chain is over.

        Raises as ``Decoder.advance`` does.
        """
        each = states.lanes_each
        chain_B, stops = _chain_structs(chains)
        lane_BL = _lane_structs(chains, each)
        commit_BT = (CommitStruct * (len(chains) * passes))()
        phase_s = (c_double * len(abi.PHASES))()
        call = LanesStruct(
            forward=self._forward(),
            port=self._port,
            chain=ctypes.addressof(chain_B),
            lane=ctypes.addressof(lane_BL),
            commit=ctypes.addressof(commit_BT),
            stops=ctypes.addressof(stops),
            states=states.states_ND.data_ptr(),
            phase_s=ctypes.addressof(phase_s),
            chains=len(chains),
            lanes_each=each,
            loops=self._decoder.spec.loops,
            depth=self._depth,
            filters=any(c.sequence.params.has_filters for c in chains),
            most_passes=passes,
        )
        self._decoder.run_lanes(call)
        for index, (chain, result) in enumerate(zip(chains, chain_B, strict=True)):
            _take(chain, result, lane_BL, index * each, commit_BT, index * passes)
            if result.unread:
                spent.unread.add(chain.sequence.key)
        spent.passes += call.passes
        spent.rows += call.rows
        spent.context_tokens += call.context_tokens
        if call.passes:
            self._engine.clock.chained(seconds_of(phase_s), call.choose_s)

    def _forward(self) -> abi.CallStruct:
        page_table_SP = self._engine.scheduler.page_table
        memory = self._decoder.memory_of(self._engine.storage)
        tables, table_pages = page_table_SP.shape
        return abi.CallStruct(
            tables=tables,
            table_pages=table_pages,
            page_table=page_table_SP.ctypes.data,
            kv=memory.data.data_ptr(),
            kv_pages=memory.pages,
        )


def _chain_structs(chains: Sequence[Chain]) -> "tuple[ctypes.Array[ChainStruct], ctypes.Array[c_int32]]":
    """Return what a call is told of each chain, and the tokens that end them, one chain's after another."""
    structs = (ChainStruct * len(chains))()
    stops: list[int] = []
    for struct, chain in zip(structs, chains, strict=True):
        sequence, params, first = chain.sequence, chain.sequence.params, len(stops)
        stops += sequence.stop_ids
        stops += sequence.eos_ids
        struct.__init__(
            sequence.request.seed & _MASK_64,
            params.temperature,
            params.top_p,
            params.min_p,
            min(params.top_k, _MAX_TOP_K),
            sequence.slot,
            chain.first_position,
            chain.most_lanes,
            chain.room,
            sequence.remaining_tokens,
            first,
            len(stops),
            len(chain.lanes),
        )
    return structs, (c_int32 * len(stops))(*stops)


def _lane_structs(chains: Sequence[Chain], each: int) -> "ctypes.Array[LaneStruct]":
    structs = (LaneStruct * (len(chains) * each))()
    for index, chain in enumerate(chains):
        for place, lane in enumerate(chain.lanes, index * each):
            successor = _NONE if lane.successor is None else lane.successor
            structs[place] = LaneStruct(lane.token, lane.loops_run, successor)
    return structs


def _take(
    chain: Chain,
    result: ChainStruct,
    lane_BL: "ctypes.Array[LaneStruct]",
    first_lane: int,
    commit_BT: "ctypes.Array[CommitStruct]",
    first_commit: int,
) -> None:
    """Give a chain what a call made of it."""
    for commit in commit_BT[first_commit : first_commit + result.committed]:
        raw, scaled, target, kept = commit.logprobs
        finite = bool(commit.finite)
        choice = Choice(
            token=commit.token,
            raw_logprob=raw,
            scaled_logprob=scaled,
            target_logprob=target,
            kept_logmass=kept,
            finite=finite,
        )
        origin = _ORIGINS[commit.origin]
        chain.tokens.append((choice, origin))
        if commit.draft != _NONE:
            chain.drafts.append(commit.draft)
            chain.accepted += origin == "accepted"
    chain.lanes = [
        Lane(
            token=lane.token,
            loops_run=lane.loops_run,
            successor=None if lane.successor == _NONE else lane.successor,
        )
        for lane in lane_BL[first_lane : first_lane + result.lanes]
    ]
    chain.over = bool(result.over)
