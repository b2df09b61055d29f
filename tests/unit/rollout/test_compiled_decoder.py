"""The compiled forward against one written out in float64, and against itself in every other batch.

Shapes: M rows, V vocabulary, D hidden, T tokens of one sequence, N heads, H head dimension.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from drafters.int4.linears import RebuildableLinear, build_linear
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, CompiledKV, compiled_unavailable
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.policy.spec import ModelSpec
from rollout.testing import tiny_policy

pytestmark = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))

LOGIT_TOLERANCE = 6e-3
"""Logits here are of size 2. The reference rounds keys and values to bf16 as the cache does, so what is left
is float32 arithmetic (about 1e-5) and, in a few of thousands of keys, a rounding that falls the other way:
1/256 of one number among a head's dimensions and a row's keys."""

SPEC = ModelSpec(
    family="llama",
    vocab_size=48,
    hidden_size=64,
    intermediate_size=96,
    layers=2,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    max_positions=128,
    tie_embeddings=False,
    eos_ids=(1,),
)

SPECS = {
    "llama": SPEC,
    "odd sizes": replace(
        SPEC, vocab_size=11, hidden_size=48, intermediate_size=40, query_heads=3, kv_heads=3, layers=3
    ),
    "three kv heads": replace(SPEC, hidden_size=32, vocab_size=200, query_heads=6, kv_heads=3),
    "one kv head, seven queries": replace(SPEC, query_heads=7, kv_heads=1, head_dim=48, tie_embeddings=True),
    "qwen2 biases": replace(SPEC, family="qwen2", qkv_bias=True, tie_embeddings=True),
    "all biases": replace(SPEC, qkv_bias=True, output_bias=True, mlp_bias=True, intermediate_size=40),
    "qwen3 norms": replace(SPEC, family="qwen3", qk_norm=True, head_dim=32, norm_eps=1e-6),
    "mistral window": replace(SPEC, family="mistral", sliding_window=21),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    spec: ModelSpec
    state: dict[str, Tensor]
    cos_PH: Tensor
    sin_PH: Tensor

    def decoder(self, threads: int = 1, defines: tuple[str, ...] = ()) -> CompiledDecoder:
        decoder = CompiledDecoder(
            self.spec, cos_PH=self.cos_PH, sin_PH=self.sin_PH, threads=threads, defines=defines
        )
        decoder.load(self.state)
        return decoder


def random_policy(spec: ModelSpec, seed: int = 0) -> Policy:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).bfloat16()

    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    query, key = spec.query_heads * dim, spec.kv_heads * dim
    state = {"model.embed_tokens.weight": normal(spec.vocab_size, hidden, std=2 * hidden**-0.5)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        linears = {
            "self_attn.q_proj": (query, hidden, spec.qkv_bias),
            "self_attn.k_proj": (key, hidden, spec.qkv_bias),
            "self_attn.v_proj": (key, hidden, spec.qkv_bias),
            "self_attn.o_proj": (hidden, query, spec.output_bias),
            "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
            "mlp.up_proj": (inner, hidden, spec.mlp_bias),
            "mlp.down_proj": (hidden, inner, spec.mlp_bias),
        }
        for name, (rows, columns, has_bias) in linears.items():
            state[f"{prefix}.{name}.weight"] = normal(rows, columns, std=1.5 * columns**-0.5)
            if has_bias:
                state[f"{prefix}.{name}.bias"] = normal(rows, std=0.3)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim} if spec.qk_norm else {}
        for name, size in norms.items():
            state[f"{prefix}.{name}.weight"] = (1 + normal(size, std=0.2)).bfloat16()
    state["model.norm.weight"] = (1 + normal(hidden, std=0.2)).bfloat16()
    if not spec.tie_embeddings:
        state["lm_head.weight"] = normal(spec.vocab_size, hidden, std=2 * hidden**-0.5)
    frequencies = 1e4 ** -(torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(torch.arange(spec.max_positions).float(), frequencies)
    return Policy(spec=spec, state=state, cos_PH=angles.cos(), sin_PH=angles.sin())


def reference_logits(policy: Policy, tokens: Sequence[int]) -> Tensor:
    """Return logits (T, V) of one whole sequence, computed in float64."""
    spec, w = policy.spec, {name: value.double() for name, value in policy.state.items()}
    length, dim, half = len(tokens), spec.head_dim, spec.head_dim // 2
    cos_TH, sin_TH = policy.cos_PH[:length].double(), policy.sin_PH[:length].double()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * w[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def rotated(x_TNH: Tensor) -> Tensor:
        a, b = x_TNH[..., :half], x_TNH[..., half:]
        cos, sin = cos_TH[:, None], sin_TH[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x_TD = w["model.embed_tokens.weight"][list(tokens)]
    ago_TT = torch.arange(length)[:, None] - torch.arange(length)[None]
    seen_TT = (ago_TT >= 0) & (ago_TT < (spec.sliding_window or length))
    for layer in range(spec.layers):
        name = f"model.layers.{layer}"
        h_TD = norm(x_TD, f"{name}.input_layernorm")
        q, k, v = (linear(h_TD, f"{name}.self_attn.{c}_proj").view(length, -1, dim) for c in "qkv")
        if spec.qk_norm:
            q, k = norm(q, f"{name}.self_attn.q_norm"), norm(k, f"{name}.self_attn.k_norm")
        q, k, v = rotated(q), rotated(k).bfloat16().double(), v.bfloat16().double()
        k, v = (t.repeat_interleave(spec.group_size, dim=1) for t in (k, v))
        scores_NTT = torch.einsum("inh,jnh->nij", q, k) * dim**-0.5
        probs_NTT = scores_NTT.masked_fill(~seen_TT, float("-inf")).softmax(-1)
        out_TD = torch.einsum("nij,jnh->inh", probs_NTT, v).reshape(length, -1)
        x_TD = x_TD + linear(out_TD, f"{name}.self_attn.o_proj")
        h_TD = norm(x_TD, f"{name}.post_attention_layernorm")
        gate_TI, up_TI = linear(h_TD, f"{name}.mlp.gate_proj"), linear(h_TD, f"{name}.mlp.up_proj")
        x_TD = x_TD + linear(torch.nn.functional.silu(gate_TI) * up_TI, f"{name}.mlp.down_proj")
    head = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    return norm(x_TD, "model.norm") @ w[head].T


# ---- batches


def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch_of(
    rows: Sequence[tuple[int, int]],
    texts: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    heads: Sequence[int] | None = None,
) -> RowBatch:
    """``rows`` are (sequence, position) pairs; all are head rows unless said otherwise."""
    return RowBatch(
        token_ids_M=ints([texts[s][p] for s, p in rows]),
        positions_M=ints([p for _, p in rows]),
        table_M=ints([s for s, _ in rows]),
        page_table_SP=ints(tables),
        head_rows_R=ints(range(len(rows)) if heads is None else heads),
    )


def text(spec: ModelSpec, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(spec.vocab_size, (length,), generator=generator).tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Four sequences of different lengths on scattered pages."""

    texts: list[list[int]]
    tables: list[list[int]]
    pages: int = 13

    @property
    def rows(self) -> list[tuple[int, int]]:
        return [(s, p) for s, tokens in enumerate(self.texts) for p in range(len(tokens))]


