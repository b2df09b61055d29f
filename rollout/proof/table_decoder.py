"""A policy that is a table: logits looked up by the tokens its KV pages hold.

It computes nothing and pages everything: a row's logits follow from the ids written at the positions before
it, read through the page table like keys. So the production round runs on it unchanged, fast enough to be
enumerated, and a row that reads the wrong position gets the wrong distribution.

Shapes: M rows, R head rows, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from drafters.types import LinearWeight, QuantizedLinear
from rollout.engine.native.decoder import ForwardResult, KVStorage
from rollout.engine.native.decoder_work import DecoderWork, WorkCount
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.errors import UnsupportedError
from rollout.policy.spec import ModelSpec

LogitsOf = Callable[[tuple[int, ...]], Tensor]
"""Logits (V,), float64, of the token after a whole context, prompt included."""


class TablePages:
    """Implements ``KVStorage``: one token id per slot; unwritten slots hold 0."""

    bytes_per_page = 8 * PAGE_TOKENS

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.ids = [0] * (pages * PAGE_TOKENS)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page."""
        to, start = target * PAGE_TOKENS, source * PAGE_TOKENS
        self.ids[to : to + PAGE_TOKENS] = self.ids[start : start + PAGE_TOKENS]

    def occupy(self, pages: Sequence[int]) -> None:
        """Do nothing: a list is there from the beginning."""


class TableDecoder:
    """Implements ``Decoder`` on a table. It has no weights, so drafters that quantise them refuse it."""

    compiled = False
    row_invariant = True
    weight_bytes = 0
    scratch_bytes = 0

    def __init__(self, logits_of: LogitsOf, *, vocab_size: int, max_positions: int = 64) -> None:
        self._logits_of = logits_of
        self._work = WorkCount(1)
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.spec = ModelSpec(
            family="table",
            vocab_size=vocab_size,
            hidden_size=1,
            intermediate_size=1,
            layers=1,
            query_heads=1,
            kv_heads=1,
            head_dim=1,
            norm_eps=1e-6,
            max_positions=max_positions,
            tie_embeddings=True,
            eos_ids=(),
        )

    @property
    def work(self) -> DecoderWork:
        """Rows that were written and looked up."""
        return self._work.total()

    def new_storage(self, pages: int) -> TablePages:
        """Return pages of zeros."""
        return TablePages(pages)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take nothing: the table is fixed."""
        if state:
            raise UnsupportedError("a table has no weights to load")

    def forward(
        self,
        batch: RowBatch,
        kv: KVStorage,
        *,
        taps: Sequence[str] = (),
        loops: range | None = None,
        layers: range | None = None,
        hidden_MD: Tensor | None = None,
        states: bool = True,
    ) -> ForwardResult:
        """Write the rows' ids to their slots, then look every head row up by what precedes it."""
        assert isinstance(kv, TablePages), "a table reads ids, not keys"
        self._work.through((0,), batch.rows)
        self._work.head_rows += batch.head_rows_R.shape[0]
        positions: list[int] = batch.positions_M.tolist()
        pages = batch.page_table_SP[batch.table_M].tolist() if positions else []
        for token, position, page_row in zip(batch.token_ids_M.tolist(), positions, pages, strict=True):
            kv.ids[_slot(page_row, position)] = token
        heads: list[int] = batch.head_rows_R.tolist()
        rows = [
            self._row(tuple(kv.ids[_slot(pages[m], at)] for at in range(positions[m] + 1))) for m in heads
        ]
        empty_RV = torch.empty(0, self.spec.vocab_size, dtype=torch.float64)
        return ForwardResult(
            logits_RV=torch.stack(rows) if rows else empty_RV, hidden_MD=torch.empty(batch.rows, 0)
        )

    def advance(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop_M: Tensor) -> ForwardResult:
        """Refuse: a table has no hidden states."""
        raise UnsupportedError("a table has no hidden states")

    def _row(self, context: tuple[int, ...]) -> Tensor:
        if context not in self._known:
            self._known[context] = self._logits_of(context)
        return self._known[context]

    def embed(self, token_ids_M: Tensor) -> Tensor:
        """Refuse: a table has no hidden states."""
        raise UnsupportedError("a table has no hidden states")

    def block(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop: int) -> Tensor:
        """Refuse: a table has no hidden states."""
        raise UnsupportedError("a table has no hidden states")

    def head(self, hidden_RD: Tensor) -> Tensor:
        """Refuse: a table has no hidden states."""
        raise UnsupportedError("a table has no hidden states")

    def exit_gate(self, hidden_MD: Tensor) -> Tensor:
        """Refuse: a table has no hidden states."""
        raise UnsupportedError("a table has no hidden states")

    def linears(self) -> Iterator[LinearWeight]:
        """Yield nothing: a table has none."""
        return iter(())

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> "TableDecoder":
        """Refuse: a table has no linears."""
        raise UnsupportedError("a table has no linears to replace")


def _slot(pages: Sequence[int], position: int) -> int:
    return pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
