"""Forwards in buckets: real rows get what they get unpadded, and what fills up touches nobody's memory.

The recorder here runs the recorded function again on the same buffers, so all is tested but the recording.
"""

import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafters.int4.linears import build_linear
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_forward import forward_graphs
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.native.torch_forward.flash_attention import FlashAttention
from rollout.engine.native.torch_forward.flash_kernels import FlashKernels
from rollout.engine.native.torch_forward.forward_graphs import EagerRecorder
from rollout.engine.native.torch_forward.row_buckets import (
    MOST_ROWS,
    MOST_WIDTH,
    Bucket,
    Placed,
    StaticRows,
    place,
)
from rollout.testing import SPECS, TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_native import CountingRecorder

SEQUENCES, PAGES_EACH = 8, 10
TABLE = torch.randperm(SEQUENCES * PAGES_EACH, generator=torch.Generator().manual_seed(0)).view(SEQUENCES, -1)
POOL = SEQUENCES * PAGES_EACH


def batch_of(rows: list[tuple[int, int]], head: list[int] | None = None, salt: int = 0) -> RowBatch:
    """Rows are (sequence, position)."""
    return RowBatch(
        token_ids_M=torch.tensor([(7 * s + 5 * p + 3 + salt) % 48 for s, p in rows], dtype=torch.int32),
        positions_M=torch.tensor([p for _, p in rows], dtype=torch.int32),
        table_M=torch.tensor([s for s, _ in rows], dtype=torch.int32),
        page_table_SP=TABLE.int(),
        head_rows_R=torch.tensor(range(len(rows)) if head is None else head, dtype=torch.int32),
    )


def plain_decoder(policy: TinyPolicy) -> TorchDecoder:
    made = TorchDecoder(
        policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=torch.float64, exact=False
    )
    made.load(policy.state)
    return made


def recorded(plain: TorchDecoder) -> tuple[TorchDecoder, CountingRecorder]:
    recorder = CountingRecorder()
    return plain.with_fast_paths(plain.attention, recorder), recorder


def prefilled(decoder: TorchDecoder, lengths: list[int]) -> TorchKV:
    """Return memory in which every sequence has its first positions, and all else is NaN."""
    storage = decoder.new_storage(POOL)
    assert isinstance(storage, TorchKV)
    storage.keys.fill_(float("nan"))
    storage.values.fill_(float("nan"))
    for s, length in enumerate(lengths):
        decoder.forward(batch_of([(s, p) for p in range(length)]), storage)
    return storage


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


LENGTHS = [17, 33, 18, 40, 130, 16, 20, 31]


@pytest.mark.parametrize("family", [*sorted(SPECS)])
def test_rows_in_buckets_get_the_logits_and_states_they_get_alone(family: str) -> None:
    plain = plain_decoder(tiny_policy(family=family))
    graphed, recorder = recorded(plain)
    storages = [prefilled(plain, LENGTHS) for _ in range(2)]
    rng = random.Random(5)
    shapes: set[Bucket] = set()
    for _ in range(12):
        # Some sequences, each with its last token and some drafts, in any order; not all have a readout.
        chosen = rng.sample(range(SEQUENCES), rng.randint(1, SEQUENCES))
        most = rng.choice([1, 1, 3, 9])
        rows = [(s, LENGTHS[s] + i) for s in chosen for i in range(rng.randint(1, most))]
        rng.shuffle(rows)
        head = sorted(rng.sample(range(len(rows)), rng.randint(0, len(rows))))
        batch = batch_of(rows, head, salt=rng.randrange(40))
        expected, found = (d.forward(batch, kv) for d, kv in zip((plain, graphed), storages, strict=True))
        assert found.logits_RV.shape == expected.logits_RV.shape
        assert apart(found.hidden_MD, expected.hidden_MD) < 1e-10
        if head:
            assert apart(found.logits_RV, expected.logits_RV) < 1e-10
        placed = place(batch)
        assert placed is not None
        shapes.add(placed.bucket)
    # Every shape was recorded once, and some were run again.
    assert recorder.recorded == len(shapes) < 12


