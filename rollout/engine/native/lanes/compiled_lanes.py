"""The passes of lanes in one compiled call (``compiled_forward/kernels/lanes.h``): its structs and arrays.

For sequences whose target distribution nothing edits: penalties, bias and bans are known to Python alone.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from struct import Struct
from typing import ClassVar

from rollout.engine.chooser_call import COLUMNS, PortStruct
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, seconds_of
from rollout.engine.native.compiled_forward.kernels import abi
from rollout.engine.native.drafts.view import EngineState
from rollout.engine.native.lanes.chain import Chain, Lane, LaneStates, Spent
from rollout.engine.target import Choice
from rollout.tokens import Origin

_NONE = -1
_ORIGINS: tuple[Origin, ...] = ("plain", "accepted", "corrected")
"""``lanes::Origin``, in its order."""

_ACCEPTED = _ORIGINS.index("accepted")

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


_COMMIT = Struct("4d4i")
"""``CommitStruct``, read whole: field by field takes several times as long."""


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
        self._phase_s = (c_double * len(abi.PHASES))()
        self._call = LanesStruct(
            loops=decoder.spec.loops, depth=depth, phase_s=ctypes.addressof(self._phase_s)
        )
        self._call.forward.layer_end = decoder.spec.layers

    def run(self, chains: Sequence[Chain], states: LaneStates, spent: Spent, *, passes: int) -> None:
        """Run so many passes, but none beyond the first ``loops`` once a chain is over.

        Raises as ``Decoder.advance`` does.
        """
        each = states.lanes_each
        chain_B, stops = _chain_structs(chains)
        lane_BL = _lane_structs(chains, each)
        commit_BT = (CommitStruct * (len(chains) * passes))()
        call = self._call
        call.port = self._port
        self._set_memory(call.forward)
        self._phase_s[:] = [0.0] * len(abi.PHASES)
        call.chain, call.lane = ctypes.addressof(chain_B), ctypes.addressof(lane_BL)
        call.commit, call.stops = ctypes.addressof(commit_BT), ctypes.addressof(stops)
        call.states = states.states_ND.data_ptr()
        call.chains, call.lanes_each, call.most_passes = len(chains), each, passes
        call.filters = any(c.sequence.params.has_filters for c in chains)
        call.rows = call.context_tokens = call.passes = 0
        call.choose_s = 0.0
        self._decoder.run_lanes(call)
        commits = memoryview(commit_BT).cast("B")
        for index, (chain, result) in enumerate(zip(chains, chain_B, strict=True)):
            first = index * passes * _COMMIT.size
            _take_commits(chain, commits[first : first + result.committed * _COMMIT.size])
            chain.lanes = _lanes(lane_BL[index * each : index * each + result.lanes])
            chain.over = bool(result.over)
            if result.unread:
                spent.unread.add(chain.sequence.key)
        spent.passes += call.passes
        spent.rows += call.rows
        spent.context_tokens += call.context_tokens
        if call.passes:
            self._engine.clock.chained(seconds_of(self._phase_s), call.choose_s)

    def _set_memory(self, forward: abi.CallStruct) -> None:
        scheduler = self._engine.scheduler
        memory = self._decoder.memory_of(self._engine.storage)
        forward.tables, forward.table_pages = scheduler.page_table.shape
        forward.page_table = scheduler.page_table_address
        forward.kv, forward.kv_pages = memory.data.data_ptr(), memory.pages


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


def _take_commits(chain: Chain, commits: memoryview) -> None:
    """Give a chain what a call chose for it."""
    for raw, scaled, target, kept, token, finite, origin, draft in _COMMIT.iter_unpack(commits):
        choice = Choice(token, raw, scaled, target, kept, bool(finite))
        chain.tokens.append((choice, _ORIGINS[origin]))
        if draft != _NONE:
            chain.drafts.append(draft)
            chain.accepted += origin == _ACCEPTED


def _lanes(structs: Sequence[LaneStruct]) -> list[Lane]:
    return [
        Lane(
            token=lane.token,
            loops_run=lane.loops_run,
            successor=None if lane.successor == _NONE else lane.successor,
        )
        for lane in structs
    ]
