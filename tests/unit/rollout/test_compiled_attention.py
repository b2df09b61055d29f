"""Attention over several chunks of keys: the same bits whoever computes which chunk.

Chunks are of 128 positions (``attention.h``). That they are right is in ``test_compiled_decoder.py``.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, compiled_unavailable
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.policy.spec import ModelSpec
from rollout.testing import TinyPolicy, random_policy, tiny_policy

pytestmark = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))

CHUNK = 128
LENGTH = 3 * CHUNK + 5
TABLE = torch.randperm(40, generator=torch.Generator().manual_seed(3))[: -(-LENGTH // PAGE_TOKENS)].int()


def policy_of(*, window: int | None = None) -> TinyPolicy:
    spec = tiny_policy(family="llama" if window is None else "mistral").spec
    return random_policy(replace(spec, max_positions=LENGTH + 1, sliding_window=window))


def tokens_of(spec: ModelSpec) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(spec.vocab_size, (LENGTH,), generator=generator).int()


def batch_of(tokens: Tensor, positions: list[int]) -> RowBatch:
    rows = torch.tensor(positions, dtype=torch.int32)
    return RowBatch(
        token_ids_M=tokens[rows.long()],
        positions_M=rows,
        table_M=torch.zeros(len(positions), dtype=torch.int32),
        page_table_SP=TABLE[None],
        head_rows_R=torch.arange(len(positions), dtype=torch.int32),
    )


def decoder_of(policy: TinyPolicy, *, threads: int = 1, defines: tuple[str, ...] = ()) -> CompiledDecoder:
    decoder = CompiledDecoder(
        policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, threads=threads, defines=defines
    )
    decoder.load(policy.state)
    return decoder


def logits(decoder: CompiledDecoder, tokens: Tensor, parts: list[list[int]]) -> Tensor:
    """Run ``parts`` one after the other on fresh KV and return the logits (T, V) of every position."""
    kv = decoder.new_storage(40)
    found = [decoder.forward(batch_of(tokens, part), kv).logits_RV.clone() for part in parts]
    order = torch.tensor([position for part in parts for position in part])
    return torch.cat(found)[order.argsort()]


WHOLE = [list(range(LENGTH))]
AT_ENDS_ALONE = [
    list(range(CHUNK - 1)),
    *[[p] for p in range(CHUNK - 1, CHUNK + 2)],
    list(range(CHUNK + 2, 2 * CHUNK - 1)),
    [2 * CHUNK - 1, 2 * CHUNK],
    list(range(2 * CHUNK + 1, LENGTH - 6)),
    *[[p] for p in range(LENGTH - 6, LENGTH)],
]
"""Rows alone, so that their attention is cut among members; others many at a time, so that it is not."""


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_bits_do_not_depend_on_who_computes_which_chunk(window: int | None, threads: int) -> None:
    policy = policy_of(window=window)
    tokens = tokens_of(policy.spec)
    together_TV = logits(decoder_of(policy), tokens, WHOLE)
    apart_TV = logits(decoder_of(policy, threads=threads), tokens, AT_ENDS_ALONE)
    assert torch.equal(together_TV, apart_TV)


def test_plain_cpp_folds_chunks_to_the_same_bits() -> None:
    policy = policy_of()
    tokens = tokens_of(policy.spec)
    plain = decoder_of(policy, threads=2, defines=("TAILDRAFT_GENERIC",))
    assert torch.equal(logits(plain, tokens, AT_ENDS_ALONE), logits(decoder_of(policy), tokens, WHOLE))


def test_a_cut_row_comes_out_the_same_every_time() -> None:
    policy = policy_of()
    tokens = tokens_of(policy.spec)
    decoder = decoder_of(policy, threads=3)
    kv = decoder.new_storage(40)
    decoder.forward(batch_of(tokens, WHOLE[0][:-1]), kv)
    row = batch_of(tokens, [LENGTH - 1])
    first_RV = decoder.forward(row, kv).logits_RV.clone()
    for _ in range(50):
        assert torch.equal(decoder.forward(row, kv).logits_RV, first_RV)


def shared_rows(lengths: list[int], *, common: int) -> tuple[Tensor, list[list[int]]]:
    """Return page tables (S, P) whose sequences share their first ``common`` tokens' full pages, and the
    positions of the last three rows of each sequence."""
    shared = TABLE[: common // PAGE_TOKENS]
    pages_each = -(-max(lengths) // PAGE_TOKENS)
    tables = torch.zeros(len(lengths), pages_each, dtype=torch.int32)
    fresh = iter(range(40, 40 + len(lengths) * pages_each))
    for table, length in zip(tables, lengths, strict=True):
        own = range(-(-length // PAGE_TOKENS) - len(shared))
        pages = torch.cat([shared, torch.tensor([next(fresh) for _ in own], dtype=torch.int32)])
        table[: len(pages)] = pages
    return tables, [[length - 3, length - 2, length - 1] for length in lengths]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("defines", [(), ("TAILDRAFT_GENERIC",)])
def test_samples_that_share_a_prompt_come_out_as_each_alone(threads: int, defines: tuple[str, ...]) -> None:
    policy = policy_of()
    lengths = [2 * CHUNK + 4, 2 * CHUNK + 40, LENGTH, 2 * CHUNK + 3, LENGTH - 1]
    tables, positions = shared_rows(lengths, common=2 * CHUNK)
    tokens = tokens_of(policy.spec)
    decoder = decoder_of(policy, threads=threads, defines=defines)
    kv = decoder.new_storage(40 + tables.numel())

    def rows(sequence: int, of: list[int]) -> RowBatch:
        own_SP = tables[sequence][None]
        return replace(batch_of((tokens + sequence) % policy.spec.vocab_size, of), page_table_SP=own_SP)

    decoder.forward(rows(0, list(range(2 * CHUNK))), kv)  # the prompt, written once
    for sequence, length in enumerate(lengths):
        decoder.forward(rows(sequence, list(range(2 * CHUNK, length))), kv)
    alone = [
        torch.cat([decoder.forward(rows(s, [p]), kv).logits_RV.clone() for p in at])
        for s, at in enumerate(positions)
    ]

    # All of them at once, the sequences' rows in turns.
    order = [(s, i) for i in range(3) for s in range(len(lengths))]
    together = RowBatch(
        token_ids_M=torch.stack([(tokens[positions[s][i]] + s) % policy.spec.vocab_size for s, i in order]),
        positions_M=torch.tensor([positions[s][i] for s, i in order], dtype=torch.int32),
        table_M=torch.tensor([s for s, _ in order], dtype=torch.int32),
        page_table_SP=tables,
        head_rows_R=torch.arange(len(order), dtype=torch.int32),
    )
    found_RV = decoder.forward(together, kv).logits_RV
    for row_V, (s, i) in zip(found_RV, order, strict=True):
        assert torch.equal(row_V, alone[s][i])


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("threads", [1, 2])
def test_more_rows_than_a_band_holds_come_out_as_each_alone(window: int | None, threads: int) -> None:
    policy = policy_of(window=window)
    tokens = tokens_of(policy.spec)
    decoder = decoder_of(policy, threads=threads)
    kv = decoder.new_storage(40)
    decoder.forward(batch_of(tokens, WHOLE[0]), kv)
    last = list(range(LENGTH - 20, LENGTH))
    together_RV = decoder.forward(batch_of(tokens, last), kv).logits_RV.clone()
    for row_V, position in zip(together_RV, last, strict=True):
        assert torch.equal(row_V, decoder.forward(batch_of(tokens, [position]), kv).logits_RV[0])