def sequences(spec: ModelSpec) -> Sequences:
    lengths = (37, 5, 16, 50)
    tables = [[7, 2, 11, 0], [3, 0, 0, 0], [9, 0, 0, 0], [1, 12, 4, 8]]
    return Sequences(texts=[text(spec, n, seed=n) for n in lengths], tables=tables)


def logits_by_row(
    decoder: CompiledDecoder, seqs: Sequences, parts: Sequence[Sequence[tuple[int, int]]]
) -> dict[tuple[int, int], Tensor]:
    """Run ``parts`` one forward after the other on fresh KV and return every row's logits."""
    kv = decoder.new_storage(seqs.pages)
    found = {}
    for rows in parts:
        logits_RV = decoder.forward(batch_of(rows, seqs.texts, seqs.tables), kv).logits_RV.clone()
        found.update(zip(rows, logits_RV, strict=True))
    return found


def assert_same_bits(a: dict[tuple[int, int], Tensor], b: dict[tuple[int, int], Tensor]) -> None:
    assert a.keys() == b.keys()
    odd = [row for row in a if not torch.equal(a[row], b[row])]
    assert not odd, f"{len(odd)} of {len(a)} rows differ, first {odd[:3]}"


# ---- right


@pytest.mark.parametrize("name", SPECS)
def test_logits_agree_with_float64(name: str) -> None:
    policy = random_policy(SPECS[name])
    seqs = sequences(policy.spec)
    found = logits_by_row(policy.decoder(threads=2), seqs, [seqs.rows])
    errors = []
    for s, tokens in enumerate(seqs.texts):
        got_TV = torch.stack([found[s, p] for p in range(len(tokens))]).double()
        errors.append((got_TV - reference_logits(policy, tokens)).abs().flatten())
    error = torch.cat(errors)
    assert error.max() < LOGIT_TOLERANCE
    assert error.median() < LOGIT_TOLERANCE / 20


