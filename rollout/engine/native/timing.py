"""Times single forwards of a model part, for calibration and benchmarks. Touches no live sequence."""

import time
from collections.abc import Callable

import torch

from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.pages import PagePool, pages_for
from rollout.engine.native.pass_clock import wait_for
from rollout.engine.native.rows import RowBatch
from rollout.errors import CapacityError


def time_forward(
    decoder: Decoder,
    storage: KVStorage,
    pool: PagePool,
    *,
    rows: int,
    context_tokens: int,
    sequences: int,
    loops: range | None = None,
    run: Callable[[RowBatch], float] | None = None,
) -> float:
    """Return the seconds of one forward: ``rows`` rows spread over ``sequences``, each at the context's end.

    It runs ``loops``, from the first on (all by default), and the head; or, if given, ``run``, which returns
    what it took. Needs ``sequences * context_tokens`` free token slots. Raises ``CapacityError``.
    """
    per_sequence = -(-rows // sequences)
    pages_each = pages_for(context_tokens + per_sequence)
    pages = pool.take(pages_each * sequences)
    if pages is None:
        raise CapacityError(f"{sequences} sequences of {context_tokens} tokens do not fit the free KV pages")
    try:
        numbers = [(i // per_sequence, context_tokens - 1 + i % per_sequence) for i in range(rows)]
        batch = RowBatch(
            token_ids_M=torch.arange(rows, dtype=torch.int32) % decoder.spec.vocab_size,
            positions_M=torch.tensor([p for _, p in numbers], dtype=torch.int32),
            table_M=torch.tensor([s for s, _ in numbers], dtype=torch.int32),
            page_table_SP=torch.tensor(pages, dtype=torch.int32).reshape(sequences, pages_each),
            head_rows_R=torch.arange(rows, dtype=torch.int32),
        )
        if run is not None:
            return run(batch)
        started = time.perf_counter()
        wait_for(decoder.forward(batch, storage, loops=loops).logits_RV)
        return time.perf_counter() - started
    finally:
        pool.release(pages)
