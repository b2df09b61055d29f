"""Times single forwards of a model part, for calibration and benchmarks. Touches no live sequence.

Also makes up contexts for benchmarks, since what a round costs does not depend on what its keys say.
"""

import time
from collections.abc import Callable, Sequence

import torch

from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.pages import PagePool, PrefixIndex, pages_for
from rollout.engine.native.pass_clock import wait_for
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.errors import CapacityError


def time_forward(
    decoder: Decoder,
    storage: KVStorage,
    pool: PagePool,
    *,
    rows: int,
    context_tokens: int,
    sequences: int,
    run: Callable[[RowBatch], float] | None = None,
) -> float:
    """Return the seconds of one forward: ``rows`` rows spread over ``sequences``, each at the context's end.

    It runs all loops and the head; or, if given, ``run``, which returns what it took. Needs
    ``sequences * context_tokens`` free token slots. Raises ``CapacityError``. The context is whatever its
    pages hold, in memory of their own.
    """
    per_sequence = -(-rows // sequences)
    pages_each = pages_for(context_tokens + per_sequence)
    pages = pool.take(pages_each * sequences)
    if pages is None:
        raise CapacityError(f"{sequences} sequences of {context_tokens} tokens do not fit the free KV pages")
    try:
        storage.occupy(pages)
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
        wait_for(decoder.forward(batch, storage).logits_RV)
        return time.perf_counter() - started
    finally:
        pool.release(pages)


def make_up_prompts(
    prefix: PrefixIndex,
    storage: KVStorage,
    pool: PagePool,
    prompts: Sequence[Sequence[int]],
    *,
    version: int,
) -> None:
    """Make prompts' full pages known as if they were computed, though nothing meaningful stands in them.

    Texts that follow mean nothing; what they cost is real. Pages known already stay; others that nobody uses
    are given up where the pool is short. Raises ``CapacityError``.
    """
    for tokens in prompts:
        pages = prefix.match(version, tokens, count=False)
        try:
            missing = (len(tokens) - 1) // PAGE_TOKENS - len(pages)
            prefix.evict(missing - pool.free)
            fresh = pool.take(missing)
            if fresh is None:
                raise CapacityError(
                    f"the pages of a prompt of {len(tokens)} tokens do not fit: {missing} more are needed, "
                    f"{pool.free} are free"
                )
            pages += fresh
            storage.occupy(fresh)
            prefix.publish(version, tokens, pages)
        finally:
            pool.release(pages)