@pytest.mark.parametrize("name", ["one kv head, seven queries", "three kv heads", "mistral window"])
def test_logits_over_several_chunks_of_keys_agree_with_float64(name: str) -> None:
    length = 389  # three chunks of 128 and a little; a window of 150 begins and ends inside chunks
    spec = SPECS[name]
    window = None if spec.sliding_window is None else 150
    policy = random_policy(replace(spec, max_positions=length, sliding_window=window))
    tokens, table = text(policy.spec, length, seed=2), list(range(24, -1, -1))
    decoder = policy.decoder(threads=2)
    batch = batch_of([(0, p) for p in range(length)], [tokens], [table])
    got_TV = decoder.forward(batch, decoder.new_storage(25)).logits_RV.double()
    error = (got_TV - reference_logits(policy, tokens)).abs()
    assert error.max() < LOGIT_TOLERANCE
    assert error.median() < LOGIT_TOLERANCE / 20


def test_tiny_policies_of_every_family_run() -> None:
    for family in ("llama", "smollm2", "qwen2", "qwen3", "mistral"):
        tiny = tiny_policy(family=family)
        policy = Policy(spec=tiny.spec, state=tiny.state, cos_PH=tiny.cos_PH, sin_PH=tiny.sin_PH)
        tokens = text(tiny.spec, 40, seed=1)
        rows = [(0, p) for p in range(40)]
        batch = batch_of(rows, [tokens], [[0, 1, 2]])
        got_TV = policy.decoder().forward(batch, policy.decoder().new_storage(3)).logits_RV
        assert (got_TV.double() - reference_logits(policy, tokens)).abs().max() < LOGIT_TOLERANCE


# ---- row-invariant


@pytest.fixture(scope="module")
def invariance() -> tuple[Policy, Sequences, dict[tuple[int, int], Tensor]]:
    """A policy, its sequences and every row's logits when rows are decoded one by one."""
    policy = random_policy(SPECS["one kv head, seven queries"])
    seqs = sequences(policy.spec)
    return policy, seqs, logits_by_row(policy.decoder(), seqs, [[row] for row in seqs.rows])


Invariance = tuple[Policy, Sequences, dict[tuple[int, int], Tensor]]


@pytest.mark.parametrize("chunk", [2, 3, 4, 5, 6, 7, 8, 13, 31, 200])
def test_a_rows_bits_do_not_depend_on_how_many_rows_run_with_it(invariance: Invariance, chunk: int) -> None:
    policy, seqs, alone = invariance
    parts = [seqs.rows[i : i + chunk] for i in range(0, len(seqs.rows), chunk)]
    assert_same_bits(logits_by_row(policy.decoder(), seqs, parts), alone)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_a_rows_bits_do_not_depend_on_threads(invariance: Invariance, threads: int) -> None:
    policy, seqs, alone = invariance
    assert_same_bits(logits_by_row(policy.decoder(threads=threads), seqs, [seqs.rows]), alone)
    single = [[row] for row in seqs.rows[-6:]]
    kept = policy.decoder(threads=threads), seqs, [seqs.rows[:-6], *single]
    assert_same_bits(logits_by_row(*kept), alone)


def test_a_rows_bits_do_not_depend_on_order_or_page_numbers(invariance: Invariance) -> None:
    policy, seqs, alone = invariance
    order = torch.randperm(len(seqs.rows), generator=torch.Generator().manual_seed(5)).tolist()
    mixed = [seqs.rows[i] for i in order]
    assert_same_bits(logits_by_row(policy.decoder(), seqs, [mixed]), alone)
    other = replace(seqs, tables=[[0, 1, 2, 0], [4, 0, 0, 0], [5, 0, 0, 0], [12, 10, 8, 6]])
    assert_same_bits(logits_by_row(policy.decoder(), other, [seqs.rows]), alone)