def test_what_fills_up_writes_to_the_spare_page_and_nowhere_else() -> None:
    plain = plain_decoder(tiny_policy())
    graphed, _ = recorded(plain)
    storage = prefilled(plain, LENGTHS)
    before = storage.keys.clone(), storage.values.clone()
    rows = [(0, 17), (0, 18), (0, 19), (3, 40), (4, 130)]
    graphed.forward(batch_of(rows), storage)
    slots = [int(TABLE[s, p // PAGE_TOKENS]) * PAGE_TOKENS + p % PAGE_TOKENS for s, p in rows]
    own = torch.zeros(storage.keys.shape[1], dtype=torch.bool)
    own[slots] = True
    spare = slice(storage.spare_page * PAGE_TOKENS, None)
    for store, old in zip((storage.keys, storage.values), before, strict=True):
        assert bool(store[:, own].isfinite().all())
        assert bool(store[:, spare].isfinite().any())
        others = ~own
        others[spare] = False
        assert torch.equal(store[:, others].nan_to_num(nan=7.0), old[:, others].nan_to_num(nan=7.0))


def test_the_spare_page_is_none_of_the_pool() -> None:
    storage = plain_decoder(tiny_policy()).new_storage(3)
    assert isinstance(storage, TorchKV)
    assert storage.spare_page == storage.pages == 3
    assert storage.keys.shape[1] == 4 * PAGE_TOKENS


def test_nothing_of_an_earlier_batch_is_left_in_a_bucket() -> None:
    plain = plain_decoder(tiny_policy())
    graphed, recorder = recorded(plain)
    storages = [prefilled(plain, LENGTHS) for _ in range(2)]
    for rows in (
        [(s, LENGTHS[s]) for s in range(8)],
        [(s, LENGTHS[s]) for s in range(5)],
        [(6, 20), (5, 16), (7, 31), (0, 17), (4, 130)],
    ):
        expected, found = (
            d.forward(batch_of(rows), kv) for d, kv in zip((plain, graphed), storages, strict=True)
        )
        assert apart(found.logits_RV, expected.logits_RV) < 1e-10
    assert recorder.recorded == 1


def test_what_is_run_again_has_the_bits_of_what_was_recorded() -> None:
    plain = plain_decoder(tiny_policy())
    graphed, _ = recorded(plain)
    storage = prefilled(plain, LENGTHS)
    batch = batch_of([(1, 33), (1, 34), (2, 18)])
    first = graphed.forward(batch, storage)
    again = graphed.forward(batch, storage)
    assert torch.equal(first.logits_RV, again.logits_RV)
    # Results are the caller's: a later forward does not change them under its hands.
    kept = first.logits_RV.clone()
    graphed.forward(batch_of([(0, 17)], salt=9), storage)
    assert torch.equal(first.logits_RV, kept)


def test_loops_run_from_given_states_and_are_recorded_apart() -> None:
    plain = plain_decoder(tiny_looped_policy(vocab=48))
    graphed, recorder = recorded(plain)
    storages = [prefilled(plain, LENGTHS) for _ in range(2)]
    batch = batch_of([(0, 17), (0, 18), (5, 16)])
    results = []
    for decoder, kv in zip((plain, graphed), storages, strict=True):
        shallow = decoder.forward(batch, kv, loops=range(2))
        deep = decoder.forward(batch, kv, loops=range(2, 4), hidden_MD=shallow.hidden_MD)
        results.append((shallow.hidden_MD, shallow.logits_RV, deep.hidden_MD, deep.logits_RV))
    assert all(apart(a, b) < 1e-10 for a, b in zip(*results, strict=True))
    assert recorder.recorded == 2


def test_new_weights_in_the_same_buffers_need_no_new_recording() -> None:
    policy = tiny_policy()
    plain = plain_decoder(policy)
    graphed, recorder = recorded(plain)
    storage = prefilled(plain, LENGTHS)
    batch = batch_of([(0, 17), (3, 40)])
    before = graphed.forward(batch, storage).logits_RV
    plain.load(tiny_policy(seed=1).state)
    after = graphed.forward(batch, storage).logits_RV
    assert apart(after, plain.forward(batch, storage).logits_RV) < 1e-10
    assert apart(after, before) > 0.1
    assert recorder.recorded == 1


def test_recordings_go_with_the_memory_they_were_made_over() -> None:
    plain = plain_decoder(tiny_policy())
    graphed, recorder = recorded(plain)
    assert graphed.graphs is not None
    batch = batch_of([(0, 17)])
    first, second = (prefilled(plain, LENGTHS) for _ in range(2))
    second.values.mul_(-1)
    a, b = graphed.forward(batch, first).logits_RV, graphed.forward(batch, second).logits_RV
    assert apart(a, plain.forward(batch, first).logits_RV) < 1e-10
    assert apart(b, plain.forward(batch, second).logits_RV) < 1e-10
    assert recorder.recorded == 2
    # Memory that an engine gives back is not kept for a recording's sake.
    del second
    gc.collect()
    assert graphed.graphs.recordings == 0


def test_a_drafters_recordings_outlive_the_rebuilding_of_its_linears() -> None:
    policy = tiny_policy()
    plain = plain_decoder(policy)
    graphed, recorder = recorded(plain)
    linears = {w.name: build_linear("torch", w, bits=4, group=32) for w in graphed.linears()}
    drafter = graphed.with_linears(linears)
    storage, batch = prefilled(plain, LENGTHS), batch_of([(0, 17)])
    before = drafter.forward(batch, storage).logits_RV
    assert apart(before, graphed.forward(batch, storage).logits_RV) > 1e-3
    assert recorder.recorded == 2
    plain.load(tiny_policy(seed=1).state)
    for weight in graphed.linears():
        linears[weight.name].rebuild(weight)
    assert graphed.with_linears(linears) is drafter
    after = drafter.forward(batch, storage).logits_RV
    assert apart(after, plain.with_linears(linears).forward(batch, storage).logits_RV) < 1e-10
    assert apart(after, before) > 0.1
    assert recorder.recorded == 2
    # Other objects are other memory: what was recorded must not be run for them.
    others = {w.name: build_linear("torch", w, bits=4, group=32) for w in graphed.linears()}
    other = graphed.with_linears(others)
    assert other.graphs is not drafter.graphs
    other.forward(batch, storage)
    assert recorder.recorded == 3


class NoHost(TorchDispatchMode):
    """Refuses what takes numbers back to the host, as recording does, and operands of another device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"), name
        tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        assert all(t.device.type == "meta" for t in tensors), f"{name} reads a tensor of the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "flash"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "ouro"])
def test_what_is_recorded_stays_on_the_device(family: str, attention: str) -> None:
    policy = tiny_policy(family=family)
    decoder = TorchDecoder(
        policy.spec,
        cos_PH=policy.cos_PH,
        sin_PH=policy.sin_PH,
        dtype=torch.bfloat16,
        device="meta",
        exact=False,
    )
    if attention == "flash":

        def cache(query_SQAH: Tensor, *_: Tensor, **__: object) -> Tensor:
            return torch.empty_like(query_SQAH)

        kernels = FlashKernels(
            description="none", varlen=cache, cache=cache, page_multiple=256, table_recordable=False
        )
        decoder = decoder.with_fast_paths(FlashAttention(kernels), None)
    storage = decoder.new_storage(8)
    assert isinstance(storage, TorchKV)
    rows = StaticRows(Bucket(sequences=4, width=2, pages=8), spare_page=8, device=torch.device("meta"))
    with NoHost():
        logits, hidden = decoder._padded_forward(rows, storage, range(policy.spec.loops))
    assert (logits.shape, hidden.shape) == ((8, 48), (8, policy.spec.hidden_size))


def test_what_was_not_used_for_longest_goes_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "MOST_RECORDINGS", 2)
    plain = plain_decoder(tiny_policy(layers=1))
    graphed, recorder = recorded(plain)
    storage = prefilled(plain, LENGTHS)
    one, two, four = ([(s, LENGTHS[s]) for s in range(count)] for count in (1, 2, 4))
    for rows, recordings in ((one, 1), (two, 2), (one, 2), (four, 3), (one, 3), (two, 4)):
        graphed.forward(batch_of(rows), storage)
        assert recorder.recorded == recordings
    assert graphed.graphs is not None
    assert graphed.graphs.recordings == 2


def test_prompts_and_looks_inside_are_run_as_they_are() -> None:
    plain = plain_decoder(tiny_policy())
    graphed, recorder = recorded(plain)
    storage = prefilled(plain, LENGTHS)
    graphed.forward(batch_of([(0, p) for p in range(MOST_WIDTH + 1)]), storage)
    tapped = graphed.forward(batch_of([(0, 17)]), storage, taps=("final",))
    assert tapped.taps["final"].shape == (1, 64)
    assert recorder.recorded == 0


def test_rows_computed_one_by_one_are_not_recorded() -> None:
    policy = tiny_policy()
    exact = TorchDecoder(
        policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=torch.float64, exact=True
    )
    with pytest.raises(ValueError, match="every row alone"):
        exact.with_fast_paths(exact.attention, EagerRecorder())


# ---- buckets ------------------------------------------------------------------------------------


def test_buckets_are_powers_of_two_and_hold_their_batch() -> None:
    rng = random.Random(3)
    for _ in range(200):
        counts = [rng.randint(1, rng.choice([1, 4, MOST_WIDTH])) for _ in range(rng.randint(1, SEQUENCES))]
        rows = [(s, 20 + i) for s, count in enumerate(counts) for i in range(count)]
        placed = place(batch_of(rows))
        assert isinstance(placed, Placed)
        bucket = placed.bucket
        for size in (bucket.sequences, bucket.width, bucket.pages):
            assert size & (size - 1) == 0
        assert len(placed.spans) <= bucket.sequences
        assert max(len(span.rows) for span in placed.spans) <= bucket.width
        assert sorted(row for span in placed.spans for row in span.rows) == list(range(len(rows)))
        assert len(rows) <= bucket.rows <= MOST_ROWS
        # Never more than four rows computed for one that is wanted.
        assert bucket.rows <= 4 * len(rows)
        assert bucket.pages * PAGE_TOKENS >= 20 + max(counts)


def test_batches_that_no_bucket_takes() -> None:
    assert place(batch_of([])) is None
    assert place(batch_of([(0, p) for p in range(MOST_WIDTH)])) is not None
    assert place(batch_of([(0, p) for p in range(MOST_WIDTH + 1)])) is None
    many = [(s, 2 * p) for s in range(SEQUENCES) for p in range(MOST_ROWS // SEQUENCES + 1)]
    assert place(batch_of(many[:MOST_ROWS])) is not None
    assert place(batch_of(many)) is None


def test_a_bucket_names_no_page_beyond_what_its_rows_read() -> None:
    bucket = Bucket(sequences=4, width=2, pages=16)
    rows = StaticRows(bucket, spare_page=POOL, device=torch.device("cpu"))
    batch = batch_of([(4, 130), (0, 17), (4, 131)])
    placed = place(batch)
    assert placed is not None
    rows.fill(batch, placed.spans)
    table = rows.sequences.table_SP
    assert torch.equal(table[0, :2], TABLE[0, :2].int())
    assert torch.equal(table[1, :9], TABLE[4, :9].int())
    assert (
        set(table[0, 2:].tolist())
        == set(table[1, 9:].tolist())
        == set(table[2:].flatten().tolist())
        == {POOL}
    )
    assert rows.sequences.lasts_S.tolist() == [17, 131, 0, 0]
    assert rows.positions_R.tolist() == [17, 17, 130, 131, 0, 0, 0, 0]


def test_a_bucket_filled_again_holds_what_a_fresh_one_does() -> None:
    bucket = Bucket(sequences=4, width=2, pages=16)
    used, fresh = (StaticRows(bucket, spare_page=POOL, device=torch.device("cpu")) for _ in range(2))
    full = batch_of([(s, LENGTHS[s] + i) for s in range(4) for i in range(2)])
    small = batch_of([(4, 130)])
    for rows, batches in ((used, (full, small)), (fresh, (small,))):
        for batch in batches:
            placed = place(batch)
            assert placed is not None
            rows.fill(batch, placed.spans)
    for name in ("token_ids_R", "positions_R", "write_slots_R"):
        assert torch.equal(getattr(used, name), getattr(fresh, name))
    assert torch.equal(used.sequences.lasts_S, fresh.sequences.lasts_S)
    assert torch.equal(used.sequences.table_SP, fresh.sequences.table_SP)
