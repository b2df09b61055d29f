"""What compiled calls leave behind, read where they left it: the calls themselves run as they always do.

A chain of drafts leaves the states of its last loop, a round's forward those of the last loop of all, and
lanes those of the loop each stands after. States between are overwritten within the calls; keys and values of
the loop that follows are made of nothing else, and those are all there.

Shapes: B chains, D hidden.
"""

import ctypes
from collections.abc import Mapping
from ctypes import c_int32
from typing import NoReturn

from controller.types import ForwardSeconds
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, CompiledKV
from rollout.engine.native.compiled_forward.kernels import abi
from rollout.engine.native.decoder import KVStorage
from rollout.engine.native.lanes.compiled_lanes import ChainStruct, CommitStruct, LanesStruct, LaneStruct
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.errors import UnsupportedError
from rollout.evaluation.forced import floats_at
from rollout.evaluation.recording import Kept, Place, places_of

_FLOAT = 4
"""Bytes."""


class CallRecorder(CompiledDecoder):
    """Another decoder's weights and threads, its own counters, and a look at what its calls leave.

    What is no compiled call of a round it refuses.
    """

    def __init__(self, inner: CompiledDecoder) -> None:
        self._share(inner)
        self.kept = Kept()

    def new_storage(self, pages: int) -> CompiledKV:
        """Return memory as ever, and remember it."""
        storage = super().new_storage(pages)
        self.kept.storages.append(storage)
        return storage

    def forward(self, *_: object, **__: object) -> NoReturn:
        """Refuse."""
        raise UnsupportedError("a forward was run from Python where compiled calls are what is evaluated")

    advance = forward_from = block = forward

    def run_chain(self, call: abi.ChainStruct) -> tuple[int, ForwardSeconds]:
        """Run draft passes; keep the state of every row of every pass."""
        rows = call.forward.rows
        starts = _numbers(call.positions, rows)  # counted up by the call
        status, seconds = super().run_chain(call)
        if not call.keep_states:
            return status, seconds
        gammas, slots = _numbers(call.gammas, rows), _numbers(call.forward.table, rows)
        width, loop, address = self.spec.hidden_size, call.forward.loop_end - 1, call.forward.hidden
        for number in range(call.forwards):
            tokens = _numbers(call.tokens + number * rows * ctypes.sizeof(c_int32), rows)
            live = [m for m in range(rows) if gammas[m] > number]
            places = [(slots[m], starts[m] + number) for m in live]
            states = floats_at(address, len(live) * width).view(-1, width)
            self.kept.keep_states(places, [loop] * len(live), states)
            for m, place in zip(live, places, strict=True):
                self._keep_token(call.forward, place, tokens[m])
            address += len(live) * width * _FLOAT
        return status, seconds

    def run_choosing(self, call: abi.ChoosingStruct, batch: RowBatch, kv: KVStorage) -> ForwardSeconds:
        """Run a round's forward; keep the last states, unless rows ended without one."""
        # Before the call: rows of a plain round move on in it.
        places, tokens = places_of(batch), batch.token_ids_M.tolist()
        seconds = super().run_choosing(call, batch, kv)
        if call.forward.head_rows == batch.rows:
            width = self.spec.hidden_size
            states = floats_at(call.forward.hidden, batch.rows * width).view(-1, width)
            self.kept.keep_states(places, [self.spec.loops - 1] * batch.rows, states)
        for place, token in zip(places, tokens, strict=True):
            self._keep_token(call.forward, place, token)
        return seconds

    def run_lanes(self, call: ctypes.Structure) -> None:
        """Run the passes of lanes; keep the states of those that stand, and of those that ended last."""
        assert isinstance(call, LanesStruct)
        each = call.lanes_each
        chains = (ChainStruct * call.chains).from_address(call.chain)
        lanes = (LaneStruct * (call.chains * each)).from_address(call.lane)
        commits = (CommitStruct * (call.chains * call.most_passes)).from_address(call.commit)
        entered = [(chain.position, lanes[index * each].token) for index, chain in enumerate(chains)]
        super().run_lanes(call)
        for index, (chain, (first, token)) in enumerate(zip(chains, entered, strict=True)):
            chosen = commits[index * call.most_passes : index * call.most_passes + chain.committed]
            # Of the last choice a lane stands, where the sequence is not over.
            fed = dict(enumerate([token, *(commit.token for commit in chosen[:-1])], first) if chosen else ())
            ended = list(fed)
            loops: dict[int, int] = {}
            for position, lane in enumerate(lanes[index * each : index * each + chain.lanes], chain.position):
                if lane.loops_run and not chain.over:
                    fed[position], loops[position] = lane.token, lane.loops_run - 1
            # A place is used again by the lane that stands ``each`` positions further on.
            untouched = chain.position + chain.lanes - each
            loops |= {position: self.spec.loops - 1 for position in ended if position >= untouched}
            for position, number in fed.items():
                self._keep_token(call.forward, (chain.table, position), number)
            self._keep_lanes(call, chain.table, loops)

    def _keep_lanes(self, call: LanesStruct, table: int, loops: Mapping[int, int]) -> None:
        """Keep the states at these positions of a row of the page table, each after its loop."""
        width, each = self.spec.hidden_size, call.lanes_each
        for position, loop in loops.items():
            row = table * each + position % each
            state_1D = floats_at(call.states + row * width * _FLOAT, width)[None]
            self.kept.keep_states([(table, position)], [loop], state_1D)

    def _keep_token(self, forward: abi.CallStruct, place: Place, token: int) -> None:
        slot, position = place
        at = slot * forward.table_pages + position // PAGE_TOKENS
        (page,) = _numbers(forward.page_table + at * ctypes.sizeof(c_int32), 1)
        self.kept.keep_token(place, token, page)


def _numbers(address: int, count: int) -> list[int]:
    """Return int32 numbers that a compiled call points at."""
    return list((c_int32 * count).from_address(address))
