"""The torch decoder against transformers in float64, and the promise that a row's bits are its own."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from drafters.types import QuantizedLinear
from rollout.engine.native.decoder import KVStorage
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_forward import prepacked
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.testing import SPECS, TinyPolicy, tiny_config, tiny_policy

FAMILIES = sorted(SPECS)
QUICK = ("qwen3", "smollm2")
"""With and without norms of queries and keys; the others are checked as thoroughly among the slow tests."""

EACH_FAMILY = [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]


def decoder_of(policy: TinyPolicy, *, dtype: torch.dtype = torch.float64, exact: bool = True) -> TorchDecoder:
    decoder = TorchDecoder(policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=dtype, exact=exact)
    decoder.load(policy.state)
    return decoder


def batch_of(
    rows: list[tuple[int, int, int]], tables: list[list[int]], head: list[int] | None = None
) -> RowBatch:
    """Rows are (table, position, token); all rows have logits unless ``head`` says which."""
    width = max(len(t) for t in tables)
    padded = [[*t, *[0] * (width - len(t))] for t in tables]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return RowBatch(
        token_ids_M=ints([r[2] for r in rows]),
        positions_M=ints([r[1] for r in rows]),
        table_M=ints([r[0] for r in rows]),
        page_table_SP=torch.tensor(padded, dtype=torch.int32),
        head_rows_R=ints(list(range(len(rows))) if head is None else head),
    )


def prompt(length: int, vocab: int = 48, seed: int = 5) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_chunks(decoder: TorchDecoder, tokens: list[int], sizes: list[int], pages: list[int]) -> Tensor:
    """Logits of every position, computed in chunks of ``sizes``."""
    kv = decoder.new_storage(max(pages) + 1)
    logits, start = [], 0
    for size in sizes:
        rows = [(0, p, tokens[p]) for p in range(start, start + size)]
        logits.append(decoder.forward(batch_of(rows, [pages]), kv).logits_RV.clone())
        start += size
    assert start == len(tokens)
    return torch.cat(logits)


def hf_model(policy: TinyPolicy, *, accurate_norms: bool) -> nn.Module:
    model = AutoModelForCausalLM.from_config(tiny_config(policy.spec), attn_implementation="sdpa")
    model = model.to(torch.float64).eval()
    missing, unexpected = model.load_state_dict(policy.state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    if accurate_norms:
        # transformers' RMS norms compute in float32 even in a float64 model; torch's do not.
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__.endswith("RMSNorm"):
                    norm = nn.RMSNorm(child.weight.shape, eps=policy.spec.norm_eps, dtype=torch.float64)
                    norm.weight.data.copy_(child.weight.data)
                    setattr(parent, name, norm)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_float64_logits_agree_with_transformers_whole_chunked_and_one_by_one(
    family: str, exact: bool
) -> None:
    policy, tokens = tiny_policy(family=family), prompt(50)
    with torch.no_grad():
        expected = hf_model(policy, accurate_norms=True)(torch.tensor([tokens])).logits[0]
    decoder = decoder_of(policy, exact=exact)
    for sizes in ([50], [7, 16, 20, 7], [20, *[1] * 30]):
        got = run_chunks(decoder, tokens, sizes, [3, 1, 0, 2])
        assert (got - expected).abs().max() < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_untouched_transformers_to_its_own_norm_precision(family: str) -> None:
    policy, tokens = tiny_policy(family=family), prompt(50)
    with torch.no_grad():
        expected = hf_model(policy, accurate_norms=False)(torch.tensor([tokens])).logits[0]
    got = run_chunks(decoder_of(policy), tokens, [50], [0, 1, 2, 3])
    assert (got - expected).abs().max() < 2e-5


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float64, torch.bfloat16))],
)
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_a_rows_bits_do_not_depend_on_its_batch_its_chunk_or_its_pages(
    family: str, dtype: torch.dtype
) -> None:
    policy = tiny_policy(family=family)
    decoder = decoder_of(policy, dtype=dtype)
    first, second = prompt(37, seed=1), prompt(21, seed=2)
    alone = run_chunks(decoder, first, [*[1] * 37], [0, 1, 2])
    assert torch.equal(run_chunks(decoder, first, [30, 7], [4, 1, 3]), alone)

    kv = decoder.new_storage(8)
    tables = [[6, 2, 7], [5, 0]]
    rows = [(1, p, t) for p, t in enumerate(second)] + [(0, p, t) for p, t in enumerate(first)]
    mixed = list(reversed(rows))
    logits = decoder.forward(batch_of(mixed, tables), kv).logits_RV
    assert torch.equal(logits[: len(first)].flip(0), alone)


def test_rows_of_two_threads_and_of_one_agree_bit_for_bit_in_exact() -> None:
    policy, tokens = tiny_policy(), prompt(20)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run_chunks(decoder_of(policy), tokens, [20], [0, 1]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_fast_mixes_prefill_and_decode_rows_of_many_sequences() -> None:
    policy = tiny_policy(family="mistral")
    exact, fast = decoder_of(policy), decoder_of(policy, exact=False)
    lengths, pages = [33, 40, 17, 64], 5
    tables = [list(range(s * pages, (s + 1) * pages)) for s in range(4)]
    texts = [prompt(n + 1, seed=n) for n in lengths]
    for step in (0, 1):
        rows = [
            (s, p, texts[s][p])
            for s in range(4)
            # The first two are prefilled in step 0 and decode in step 1; the others have all rows in 1.
            for p in (range(lengths[s]) if (s < 2) == (step == 0) else [lengths[s]] * (s < 2))
        ]
        batch = batch_of(rows, tables)
        if step == 0:
            stores: list[tuple[TorchDecoder, KVStorage]] = [(d, d.new_storage(20)) for d in (exact, fast)]
        a, b = (d.forward(batch, kv).logits_RV for d, kv in stores)
        assert (a - b).abs().max() < 1e-10


def test_another_sequences_nan_in_stale_pages_never_reaches_a_row() -> None:
    policy, tokens = tiny_policy(), prompt(20)
    for exact in (True, False):
        decoder = decoder_of(policy, exact=exact)
        clean = run_chunks(decoder, tokens, [20], [0, 1])
        kv = decoder.new_storage(2)
        kv.keys.fill_(float("nan"))  # type: ignore[attr-defined]
        kv.values.fill_(float("nan"))  # type: ignore[attr-defined]
        rows = [(0, p, t) for p, t in enumerate(tokens)]
        assert torch.equal(decoder.forward(batch_of(rows, [[0, 1]]), kv).logits_RV, clean)


def test_a_copied_page_reads_like_the_original_on_every_plane() -> None:
    policy, tokens = tiny_policy(layers=3), prompt(PAGE_TOKENS + 1)
    decoder = decoder_of(policy)
    kv = decoder.new_storage(4)
    rows = [(0, p, t) for p, t in enumerate(tokens)]
    expected = decoder.forward(batch_of(rows, [[0, 1]]), kv).logits_RV[-1].clone()
    kv.copy_page(0, 2)
    last = batch_of(rows[-1:], [[2, 3]])
    assert torch.equal(decoder.forward(last, kv).logits_RV[0], expected)
    per_token = 2 * 3 * policy.spec.kv_heads * policy.spec.head_dim * 8
    assert kv.bytes_per_page == PAGE_TOKENS * per_token


def test_taps_name_the_residual_stream_after_each_layer() -> None:
    """A41. Loops by name: test_looped_decoder.py."""
    policy, tokens = tiny_policy(layers=3), prompt(9)
    model = hf_model(policy, accurate_norms=True)
    seen: dict[str, Tensor] = {}

    def keep(name: str):  # type: ignore[no-untyped-def]
        return lambda _, __, out: seen.update({name: out[0] if out.ndim == 3 else out})

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(f"layer.{i}"))
    model.model.norm.register_forward_hook(keep("final"))
    model.model.embed_tokens.register_forward_hook(keep("embed"))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    names = ("embed", "layer.0", "layer.1", "layer.2", "final")
    decoder = decoder_of(policy)
    rows = [(0, p, t) for p, t in enumerate(tokens)]
    batch = batch_of(rows, [[0]], head=[8])
    result = decoder.forward(batch, decoder.new_storage(1), taps=(*names, "loop.0.layer.1"))
    assert result.logits_RV.shape == (1, policy.spec.vocab_size)
    for name in names:
        assert (result.taps[name] - seen[name]).abs().max() < 1e-10
    assert torch.equal(result.taps["loop.0.layer.1"], result.taps["layer.1"])
    with pytest.raises(ValueError, match=r"layer\.3"):
        decoder.forward(batch, decoder.new_storage(1), taps=("layer.3",))


def test_embed_block_and_head_compose_to_the_forward_and_loops_have_planes_of_their_own() -> None:
    from dataclasses import replace

    policy, tokens = tiny_policy(), prompt(19)
    looped = replace(policy, spec=replace(policy.spec, loops=2))
    decoder = decoder_of(looped)
    batch = batch_of([(0, p, t) for p, t in enumerate(tokens)], [[0, 1]])
    whole, parts = decoder.new_storage(2), decoder.new_storage(2)
    expected = decoder.forward(batch, whole).logits_RV
    hidden = decoder.embed(batch.token_ids_M)
    for loop in (0, 1):
        hidden = decoder.block(hidden, batch, parts, loop=loop)
    assert torch.equal(decoder.head(hidden), expected)
    assert whole.keys.shape[0] == 4  # type: ignore[attr-defined]
    assert torch.equal(whole.keys, parts.keys)  # type: ignore[attr-defined]
    one_loop = decoder.forward(batch, whole, loops=range(1)).logits_RV
    plain = decoder_of(policy)
    assert torch.equal(one_loop, plain.forward(batch, plain.new_storage(2)).logits_RV)


class Doubled:
    """A linear of twice the policy's weight: easy to tell from the original, and linear in it."""

    bits = 16

    def __init__(self, name: str, weight_NK: Tensor) -> None:
        self.name, self._weight_NK = name, 2 * weight_NK
        self.out_features, self.in_features = weight_NK.shape

    @property
    def weight_bytes(self) -> int:
        return self._weight_NK.nbytes

    def apply(self, x_RK: Tensor) -> Tensor:
        return torch.nn.functional.linear(x_RK, self._weight_NK)


