"""The policy's logits after given tokens, computed alone: what teacher forcing and margins are read from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.pages import PagePool, pages_for
from rollout.engine.native.rows import RowBatch
from rollout.errors import CapacityError


def logits_after(decoder: Decoder, storage: KVStorage, pool: PagePool, tokens: Sequence[int]) -> Tensor:
    """Return the logits (V,) of the token after ``tokens``, in one forward over borrowed pages.

    Raises ``CapacityError`` when the pool has no room.
    """
    count = len(tokens)
    pages = pool.take(pages_for(count))
    if pages is None:
        raise CapacityError(f"{count} tokens do not fit the free KV pages")
    try:
        batch = RowBatch(
            token_ids_M=torch.tensor(list(tokens), dtype=torch.int32),
            positions_M=torch.arange(count, dtype=torch.int32),
            table_M=torch.zeros(count, dtype=torch.int32),
            page_table_SP=torch.tensor([pages], dtype=torch.int32),
            head_rows_R=torch.tensor([count - 1], dtype=torch.int32),
        )
        return decoder.forward(batch, storage, states=False).logits_RV[0].clone()
    finally:
        pool.release(pages)
