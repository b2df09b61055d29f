"""All draft passes of a batch in one compiled call: forward, head and choice, then the next token's.

What Python would do between two passes takes longer than a pass of a small policy. The tokens are those of
``NativeDraftModel.step``, pass by pass: the same kernels run on the same rows. Only where a head has a
screen, which does not rank its choice among the first, is a draft another one: rare, and a draft is a guess.
Structs are kept from round to round.

Shapes: S sequences with a page table, P pages of the longest table, M sequences that draft, G passes.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controller.types import ForwardSeconds
from rollout.engine.choice_rows import ChoiceRows
from rollout.engine.chooser_call import PortStruct
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder
from rollout.engine.native.compiled_forward.kernels import abi
from rollout.engine.native.decoder import KVStorage
from rollout.engine.native.rows import RowBatch
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


class DraftChains:
    """Runs chains of one decoder's loops, always in the same memory."""

    def __init__(self, decoder: CompiledDecoder, port: PortStruct, *, loops: range) -> None:
        self.shortlist = SHORTLIST
        """Where the decoder has a screen, the head looks at so many tokens of a row alone; at all where any
        row has filters, which need the mass of all tokens."""
        self._decoder, self._loops = decoder, loops
        self._rows = ChoiceRows(vocab_size=decoder.spec.vocab_size, logprobs=False)
        self._call = abi.ChainStruct(port=port)
        self._call.forward.loop_begin, self._call.forward.loop_end = loops.start, loops.stop
        self._call.forward.layer_end = decoder.spec.layers

    def forward_s(self, batch: RowBatch, kv: KVStorage) -> float:
        """Return the seconds of a pass's forward without its choice, as a chain without filters runs it."""
        started = time.perf_counter()
        self._decoder.forward(batch, kv, loops=self._loops, states=False, screened=True)
        return time.perf_counter() - started

    def run(
        self,
        rows: Sequence[ChainRow],
        *,
        kv: KVStorage,
        page_table: tuple[int, int, int],
        states_address: int | None,
    ) -> ChainRun:
        """Draft for every row until its gamma is reached; ``rows`` stand by falling gamma.

        ``page_table`` is the address of S x P numbers, S and P. Pages up to the last draft must be reserved.
        States go to ``states_address``, float32, a row for every row of every pass in order, nowhere when
        that is None. An error ends the chain; drafts before it are sound.
        """
        count, memory = len(rows), self._decoder.memory_of(kv)
        last, slots, gammas, targets = zip(*rows, strict=True)
        self._rows.fill(targets)
        numbers = array("i", [target.position - 1 for target in targets])
        numbers.extend(slots)
        numbers.extend(gammas)
        numbers.extend(range(2 * count))  # head rows, then room for what is finite
        numbers.extend(last)
        numbers.frombytes(bytes(_INT32 * count * gammas[0]))
        start, each = numbers.buffer_info()[0], _INT32 * count
        call = self._call
        call.choose = self._rows.call
        call.choose.row_stride = call.choose.vocab
        forward = call.forward
        forward.rows = count
        forward.page_table, forward.tables, forward.table_pages = page_table
        forward.table, forward.head_index = start + each, start + 3 * each
        forward.kv, forward.kv_pages = memory.data.data_ptr(), memory.pages
        forward.hidden = states_address
        call.positions, call.gammas, call.finite = start, start + 2 * each, start + 4 * each
        call.tokens, call.next = start + 5 * each, call.choose.positions
        call.shortlist = self.shortlist if self._decoder.screens and not call.choose.top_k else 0
        call.keep_states = states_address is not None
        call.forwards = call.passes = 0
        call.choose_s = 0.0
        status, split = self._decoder.run_chain(call)
        forwards, passes = call.forwards, call.passes
        error = abi.STATUS[status] if status else ""
        if forwards > passes:
            error = "the drafter's logits are not finite"
        by_pass = numbers[5 * count :].tolist()
        tokens = [by_pass[m::count] for m in range(count)]  # of row m
        return ChainRun(
            drafts=[t[1 : 1 + min(gamma, passes)] for t, gamma in zip(tokens, gammas, strict=True)],
            fed=[t[: min(gamma, forwards)] for t, gamma in zip(tokens, gammas, strict=True)],
            split=split,
            choose_s=call.choose_s,
            error=error,
        )