def test_verifying_many_rows_gives_the_bits_of_decoding_one_by_one(invariance: Invariance) -> None:
    policy, seqs, alone = invariance
    prompts = [(s, p) for s, p in seqs.rows if p < 4]
    rounds = [[(s, p) for s, p in seqs.rows if 4 + 5 * r <= p < 9 + 5 * r] for r in range(10)]
    parts = [prompts, *(rows for rows in rounds if rows)]
    assert_same_bits(logits_by_row(policy.decoder(threads=2), seqs, parts), alone)


def test_the_window_moves_with_the_row_whatever_the_chunk() -> None:
    policy = random_policy(SPECS["mistral window"])
    seqs = sequences(policy.spec)
    alone = logits_by_row(policy.decoder(), seqs, [[row] for row in seqs.rows])
    assert_same_bits(logits_by_row(policy.decoder(threads=2), seqs, [seqs.rows]), alone)


@pytest.mark.parametrize(
    ("define", "back_ends"),
    [
        ("TAILDRAFT_GENERIC", ("generic",)),
        # A long build, and the machine's own again unless that has AVX-512.
        pytest.param("TAILDRAFT_AVX2", ("avx2", "generic"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["llama", "odd sizes", "qwen3 norms", "all biases"])
def test_other_back_ends_give_the_same_bits_as_the_machines_own(
    name: str, define: str, back_ends: tuple[str, ...]
) -> None:
    policy = random_policy(SPECS[name])
    seqs = sequences(policy.spec)
    own, other = policy.decoder(), policy.decoder(defines=(define,))
    assert other.description() in {f"compiled-{back_end}-bf16" for back_end in back_ends}
    assert_same_bits(
        logits_by_row(own, seqs, [seqs.rows[:7], seqs.rows[7:]]), logits_by_row(other, seqs, [seqs.rows])
    )


# ---- KV


def test_stale_keys_never_reach_a_row(invariance: Invariance) -> None:
    policy, seqs, alone = invariance
    decoder = policy.decoder()
    kv = decoder.new_storage(seqs.pages)
    decoder.forward(batch_of(seqs.rows, seqs.texts, seqs.tables), kv)
    frontier = 20
    ahead = [(3, p) for p in range(frontier, 50)]
    junk = [text(policy.spec, 50, seed=99)] * 4
    decoder.forward(batch_of(ahead, junk, seqs.tables), kv)  # rejected drafts beyond the frontier
    row = [(3, frontier)]
    got_RV = decoder.forward(batch_of(row, seqs.texts, seqs.tables), kv).logits_RV
    assert torch.equal(got_RV[0], alone[3, frontier])
    kv.data.fill_(float("nan"))  # even what no policy writes stays out of reach
    assert_same_bits(_whole(decoder, seqs, kv), alone)


def _whole(decoder: CompiledDecoder, seqs: Sequences, kv: CompiledKV) -> dict[tuple[int, int], Tensor]:
    logits_RV = decoder.forward(batch_of(seqs.rows, seqs.texts, seqs.tables), kv).logits_RV
    return dict(zip(seqs.rows, logits_RV, strict=True))


def test_a_copied_page_serves_another_sequence_on_every_plane() -> None:
    policy = random_policy(SPEC)
    decoder = policy.decoder()
    kv = decoder.new_storage(6)
    assert kv.bytes_per_page * 6 == kv.data.nbytes
    tokens = text(policy.spec, 30, seed=3)
    rows = [(0, p) for p in range(29)]
    decoder.forward(batch_of(rows, [tokens], [[0, 1]]), kv)
    kv.copy_page(1, 5)
    last = [(0, 29)]
    want = decoder.forward(batch_of(last, [tokens], [[0, 1]]), kv).logits_RV.clone()
    got = decoder.forward(batch_of(last, [tokens], [[0, 5]]), kv).logits_RV
    assert torch.equal(want, got)
    blank = decoder.forward(batch_of(last, [tokens], [[0, 3]]), kv).logits_RV
    assert not torch.allclose(want, blank, atol=0.01)


# ---- parts, taps, loops


def test_embed_block_and_head_are_the_forward_in_parts() -> None:
    spec = replace(SPEC, loops=3)
    policy = random_policy(spec)
    decoder = policy.decoder(threads=2)
    tokens = text(spec, 20, seed=4)
    batch = batch_of([(0, p) for p in range(20)], [tokens], [[1, 0]], heads=[3, 19])
    kv, other = decoder.new_storage(2), decoder.new_storage(2)
    taps = ("embed", "loop.0.layer.1", "loop.2.layer.0", "layer.1", "loop.2.layer.1", "final")
    result = decoder.forward(batch, kv, taps=taps)
    assert tuple(result.taps) == taps
    hidden = decoder.embed(batch.token_ids_M)
    assert torch.equal(hidden, result.taps["embed"])
    for loop in range(3):
        kept = hidden.clone()
        after = decoder.block(hidden, batch, other, loop=loop)
        assert torch.equal(hidden, kept)
        hidden = after
        if loop == 0:
            assert torch.equal(hidden, result.taps["loop.0.layer.1"])
    assert torch.equal(hidden, result.taps["layer.1"])
    assert torch.equal(hidden, result.taps["loop.2.layer.1"])
    assert torch.equal(decoder.head(hidden[[3, 19]]), result.logits_RV)
    assert torch.equal(kv.data, other.data)
    gain_D = policy.state["model.norm.weight"].float()
    normal = hidden / (hidden.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * gain_D
    torch.testing.assert_close(result.taps["final"], normal, atol=1e-5, rtol=1e-5)


def test_each_loop_reads_and_writes_its_own_planes() -> None:
    spec = replace(SPEC, loops=2)
    decoder = random_policy(spec).decoder()
    tokens = text(spec, 18, seed=6)
    batch = batch_of([(0, p) for p in range(18)], [tokens], [[0, 1]])
    kv = decoder.new_storage(2)
    shallow = decoder.forward(batch, kv, loops=range(1)).logits_RV.clone()
    assert kv.data[: spec.layers].any()
    assert not kv.data[spec.layers :].any()
    deep = decoder.forward(batch, kv).logits_RV.clone()
    assert kv.data[spec.layers :].any()
    assert not torch.equal(shallow, deep)
    single = random_policy(replace(spec, loops=1)).decoder()
    assert torch.equal(shallow, single.forward(batch, single.new_storage(2)).logits_RV)


def test_rows_without_a_head_still_write_their_keys() -> None:
    policy = random_policy(SPEC)
    decoder = policy.decoder()
    tokens = text(SPEC, 12, seed=8)
    kv = decoder.new_storage(1)
    silent = batch_of([(0, p) for p in range(11)], [tokens], [[0]], heads=[])
    assert decoder.forward(silent, kv).logits_RV.shape == (0, SPEC.vocab_size)
    last = decoder.forward(batch_of([(0, 11)], [tokens], [[0]]), kv).logits_RV[0].double()
    assert (last - reference_logits(policy, tokens)[-1]).abs().max() < LOGIT_TOLERANCE


# ---- weights


@pytest.mark.parametrize("name", ["llama", "odd sizes", "all biases", "one kv head, seven queries"])
def test_loading_changes_the_weights_and_not_their_addresses(name: str) -> None:
    first, second = random_policy(SPECS[name], seed=0), random_policy(SPECS[name], seed=1)
    decoder = first.decoder()
    seqs = sequences(first.spec)
    before = {w.name: (w.panels.data_ptr(), w.rows()) for w in decoder.linears() if w.panels is not None}
    decoder.load(second.state)
    for weight in decoder.linears():
        assert weight.panels is not None
        address, rows_NK = before[weight.name]
        assert weight.panels.data_ptr() == address
        assert not torch.equal(weight.rows(), rows_NK)
    fresh = second.decoder()
    assert_same_bits(logits_by_row(decoder, seqs, [seqs.rows]), logits_by_row(fresh, seqs, [seqs.rows]))


def test_linears_come_in_order_and_unpack_to_what_was_loaded() -> None:
    spec = SPECS["odd sizes"]
    policy = random_policy(spec)
    state = policy.state
    linears = {weight.name: weight for weight in policy.decoder().linears()}
    parts = ("qkv", "o", "gate_up", "down")
    assert list(linears) == [f"layers.{i}.{p}" for i in range(spec.layers) for p in parts] + ["head"]
    layer = "model.layers.1"
    qkv_NK = torch.cat([state[f"{layer}.self_attn.{c}_proj.weight"] for c in "qkv"])
    assert torch.equal(linears["layers.1.qkv"].rows(), qkv_NK)
    assert torch.equal(linears["layers.1.down"].rows(), state[f"{layer}.mlp.down_proj.weight"])
    assert torch.equal(linears["head"].rows(), state["lm_head.weight"])
    gate_NK, up_NK = (state[f"{layer}.mlp.{c}_proj.weight"] for c in ("gate", "up"))
    pairs = linears["layers.1.gate_up"].rows().view(3, 2, 16, spec.hidden_size)
    assert torch.equal(pairs[:, 0].reshape(48, -1)[:40], gate_NK)
    assert torch.equal(pairs[:, 1].reshape(48, -1)[:40], up_NK)
    assert not pairs[2, :, 8:].any()


def test_a_refused_state_changes_nothing() -> None:
    policy = random_policy(SPEC)
    decoder = policy.decoder()
    rows = {w.name: w.rows() for w in decoder.linears()}
    bad = dict(random_policy(SPEC, seed=1).state)
    bad["model.norm.weight"] = torch.ones(SPEC.hidden_size + 1)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        decoder.load(bad)
    del bad["model.norm.weight"]
    with pytest.raises(ValueError, match=r"no model\.norm\.weight"):
        decoder.load(bad)
    assert all(torch.equal(w.rows(), rows[w.name]) for w in decoder.linears())


# ---- a drafter's linears


def quantized(decoder: CompiledDecoder, *, head_bits: Literal[4, 8]) -> dict[str, RebuildableLinear]:
    """Every linear in 4 bits, group 32; the head in ``head_bits``."""
    return {
        weight.name: build_linear(
            "compiled", weight, bits=head_bits if weight.name == "head" else 4, group=32
        )
        for weight in decoder.linears()
    }


@pytest.mark.parametrize("name", ["llama", "odd sizes", "all biases", "one kv head, seven queries"])
def test_quantized_rows_do_not_depend_on_their_batch_or_threads(name: str) -> None:
    policy = random_policy(SPECS[name])
    seqs = sequences(policy.spec)
    found = []
    for threads, chunk in ((1, 1), (1, 7), (2, 200)):
        decoder = policy.decoder(threads=threads)
        drafter = decoder.with_linears(quantized(decoder, head_bits=8))
        parts = [seqs.rows[i : i + chunk] for i in range(0, len(seqs.rows), chunk)]
        found.append(logits_by_row(drafter, seqs, parts))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


@pytest.mark.parametrize("name", ["llama", "odd sizes", "all biases"])
def test_quantized_logits_are_those_of_the_rounded_weights(name: str) -> None:
    """The same rounded weights in the reference: what is left is activations in 8 bits, under 1% of a
    block's largest, which random signs average down to a few percent of logits of size 2."""
    policy = random_policy(SPECS[name])
    seqs = sequences(policy.spec)
    decoder = policy.decoder(threads=2)
    linears = quantized(decoder, head_bits=8)
    found = logits_by_row(decoder.with_linears(linears), seqs, [seqs.rows])
    rounded = {
        w.name: build_linear("torch", w, bits=8 if w.name == "head" else 4, group=32)
        for w in decoder.linears()
    }
    reference = replace(policy, state=_with_rounded(policy, rounded))
    tokens = seqs.texts[0]
    got_TV = torch.stack([found[0, p] for p in range(len(tokens))]).double()
    want_TV, own_TV = reference_logits(reference, tokens), reference_logits(policy, tokens)
    error, rounding = (got_TV - want_TV).square().mean().sqrt(), (want_TV - own_TV).square().mean().sqrt()
    assert error < 0.1
    assert error < rounding / 2  # it follows the rounded weights, not the policy's


def _with_rounded(policy: Policy, rounded: Mapping[str, RebuildableLinear]) -> dict[str, Tensor]:
    spec, state = policy.spec, dict(policy.state)
    query, key, inner = (
        spec.query_heads * spec.head_dim,
        spec.kv_heads * spec.head_dim,
        spec.intermediate_size,
    )

    def rows(name: str) -> Tensor:
        weight_NK: Tensor = rounded[name].apply(torch.eye(rounded[name].in_features, dtype=torch.float32)).T
        return weight_NK.double()

    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        q, k, v = rows(f"layers.{layer}.qkv").split([query, key, key])
        pairs = rows(f"layers.{layer}.gate_up").view(-1, 2, 16, spec.hidden_size)
        gate, up = (pairs[:, i].reshape(-1, spec.hidden_size)[:inner] for i in (0, 1))
        parts = {"self_attn.q": q, "self_attn.k": k, "self_attn.v": v, "mlp.gate": gate, "mlp.up": up}
        parts |= {"self_attn.o": rows(f"layers.{layer}.o"), "mlp.down": rows(f"layers.{layer}.down")}
        state.update({f"{prefix}.{name}_proj.weight": weight for name, weight in parts.items()})
    state["lm_head.weight"] = rows("head")
    return state


def test_a_drafter_shares_norms_embeddings_and_the_policys_own_head() -> None:
    policy = random_policy(SPEC)
    decoder = policy.decoder()
    linears = quantized(decoder, head_bits=8)
    del linears["head"]
    drafter = decoder.with_linears(linears)
    hidden = torch.randn(5, SPEC.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drafter.head(hidden), decoder.head(hidden))
    before = drafter.embed(ints([3]))
    decoder.load(random_policy(SPEC, seed=1).state)
    assert torch.equal(drafter.head(hidden), decoder.head(hidden))
    assert torch.equal(drafter.embed(ints([3])), decoder.embed(ints([3])))
    assert not torch.equal(drafter.embed(ints([3])), before)


def test_drafts_through_quantized_linears_leave_the_policys_bits_alone() -> None:
    policy = random_policy(SPEC)
    seqs = sequences(SPEC)
    decoder = policy.decoder(threads=2)
    alone = logits_by_row(decoder, seqs, [[row] for row in seqs.rows])
    drafter = decoder.with_linears(quantized(decoder, head_bits=4))
    kv = decoder.new_storage(seqs.pages)
    decoder.forward(batch_of([(0, p) for p in range(20)], seqs.texts, seqs.tables), kv)
    for position in range(20, 24):
        drafter.forward(batch_of([(0, position)], seqs.texts, seqs.tables), kv)
    rows = [(0, p) for p in range(20, 25)]
    verified_RV = decoder.forward(batch_of(rows, seqs.texts, seqs.tables), kv).logits_RV
    assert all(torch.equal(verified_RV[i], alone[row]) for i, row in enumerate(rows))


# ---- refusals


def test_rows_that_would_read_foreign_memory_are_refused() -> None:
    decoder = random_policy(SPEC).decoder()
    kv = decoder.new_storage(2)
    good = batch_of([(0, 0)], [[0] * 200], [[0, 1]])
    for change, reason in (
        ({"token_ids_M": ints([SPEC.vocab_size])}, "vocabulary"),
        ({"token_ids_M": ints([-1])}, "vocabulary"),
        ({"positions_M": ints([SPEC.max_positions])}, "rotary"),
        ({"positions_M": ints([2 * PAGE_TOKENS])}, "page"),
        ({"page_table_SP": ints([[2, 0]])}, "page"),
        ({"table_M": ints([1])}, "page"),
        ({"head_rows_R": ints([1])}, "head row"),
        ({"positions_M": torch.zeros(1, dtype=torch.int64)}, "int32"),
        ({"positions_M": ints([0, 1])}, "length"),
    ):
        with pytest.raises(ValueError, match=reason):
            decoder.forward(replace(good, **change), kv)
    with pytest.raises(ValueError, match=r"layer\.9"):
        decoder.forward(good, kv, taps=("layer.9",))
    with pytest.raises(ValueError, match="loops"):
        decoder.forward(good, kv, loops=range(2))


def test_sizes_the_kernels_cannot_take_are_refused_by_name() -> None:
    policy = random_policy(SPEC)
    spec = replace(SPEC, hidden_size=40)
    with pytest.raises(ValueError, match="hidden_size"):
        CompiledDecoder(spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, threads=1)
    empty = CompiledDecoder(SPEC, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, threads=1)
    with pytest.raises(ValueError, match="load"):
        empty.embed(ints([0]))


def test_a_forked_child_is_told_that_its_threads_are_gone() -> None:
    decoder = random_policy(SPEC).decoder(threads=2)
    child = os.fork()
    if child == 0:
        told = 1
        try:
            decoder.embed(ints([0]))
        except RuntimeError as error:
            told = 0 if "forked" in str(error) else 1
        finally:
            os._exit(told)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert decoder.embed(ints([0])).shape == (1, SPEC.hidden_size)
