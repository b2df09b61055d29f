"""All draft passes of a batch in one compiled call: forward, head and choice, then the next token's.

What Python would do between two passes takes longer than a pass of a small policy. The tokens are those of
``NativeDraftModel.step``, pass by pass: the same kernels run on the same rows. Only where a head has a
screen, which does not rank its choice among the first, is a draft another one: rare, and a draft is a guess.

Shapes: S sequences with a page table, P pages of the longest table.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.types import ForwardSeconds
from rollout.engine.chooser_call import CHOOSE, PortStruct, call_of
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder
from rollout.engine.native.compiled_forward.kernels import abi
from rollout.engine.native.decoder import KVStorage
from rollout.engine.noise import COUPLED_STREAM
from rollout.engine.target import TargetRow

SHORTLIST = 8
"""Tokens of a row that a head looks at where it has a screen. With 8 of SmolLM2's 49152, at temperatures 1
and 0.6, on and off its 4-bit grid, all but 3 of 8000 drafts were what the head alone would have chosen; with
16 all of them, with 4 all but 42."""

_INT32 = 4
"""Bytes."""


class ChainRow(NamedTuple):
    """One sequence to draft for. A tuple: what runs between two compiled calls has to be made quickly."""

    token: int
    """Its last committed one."""

    slot: int
    """Its row of the page table."""

    gamma: int
    """Draft tokens wanted, at least one."""

    target: TargetRow
    """Shapes the choice after ``token``, and after every draft but for the position: it has no edits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainRun:
    """What came of a chain, its sequences in the order given."""

    drafts: list[list[int]]
    """What passes chose that could choose for all of their rows."""

    fed: list[list[int]]
    """The tokens whose rows were computed: the last committed one, then drafts."""

    split: ForwardSeconds
    choose_s: float
    error: str = ""
    """What ended the chain before its time."""


def run_chain(
    decoder: CompiledDecoder,
    rows: Sequence[ChainRow],
    *,
    loops: range,
    kv: KVStorage,
    page_table_SP: NDArray[np.int32],
    page_table_address: int,
    port: PortStruct,
    states_address: int | None,
    shortlist: int = SHORTLIST,
) -> ChainRun:
    """Draft for every row until its gamma is reached; ``rows`` stand by falling gamma.

    Pages up to the last draft must be reserved. States go to ``states_address``, float32, a row for every row
    of every pass in order, nowhere when that is None. An error ends the chain; drafts before it are sound.
    Where the decoder has a screen, the head looks at ``shortlist`` tokens of a row alone; at all where any
    row has filters, which need the mass of all tokens.
    """
    count, gammas = len(rows), [row.gamma for row in rows]
    targets = [row.target for row in rows]
    choose, owned = call_of(targets, vocab_size=decoder.spec.vocab_size)
    choose.row_stride = decoder.spec.vocab_size
    choose.mode, choose.stream = CHOOSE, COUPLED_STREAM
    memory = decoder.memory_of(kv)
    numbers = array("i", [target.position - 1 for target in targets])
    numbers.extend([row.slot for row in rows])
    numbers.extend(gammas)
    numbers.extend(range(2 * count))  # head rows, then room for what is finite
    numbers.extend([row.token for row in rows])
    numbers.frombytes(bytes(_INT32 * count * gammas[0]))
    start, each = numbers.buffer_info()[0], _INT32 * count
    call = abi.ChainStruct(
        forward=abi.CallStruct(
            rows=count,
            tables=page_table_SP.shape[0],
            table_pages=page_table_SP.shape[1],
            loop_begin=loops.start,
            loop_end=loops.stop,
            table=start + each,
            page_table=page_table_address,
            head_index=start + 3 * each,
            kv=memory.data.data_ptr(),
            kv_pages=memory.pages,
            hidden=states_address,
        ),
        choose=choose,
        port=port,
        positions=start,
        gammas=start + 2 * each,
        finite=start + 4 * each,
        tokens=start + 5 * each,
        next=choose.positions,
        shortlist=shortlist if decoder.screens and not choose.top_k else 0,
        keep_states=states_address is not None,
    )
    status, split = decoder.run_chain(call)
    del owned  # what ``choose`` pointed into
    error = abi.STATUS[status] if status else ""
    if call.forwards > call.passes:
        error = "the drafter's logits are not finite"
    by_pass = numbers[5 * count :].tolist()
    tokens = [by_pass[m::count] for m in range(count)]  # of row m
    forwards, passes = call.forwards, call.passes
    return ChainRun(
        drafts=[t[1 : 1 + min(gamma, passes)] for t, gamma in zip(tokens, gammas, strict=True)],
        fed=[t[: min(gamma, forwards)] for t, gamma in zip(tokens, gammas, strict=True)],
        split=split,
        choose_s=call.choose_s,
        error=error,
    )
