"""The numerics self-check and the fingerprint: what "same seed, same text" rests on between hosts."""

from hashlib import blake2b

import torch

from rollout.engine.native.decoder import Decoder
from rollout.engine.native.pages import pages_for
from rollout.engine.native.rows import RowBatch

_CHECK_TOKENS = 20
"""More than one KV page, so that the check crosses a page border."""


def is_row_invariant(decoder: Decoder) -> bool:
    """Whether a prompt's logits have the same bits whole, in chunks, token by token and beside others.

    Runs in a scratch pool before the engine takes requests.
    """
    generator = torch.Generator().manual_seed(0)
    vocab = decoder.spec.vocab_size
    ours = torch.randint(vocab, (_CHECK_TOKENS,), generator=generator, dtype=torch.int32)
    theirs = torch.randint(vocab, (_CHECK_TOKENS,), generator=generator, dtype=torch.int32)
    pages = pages_for(_CHECK_TOKENS)
    storage = decoder.new_storage(2 * pages)
    table = torch.arange(2 * pages, dtype=torch.int32).reshape(2, pages)

    def logits(rows: list[tuple[int, int]], heads: slice = slice(None)) -> torch.Tensor:
        """Run rows of (sequence, position) in one forward; rows without a head end early, as prompts' do."""
        tokens = [int((ours, theirs)[s][p]) for s, p in rows]
        batch = RowBatch(
            token_ids_M=torch.tensor(tokens, dtype=torch.int32),
            positions_M=torch.tensor([p for _, p in rows], dtype=torch.int32),
            table_M=torch.tensor([s for s, _ in rows], dtype=torch.int32),
            page_table_SP=table,
            head_rows_R=torch.arange(len(rows), dtype=torch.int32)[heads].contiguous(),
        )
        return decoder.forward(batch, storage, states=False).logits_RV.clone()

    span = range(_CHECK_TOKENS)
    whole = logits([(0, p) for p in span])
    mixed = logits([(s, p) for p in span for s in (0, 1)])[::2]
    single = torch.cat([logits([(0, p)]) for p in span])
    chunked = torch.cat([logits([(0, p) for p in span[:7]]), logits([(0, p) for p in span[7:]])])
    last = slice(-1, None)
    ended = logits([(0, p) for p in span], last)
    after = torch.cat([logits([(0, p) for p in span[:7]], last), logits([(0, p) for p in span[7:]])])
    return torch.equal(whole[last], ended) and all(
        torch.equal(*pair) for pair in ((whole, mixed), (whole, single), (whole, chunked), (whole[6:], after))
    )


def fingerprint(*, decoder: str, numerics: str, verify: str, weights: str) -> str:
    """Return the name of everything that may change a bit of a rollout.

    The decoder's own description says whether its bits depend on threads or on the instruction set.
    """
    parts = "\0".join([decoder, numerics, verify, weights, torch.__version__])
    return blake2b(parts.encode(), digest_size=12).hexdigest()
