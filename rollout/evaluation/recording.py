"""What a run computed, kept: states after loops, target logits, and where keys and values went.

Shapes: M rows, D hidden, V vocabulary, P planes, L loops, T positions.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rollout.engine.native.compiled_forward.decoder import CompiledKV
from rollout.engine.native.decoder import Decoder, ForwardResult, KVStorage
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.errors import UnsupportedError
from rollout.testing_looped import CountingDecoder

Place = tuple[int, int]
"""Row of the page table, position."""


class Kept:
    """What is known of every place. Of what is computed again the last stands: it is what later rows read."""

    def __init__(self) -> None:
        self.storages: list[KVStorage] = []
        self._states: dict[tuple[int, int, int], Tensor] = {}
        self._tokens: dict[Place, int] = {}
        self._pages: dict[Place, int] = {}

    def keep_states(self, places: Iterable[Place], loops: Iterable[int], states_MD: Tensor) -> None:
        """Take copies of states, each after its loop."""
        kept_MD = states_MD.clone()  # a decoder's own buffer, good until its next forward
        for (slot, position), loop, state_D in zip(places, loops, kept_MD, strict=True):
            self._states[slot, position, loop] = state_D

    def keep_token(self, place: Place, token: int, page: int) -> None:
        """Take what was fed at a place, and the page its keys and values went to."""
        self._tokens[place], self._pages[place] = token, page

    def slot_of(self, tokens: Sequence[int]) -> int:
        """Return the row of the page table under which these tokens were fed. Raises ``LookupError``."""
        for slot in sorted({slot for slot, _ in self._tokens}):
            if all(self._tokens.get((slot, p)) == token for p, token in enumerate(tokens)):
                return slot
        raise LookupError(f"the chain of {len(tokens)} tokens was never computed whole")

    def states(self, slot: int) -> Mapping[tuple[int, int], Tensor]:
        """Return the states (D,) of a sequence that were to be seen, by loop and position."""
        return {(loop, p): state for (at, p, loop), state in self._states.items() if at == slot}

    def keys_and_values(self, slot: int, count: int) -> Tensor:
        """Return what the pages of a sequence's first ``count`` positions hold: (P, 2, numbers)."""
        return plane_pages(self.storages[-1], self._pages_of(slot, count))

    def end(self, slot: int, count: int) -> None:
        """Forget a sequence that has ended and zero its pages: none of it is to stand in another's."""
        storage, pages = self.storages[-1], self._pages_of(slot, count)
        if isinstance(storage, CompiledKV):
            storage.data[:, pages] = 0
        elif isinstance(storage, TorchKV):
            for store in (storage.keys, storage.values):
                for page in pages:
                    store[:, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = 0
        self._states = {at: state for at, state in self._states.items() if at[0] != slot}
        self._tokens = {at: token for at, token in self._tokens.items() if at[0] != slot}

    def _pages_of(self, slot: int, count: int) -> list[int]:
        return [self._pages[slot, p] for p in range(0, count, PAGE_TOKENS)]


class RecordingDecoder(CountingDecoder):
    """A ``Decoder`` that counts its work as its parent does, and keeps what came of it, pass by pass."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner)
        self.kept = Kept()
        self._logits: dict[Place, Tensor] = {}

    @property
    def weight_bytes(self) -> int:
        """Of the recorded decoder."""
        return self._inner.weight_bytes

    @property
    def scratch_bytes(self) -> int:
        """Of the recorded decoder."""
        return self._inner.scratch_bytes

    def new_storage(self, pages: int) -> KVStorage:
        """Return the recorded decoder's own, and remember it."""
        self.kept.storages.append(super().new_storage(pages))
        return self.kept.storages[-1]

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
        """Compute with a tap after every loop, and keep what they show; every row is computed whole.

        Raises ``ValueError`` for layers without a loop's last one: there is no state to keep after them.
        """
        run = range(self.spec.loops) if loops is None else loops
        names = [f"loop.{loop}" for loop in run]
        result = super().forward(
            batch, kv, taps=[*taps, *names], loops=loops, layers=layers, hidden_MD=hidden_MD
        )
        for loop, name in zip(run, names, strict=True):
            self._keep(batch, [loop] * batch.rows, result.taps[name])
        if run.stop == self.spec.loops:
            self._keep_logits(batch, range(batch.head_rows_R.shape[0]), result.logits_RV)
        return result

    def advance(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop_M: Tensor) -> ForwardResult:
        """Compute and keep."""
        result = super().advance(hidden_MD, batch, kv, loop_M=loop_M)
        loops = loop_M.tolist()
        self._keep(batch, loops, result.hidden_MD)
        heads = batch.head_rows_R.tolist()
        last = [r for r, row in enumerate(heads) if loops[row] == self.spec.loops - 1]
        self._keep_logits(batch, last, result.logits_RV)
        return result

    def _keep(self, batch: RowBatch, loops: Sequence[int], hidden_MD: Tensor) -> None:
        places, tokens, table = places_of(batch), batch.token_ids_M.tolist(), batch.page_table_SP
        self.kept.keep_states(places, loops, hidden_MD)
        for row, (slot, position) in enumerate(places):
            if loops[row] == 0:
                page = int(table[slot, position // PAGE_TOKENS])
                self.kept.keep_token((slot, position), tokens[row], page)

    def _keep_logits(self, batch: RowBatch, heads: Sequence[int], logits_RV: Tensor) -> None:
        kept_RV, places = logits_RV.clone(), places_of(batch)
        rows = batch.head_rows_R.tolist()
        for head in heads:
            self._logits[places[rows[head]]] = kept_RV[head]

    def logits(self, slot: int, positions: range) -> Tensor:
        """Return the target's logits (T, V) after these positions. Raises ``LookupError``."""
        return torch.stack([self._logits[slot, p] for p in positions])


def places_of(batch: RowBatch) -> list[Place]:
    """Return where the rows of a batch stand."""
    return list(zip(batch.table_M.tolist(), batch.positions_M.tolist(), strict=True))


def plane_pages(storage: KVStorage, pages: Sequence[int]) -> Tensor:
    """Return keys and values of whole pages by plane: (P, 2, numbers), in the storage's own order.

    Raises ``UnsupportedError`` for a storage of another kind.
    """
    if isinstance(storage, CompiledKV):
        return storage.data[:, list(pages)].movedim(3, 1).flatten(2)
    if isinstance(storage, TorchKV):
        planes, slots, heads, size = storage.keys.shape
        by_page = (planes, slots // PAGE_TOKENS, PAGE_TOKENS * heads * size)
        both = (storage.keys.view(by_page), storage.values.view(by_page))
        return torch.stack([store[:, list(pages)].flatten(1) for store in both], dim=1)
    raise UnsupportedError(f"keys and values cannot be read out of {type(storage).__name__}")
