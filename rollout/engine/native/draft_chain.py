"""All draft passes of a batch in one compiled call: forward, head and choice, then the next token's.

What Python would do between two passes takes longer than a pass of a small policy. The tokens are those of
``NativeDraftModel.step``, pass by pass: the same kernels run on the same rows.

Shapes: B sequences, G passes, N rows of all passes, D hidden.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from controller.types import ForwardSeconds
from rollout.engine.chooser_call import CHOOSE, PortStruct, call_of
from rollout.engine.native.compiled import CompiledDecoder, seconds_of
from rollout.engine.native.decoder import KVStorage
from rollout.engine.native.kernels import abi
from rollout.engine.noise import COUPLED_STREAM
from rollout.engine.target import TargetRow


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainRow:
    """One sequence to draft for."""

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

    passes: int
    """Passes that chose for all of their rows."""

    hidden_ND: Tensor | None
    """The states of all rows computed, pass by pass; None when they were not to be kept."""

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
    port: PortStruct,
    keep_states: bool,
) -> ChainRun:
    """Draft for every row until its gamma is reached; ``rows`` stand by falling gamma.

    Pages up to the last draft must be reserved. An error ends the chain: drafts before it are sound.
    """
    count, gammas = len(rows), array("i", [row.gamma for row in rows])
    width, memory = decoder.spec.hidden_size, decoder.memory_of(kv)
    hidden_ND = torch.empty(sum(gammas) if keep_states else count, width)
    tokens = array("i", [row.token for row in rows])
    tokens.frombytes(bytes(4 * count * gammas[0]))
    targets = [row.target for row in rows]
    positions = array("i", [target.position - 1 for target in targets])
    slots = array("i", [row.slot for row in rows])
    order = array("i", range(count))
    finite = array("B", bytes(count))
    phase_s = array("d", bytes(8 * len(abi.PHASES)))
    choose, owned = call_of(targets, vocab_size=decoder.spec.vocab_size)
    choose.row_stride = decoder.spec.vocab_size
    choose.mode, choose.stream = CHOOSE, COUPLED_STREAM
    call = abi.ChainStruct(
        forward=abi.CallStruct(
            rows=count,
            tables=page_table_SP.shape[0],
            table_pages=page_table_SP.shape[1],
            loop_begin=loops.start,
            loop_end=loops.stop,
            table=_address(slots),
            page_table=page_table_SP.ctypes.data,
            head_index=_address(order),
            kv=memory.data.data_ptr(),
            kv_pages=memory.pages,
            hidden=hidden_ND.data_ptr(),
        ),
        choose=choose,
        port=port,
        gammas=_address(gammas),
        tokens=_address(tokens),
        positions=_address(positions),
        next=choose.positions,
        finite=_address(finite),
        phase_s=_address(phase_s),
        keep_states=keep_states,
    )
    status = decoder.run_chain(call)
    del owned  # what ``choose`` pointed into
    error = abi.STATUS[status] if status else ""
    if call.forwards > call.passes:
        error = "the drafter's logits are not finite"
    by_pass = [tokens[start : start + count] for start in range(0, len(tokens), count)]
    computed = sum(min(gamma, call.forwards) for gamma in gammas)
    return ChainRun(
        drafts=_by_row(by_pass[1:], gammas, passes=call.passes),
        fed=_by_row(by_pass, gammas, passes=call.forwards),
        passes=call.passes,
        hidden_ND=hidden_ND[:computed] if keep_states else None,
        split=seconds_of(phase_s),
        choose_s=call.choose_s,
        error=error,
    )


def _address(numbers: "array[Any]") -> int:
    return numbers.buffer_info()[0]


def _by_row(tokens_by_pass: "Sequence[array[int]]", gammas: Sequence[int], *, passes: int) -> list[list[int]]:
    """Return per row the tokens of the passes it took part in, of the first ``passes``."""
    return [
        [tokens_by_pass[index][row] for index in range(min(gamma, passes))]
        for row, gamma in enumerate(gammas)
    ]