def test_replaced_linears_are_used_and_everything_else_stays_shared() -> None:
    policy, tokens = tiny_policy(family="qwen2"), prompt(8)
    decoder = decoder_of(policy)
    names = [linear.name for linear in decoder.linears()]
    assert names[:4] == ["layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down"]
    assert names[-1] == "head"
    assert len(names) == 4 * policy.spec.layers + 1
    replaced: dict[str, QuantizedLinear] = {
        "head": Doubled("head", next(reversed(list(decoder.linears()))).rows())
    }
    drafter = decoder.with_linears(replaced)
    batch = batch_of([(0, p, t) for p, t in enumerate(tokens)], [[0]])
    kv = decoder.new_storage(1)
    plain = decoder.forward(batch, kv).logits_RV
    assert torch.equal(drafter.forward(batch, kv).logits_RV, 2 * plain)
    with pytest.raises(ValueError, match="no linear"):
        decoder.with_linears({"layers.9.qkv": replaced["head"]})
    with pytest.raises(ValueError, match="cannot replace"):
        decoder.with_linears({"layers.0.qkv": replaced["head"]})


def test_loading_keeps_every_address_and_a_tied_head_follows_the_embedding() -> None:
    first, second = tiny_policy(seed=0, family="qwen3"), tiny_policy(seed=1, family="qwen3")
    decoder = decoder_of(first)
    before = {linear.name: linear.rows().data_ptr() for linear in decoder.linears()}
    drafter = decoder.with_linears({})
    decoder.load(second.state)
    assert {linear.name: linear.rows().data_ptr() for linear in decoder.linears()} == before
    head = list(decoder.linears())[-1].rows()
    assert head.data_ptr() == decoder.weights.embedding_VD.data_ptr()
    tokens = prompt(5)
    expected = run_chunks(decoder_of(second), tokens, [5], [0])
    assert torch.equal(run_chunks(decoder, tokens, [5], [0]), expected)
    assert torch.equal(run_chunks(drafter, tokens, [5], [0]), expected)


def test_no_rows_wanted_gives_no_logits() -> None:
    decoder = decoder_of(tiny_policy())
    batch = batch_of([(0, 0, 3)], [[0]], head=[])
    assert decoder.forward(batch, decoder.new_storage(1)).logits_RV.shape == (0, 48)


@pytest.mark.skipif(not prepacked.supported(), reason="this processor has no oneDNN bfloat16 (no AVX-512)")
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_prepacked_linears_have_the_bits_of_plain_ones_at_every_row_count(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    x = torch.randn(64, 64, generator=generator).bfloat16()
    packed = prepacked.PrepackedLinear(weight)
    assert torch.equal(packed.apply(x[:rows]), torch.nn.functional.linear(x, weight)[:rows])


def test_prepacking_anything_but_bfloat16_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        prepacked.PrepackedLinear(torch.zeros(4, 4))
