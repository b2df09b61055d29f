"""Forwards of which only head rows are wanted: the same logits and the same KV, and less work.

Shapes: M rows, D hidden, R head rows.
"""

import pytest
import torch

from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, CompiledKV, compiled_unavailable
from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.rows import RowBatch, int32
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.testing import TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_native import tiny_decoder

needs_kernels = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))

POLICIES = {
    "smollm2": tiny_policy(family="smollm2"),
    "qwen3": tiny_policy(family="qwen3"),
    "ouro": tiny_looped_policy(loops=3),
}
KINDS = [
    pytest.param("torch"),
    pytest.param("compiled 1", marks=needs_kernels),
    pytest.param("compiled 2", marks=needs_kernels),
]
TABLES = torch.tensor([[2, 0, 5], [1, 3, 4]], dtype=torch.int32)

CHUNKS = (
    (((0, 0, 19),), ()),
    (((0, 19, 21), (1, 0, 3)), (1, 4)),
    (((0, 21, 40), (1, 3, 9)), (0, 3, 18, 24)),
    (((0, 40, 42), (1, 9, 10)), (0, 1, 2)),
)
"""Per forward its rows, as (table, first position, end), and which of them have heads."""


def chunk(rows: tuple[tuple[int, int, int], ...], heads: tuple[int, ...], vocab: int) -> RowBatch:
    places = [(table, p) for table, begin, end in rows for p in range(begin, end)]
    return RowBatch(
        token_ids_M=int32([(7 * p + 3 + table) % vocab for table, p in places]),
        positions_M=int32([p for _, p in places]),
        table_M=int32([table for table, _ in places]),
        page_table_SP=TABLES,
        head_rows_R=int32(heads),
    )


def decoder_of(policy: TinyPolicy, kind: str) -> Decoder:
    if kind == "torch":
        return tiny_decoder(policy)
    return tiny_decoder(policy, compiled=True, threads=int(kind[-1]))


def same_memory(mine: KVStorage, other: KVStorage) -> bool:
    if isinstance(mine, CompiledKV) and isinstance(other, CompiledKV):
        return torch.equal(mine.data, other.data)
    assert isinstance(mine, TorchKV)
    assert isinstance(other, TorchKV)
    return torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_logits_and_keys_are_the_bits_of_forwards_that_compute_every_row_whole(
    policy: TinyPolicy, kind: str
) -> None:
    decoder = decoder_of(policy, kind)
    whole_kv, kv = decoder.new_storage(6), decoder.new_storage(6)
    for rows, heads in CHUNKS:
        batch = chunk(rows, heads, policy.spec.vocab_size)
        whole = decoder.forward(batch, whole_kv).logits_RV.clone()
        result = decoder.forward(batch, kv, states=False)
        assert torch.equal(result.logits_RV, whole)
        assert same_memory(kv, whole_kv)
        assert result.hidden_MD.shape == (0, policy.spec.hidden_size)


@pytest.mark.parametrize("kind", KINDS)
def test_later_loops_from_given_states_end_early_as_well(kind: str) -> None:
    policy = POLICIES["ouro"]
    decoder = decoder_of(policy, kind)
    whole_kv, kv = decoder.new_storage(6), decoder.new_storage(6)
    for rows, heads in CHUNKS:
        batch = chunk(rows, heads, policy.spec.vocab_size)
        whole = decoder.forward(batch, whole_kv).logits_RV.clone()
        states_MD = decoder.forward(batch, kv, loops=range(1)).hidden_MD
        result = decoder.forward(batch, kv, loops=range(1, 3), hidden_MD=states_MD, states=False)
        assert torch.equal(result.logits_RV, whole)
        assert same_memory(kv, whole_kv)


@needs_kernels
def test_compiled_rows_without_a_head_stop_before_their_last_layers_output() -> None:
    policy = POLICIES["ouro"]
    decoder = decoder_of(policy, "compiled 1")
    assert isinstance(decoder, CompiledDecoder)
    rows, heads = CHUNKS[2]
    batch, kv = chunk(rows, heads, policy.spec.vocab_size), decoder.new_storage(6)
    before = f"loop.2.layer.{policy.spec.layers - 2}"
    taps = decoder.forward(batch, kv, taps=[before]).taps
    decoder.forward(batch, kv, states=False)
    left_MD = decoder._hidden.rows(batch.rows, policy.spec.hidden_size)
    rest_M = torch.tensor([m not in heads for m in range(batch.rows)])
    assert torch.equal(left_MD[rest_M], taps[before][rest_M])


def test_torch_computes_attention_and_mlp_of_a_last_layer_for_head_rows_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = POLICIES["qwen3"]
    rows_by_linear: dict[str, int] = {}
    linear = TorchDecoder._linear

    def counting(self: TorchDecoder, name: str, x_MK: torch.Tensor) -> torch.Tensor:
        rows_by_linear[name] = rows_by_linear.get(name, 0) + x_MK.shape[0]
        return linear(self, name, x_MK)

    monkeypatch.setattr(TorchDecoder, "_linear", counting)
    decoder = decoder_of(policy, "torch")
    rows, heads = CHUNKS[2]
    batch = chunk(rows, heads, policy.spec.vocab_size)
    decoder.forward(batch, decoder.new_storage(6), states=False)
    last = policy.spec.layers - 1
    assert rows_by_linear["layers.0.gate_up"] == rows_by_linear[f"layers.{last}.qkv"] == batch.rows
    for name in ("o", "gate_up", "down"):
        assert rows_by_linear[f"layers.{last}.{name}"] == len(heads)


def test_taps_are_of_every_row_also_where_states_are_not_wanted() -> None:
    policy = POLICIES["ouro"]
    decoder = decoder_of(policy, "torch")
    rows, heads = CHUNKS[1]
    batch, kv = chunk(rows, heads, policy.spec.vocab_size), decoder.new_storage(6)
    whole = decoder.forward(batch, kv, taps=["loop.2"]).taps["loop.2"]
    assert torch.equal(decoder.forward(batch, kv, taps=["loop.2"], states=False).taps["loop.2"], whole)


def test_the_fast_torch_forward_gives_what_whole_forwards_give_up_to_rounding() -> None:
    policy = POLICIES["smollm2"]
    decoder = tiny_decoder(policy, dtype=torch.float32, exact=False)
    whole_kv, kv = decoder.new_storage(6), decoder.new_storage(6)
    for rows, heads in CHUNKS:
        batch = chunk(rows, heads, policy.spec.vocab_size)
        whole = decoder.forward(batch, whole_kv)
        result = decoder.forward(batch, kv, states=False)
        torch.testing.assert_close(result.logits_RV, whole.logits_RV, atol=1e-4, rtol=0)
        assert isinstance(kv, TorchKV)
        assert isinstance(whole_kv, TorchKV)
        torch.testing.assert_close(kv.keys, whole_kv.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(kv.values, whole_kv.values, atol=1e-4, rtol=0)
