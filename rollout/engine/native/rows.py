"""The ragged batch: what one forward computes. A row names its sequence's pages, position and length.

Shapes: M rows, S sequences with a page table, P pages of the longest table, R rows whose logits are wanted.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE_TOKENS = 16
"""Tokens per KV page: one vector of keys in the compiled kernels, so a page is never split by a lane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """Rows of one forward, all int32 and contiguous.

    Row m reads keys at positions 0..positions_M[m] of its sequence (its own included: it is written
    first), so rows of one sequence may stand in one batch in any order, prompt chunks and drafts alike.
    """

    token_ids_M: Tensor
    positions_M: Tensor
    table_M: Tensor
    """Which row of ``page_table_SP`` holds this row's pages."""

    page_table_SP: Tensor
    """Page numbers in position order; entries past a sequence's length are ignored."""

    head_rows_R: Tensor
    """Rows whose logits are wanted, ascending."""

    @property
    def rows(self) -> int:
        """M."""
        return self.token_ids_M.shape[0]


class _Column:
    """int32 numbers that are written to the same memory every time."""

    def __init__(self) -> None:
        self._grow(1)

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        numbers = array("i", [0]) * capacity
        self._memory = memoryview(numbers)
        self._tensor = torch.frombuffer(numbers, dtype=torch.int32)
        self._views: dict[int, Tensor] = {}
        """By length, all of the present memory: making a view takes longer than finding it."""

    def put(self, numbers: Sequence[int]) -> Tensor:
        """Return a tensor of them, valid until the next call."""
        count = len(numbers)
        if count > self._capacity:
            self._grow(2 * count)
        self._memory[:count] = array("i", numbers)
        view = self._views.get(count)
        if view is None:
            view = self._views[count] = self._tensor[:count]
        return view


class RowColumns:
    """Rows that stay where they stand from round to round, each with a head: one a sequence.

    Of what is not counted as a row nothing means anything.
    """

    def __init__(self, capacity: int, page_table_SP: NDArray[np.int32]) -> None:
        self._columns = np.zeros((4, capacity), np.int32)
        self._columns[3] = np.arange(capacity)
        self._tokens, self._positions, self._tables, _ = self._columns
        self._tensor = torch.from_numpy(self._columns)
        self._page_table_SP = torch.from_numpy(page_table_SP)
        self._batches: dict[int, RowBatch] = {}
        """By rows, all of the same memory."""

    def put(self, row: int, *, token: int, position: int, table: int) -> None:
        """Write a row."""
        self._columns[:3, row] = token, position, table

    def move(self, rows: slice, to: slice) -> None:
        """Write rows elsewhere."""
        self._columns[:3, to] = self._columns[:3, rows]

    @property
    def addresses(self) -> tuple[int, int]:
        """Where tokens and positions stand."""
        return self._tokens.ctypes.data, self._positions.ctypes.data

    def numbers(self, rows: int) -> tuple[list[int], list[int], list[int]]:
        """Return tokens, positions and rows of the page table of the first rows."""
        return self._tokens[:rows].tolist(), self._positions[:rows].tolist(), self._tables[:rows].tolist()

    def batch(self, rows: int) -> RowBatch:
        """Return the first rows; it goes on with them."""
        batch = self._batches.get(rows)
        if batch is None:
            tokens, positions, tables, heads = self._tensor[:, :rows]
            batch = self._batches[rows] = RowBatch(
                token_ids_M=tokens,
                positions_M=positions,
                table_M=tables,
                page_table_SP=self._page_table_SP,
                head_rows_R=heads,
            )
        return batch


class RowMemory:
    """The memory of a round's rows, used again by the next round, and the page table they read."""

    def __init__(self, page_table_SP: NDArray[np.int32]) -> None:
        self._page_table_SP = torch.from_numpy(page_table_SP)
        self._tokens, self._positions, self._tables, self._heads = (_Column() for _ in range(4))

    def batch(
        self, tokens: Sequence[int], positions: Sequence[int], tables: Sequence[int], heads: Sequence[int]
    ) -> RowBatch:
        """Return rows made of these numbers, valid until the next call."""
        return RowBatch(
            token_ids_M=self._tokens.put(tokens),
            positions_M=self._positions.put(positions),
            table_M=self._tables.put(tables),
            page_table_SP=self._page_table_SP,
            head_rows_R=self._heads.put(heads),
        )


def int32(numbers: Sequence[int]) -> Tensor:
    """Return a tensor of them, faster than ``torch.tensor`` makes one."""
    if not numbers:
        return torch.empty(0, dtype=torch.int32)
    return torch.frombuffer(array("i", numbers), dtype=torch.int32)


def rows_of(batch: RowBatch, rows_K: Tensor) -> RowBatch:
    """Return the batch of these rows alone, in this order, without head rows."""
    return RowBatch(
        token_ids_M=batch.token_ids_M[rows_K],
        positions_M=batch.positions_M[rows_K],
        table_M=batch.table_M[rows_K],
        page_table_SP=batch.page_table_SP,
        head_rows_R=torch.empty(0, dtype=torch.int32),
    )
