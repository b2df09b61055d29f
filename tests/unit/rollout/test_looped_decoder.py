"""Looped policies in both decoders: right by a forward written out in float64, and the same however split."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, compiled_unavailable
from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.exit_gate import exit_gates, exit_probabilities
from rollout.engine.native.rows import RowBatch
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.errors import UnsupportedError
from rollout.testing import (
    LOOPED_SPECS,
    TINY_THETA,
    TinyPolicy,
    random_policy,
    tiny_looped_policy,
    tiny_policy,
)
from rollout.testing_looped import DenseRun, dense_ouro

LOOPS = 4
SMALL = replace(LOOPED_SPECS["ouro"], vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8)
"""Head dimension 8: the torch decoder alone computes it."""

LOGIT_TOLERANCE = 6e-3
"""As for other families: the reference rounds keys and values to bf16 as the compiled cache does, and float32
arithmetic lets a few of thousands of those fall the other way."""

LENGTHS = (19, 3, 9)
TABLES = [[4, 1, 0], [6, 0, 0], [2, 7, 5]]
Row = tuple[int, int]
"""Sequence, position."""

needs_kernels = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))
COMPILED = pytest.param("compiled", marks=needs_kernels)
KINDS = [pytest.param("torch"), COMPILED]


def decoder_of(policy: TinyPolicy, kind: str, *, threads: int = 1, generic: bool = False) -> Decoder:
    if kind != "compiled":
        return torch_decoder(policy, torch.float32)
    decoder = CompiledDecoder(
        policy.spec,
        cos_PH=policy.cos_PH,
        sin_PH=policy.sin_PH,
        threads=threads,
        defines=("TAILDRAFT_GENERIC",) if generic else (),
    )
    decoder.load(policy.state)
    return decoder


def torch_decoder(policy: TinyPolicy, dtype: torch.dtype, *, exact: bool = True) -> TorchDecoder:
    decoder = TorchDecoder(policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=dtype, exact=exact)
    decoder.load(policy.state)
    return decoder


def texts(vocab: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def batch_of(rows: Sequence[Row], tokens: list[list[int]], heads: Sequence[int] | None = None) -> RowBatch:
    def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return RowBatch(
        token_ids_M=ints([tokens[s][p] for s, p in rows]),
        positions_M=ints([p for _, p in rows]),
        table_M=ints([s for s, _ in rows]),
        page_table_SP=ints(TABLES),
        head_rows_R=ints(range(len(rows)) if heads is None else list(heads)),
    )


def every_row(lengths: Sequence[int] = LENGTHS) -> list[Row]:
    return [(s, p) for s, n in enumerate(lengths) for p in range(n)]


def same_memory(a: KVStorage, b: KVStorage) -> bool:
    if isinstance(a, TorchKV) and isinstance(b, TorchKV):
        return torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    return torch.equal(a.data, b.data)  # type: ignore[attr-defined]


# ---- right


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_states_logits_gates_and_kv_by_plane_are_those_of_a_dense_float64_forward(exact: bool) -> None:
    """A48: in two parts, against one of everything at once. Drafts and rollback: test_shallow_loop.py."""
    policy = random_policy(SMALL, seed=3)
    decoder = torch_decoder(policy, torch.float64, exact=exact)
    tokens, kv = texts(64), decoder.new_storage(8)
    assert isinstance(kv, TorchKV)
    taps = [f"loop.{t}" for t in range(LOOPS)]
    rows = every_row()
    for part in (rows[:11], rows[11:]):
        result = decoder.forward(batch_of(part, tokens), kv, taps=taps)
        for s in {s for s, _ in part}:
            run = dense_ouro(policy.spec, policy.state, tokens[s], theta=TINY_THETA)
            mine = [m for m, (other, _) in enumerate(part) if other == s]
            where = [part[m][1] for m in mine]
            assert (result.logits_RV[mine] - run.logits[-1][where]).abs().max() < 1e-9
            for t, name in enumerate(taps):
                assert (result.taps[name][mine] - run.states[t][where]).abs().max() < 1e-9
                assert (decoder.head(result.taps[name])[mine] - run.logits[t][where]).abs().max() < 1e-9
                assert (decoder.exit_gate(result.taps[name])[mine] - run.gates[t][where]).abs().max() < 1e-9
    for s, table in enumerate(TABLES):
        run = dense_ouro(policy.spec, policy.state, tokens[s], theta=TINY_THETA)
        slots = [table[p // 16] * 16 + p % 16 for p in range(len(tokens[s]))]
        assert run.keys_PTJH.shape[0] == policy.spec.planes == LOOPS * policy.spec.layers
        assert (kv.keys[:, slots] - run.keys_PTJH).abs().max() < 1e-9
        assert (kv.values[:, slots] - run.values_PTJH).abs().max() < 1e-9


@needs_kernels
@pytest.mark.parametrize("shape", ["ouro", "odd sizes"])
def test_compiled_logits_agree_with_the_dense_forward_after_every_loop(shape: str) -> None:
    spec = LOOPED_SPECS["ouro"]
    if shape == "odd sizes":
        spec = replace(
            spec, vocab_size=53, hidden_size=48, intermediate_size=40, kv_heads=4, layers=3, loops=3
        )
    policy = random_policy(spec, seed=1)
    decoder = decoder_of(policy, "compiled", threads=2)
    tokens, taps = texts(spec.vocab_size), [f"loop.{t}" for t in range(spec.loops)]
    result = decoder.forward(batch_of(every_row(), tokens), decoder.new_storage(8), taps=taps)
    wanted = [_dense(policy, t) for t in tokens]
    last_RV = torch.cat([run.logits[-1] for run in wanted])
    error_RV = (result.logits_RV.double() - last_RV).abs()
    assert error_RV.max() < LOGIT_TOLERANCE
    assert error_RV.median() < LOGIT_TOLERANCE / 20
    for t, name in enumerate(taps):
        logits_RV = decoder.head(result.taps[name]).double()
        assert (logits_RV - torch.cat([run.logits[t] for run in wanted])).abs().max() < LOGIT_TOLERANCE
        gates_R = decoder.exit_gate(result.taps[name]).double()
        assert (gates_R - torch.cat([run.gates[t] for run in wanted])).abs().max() < LOGIT_TOLERANCE
    assert torch.equal(result.taps[taps[-1]], result.hidden_MD)


def _dense(policy: TinyPolicy, tokens: Sequence[int]) -> DenseRun:
    return dense_ouro(policy.spec, policy.state, tokens, theta=TINY_THETA, kv_dtype=torch.bfloat16)


# ---- the same, whatever the split


@pytest.mark.parametrize(
    ("kind", "depth"),
    [("torch", 2), *(pytest.param("compiled", depth, marks=needs_kernels) for depth in (1, 2, 3))],
)
def test_a_shallow_pass_and_the_loops_after_it_are_the_whole_forward(kind: str, depth: int) -> None:
    decoder = decoder_of(tiny_looped_policy(), kind)
    tokens, rows = texts(48), every_row()
    whole, parts = decoder.new_storage(8), decoder.new_storage(8)
    full = decoder.forward(batch_of(rows, tokens), whole, taps=[f"loop.{depth - 1}"])
    full_RV, after_MD = full.logits_RV.clone(), full.taps[f"loop.{depth - 1}"]
    silent = batch_of(rows, tokens, heads=[])
    states = []
    for part in (rows[:20], rows[20:23], rows[23:]):
        shallow = decoder.forward(batch_of(part, tokens, heads=[0]), parts, loops=range(depth))
        assert torch.equal(shallow.logits_RV, decoder.head(shallow.hidden_MD[:1]))
        states.append(shallow.hidden_MD.clone())
    hidden_MD = torch.cat(states)
    assert torch.equal(hidden_MD, after_MD)
    kept_MD = hidden_MD.clone()
    deep = decoder.forward(batch_of(rows, tokens), parts, loops=range(depth, LOOPS), hidden_MD=hidden_MD)
    assert torch.equal(deep.logits_RV, full_RV)
    assert torch.equal(hidden_MD, kept_MD)
    assert same_memory(whole, parts)
    again_MD = decoder.forward(silent, parts, loops=range(depth)).hidden_MD
    # The decoder's own buffer may be handed back to it.
    own = decoder.forward(batch_of(rows, tokens), parts, loops=range(depth, LOOPS), hidden_MD=again_MD)
    assert torch.equal(own.logits_RV, full_RV)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_of_mixed_depth_has_the_bits_of_a_pass_per_depth(kind: str) -> None:
    """Tokens enter one per pass and sequence and run one loop per pass: a position at every depth at once."""
    policy, tokens = tiny_looped_policy(), texts(48, (5, 17, 3))
    decoder = decoder_of(policy, kind)
    whole, parts = decoder.new_storage(8), decoder.new_storage(8)
    rows = every_row((5, 17, 3))
    full_RV = decoder.forward(batch_of(rows, tokens), whole).logits_RV.clone()
    state = {row: torch.zeros(policy.spec.hidden_size) for row in rows}
    found: dict[Row, Tensor] = {}
    for cycle in range(17 + LOOPS - 1):
        # Deepest first: a row's place in the batch must not matter.
        live = [(s, cycle - d) for d in reversed(range(LOOPS)) for s in range(3) if (s, cycle - d) in state]
        loop_M = torch.tensor([cycle - p for _, p in live], dtype=torch.int32)
        done = [m for m, (_, p) in enumerate(live) if cycle - p == LOOPS - 1]
        hidden_MD = torch.stack([state[row] for row in live])
        result = decoder.advance(hidden_MD, batch_of(live, tokens, heads=done), parts, loop_M=loop_M)
        for m, row in enumerate(live):
            state[row] = result.hidden_MD[m].clone()
        found.update(zip([live[m] for m in done], result.logits_RV.clone(), strict=True))
    assert torch.equal(torch.stack([found[row] for row in rows]), full_RV)
    assert same_memory(whole, parts)


@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.slow), COMPILED])
def test_a_rows_bits_do_not_depend_on_what_runs_with_it(kind: str) -> None:
    policy, tokens = tiny_looped_policy(), texts(48)
    decoder, rows = decoder_of(policy, kind), every_row()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2)).tolist()

    def run(parts: list[list[Row]], by: Decoder = decoder) -> Tensor:
        kv, found = by.new_storage(8), {}
        for part in parts:
            found.update(zip(part, by.forward(batch_of(part, tokens), kv).logits_RV.clone(), strict=True))
        return torch.stack([found[row] for row in rows])

    alone = run([[row] for row in rows])
    chunks = [[rows[i : i + n] for i in range(0, len(rows), n)] for n in (2, 3, 4, 5, 31)]
    for parts in (*chunks, [rows], [[rows[i] for i in order]]):
        assert torch.equal(run(parts), alone)
    if kind == "compiled":
        for threads in (2, 3):
            by = decoder_of(policy, kind, threads=threads)
            assert torch.equal(run([rows], by), alone)
            assert torch.equal(run(chunks[0], by), alone)
        plain = decoder_of(policy, kind, generic=True)
        assert torch.equal(run(chunks[2], plain), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_embed_block_and_head_are_the_forward_in_parts(kind: str) -> None:
    decoder, tokens = decoder_of(tiny_looped_policy(), kind), texts(48)
    batch, whole, parts = batch_of(every_row(), tokens), decoder.new_storage(8), decoder.new_storage(8)
    taps = ("embed", "loop.1.layer.1", "loop.1", "layer.0", "loop.3.layer.0", "final")
    full = decoder.forward(batch, whole, taps=taps)
    assert tuple(full.taps) == taps
    hidden_MD = decoder.embed(batch.token_ids_M)
    assert torch.equal(hidden_MD, full.taps["embed"])
    for loop in range(LOOPS):
        hidden_MD = decoder.block(hidden_MD, batch, parts, loop=loop)
        if loop == 1:
            assert torch.equal(hidden_MD, full.taps["loop.1"])
            assert not torch.equal(hidden_MD, full.taps["loop.1.layer.1"])
    assert torch.equal(hidden_MD, full.hidden_MD)
    assert torch.equal(hidden_MD, full.taps["final"])
    assert torch.equal(full.taps["layer.0"], full.taps["loop.3.layer.0"])
    assert torch.equal(decoder.head(hidden_MD), full.logits_RV)
    assert same_memory(whole, parts)


# ---- the gate, and what is refused


@pytest.mark.parametrize("kind", KINDS)
def test_exit_probabilities_follow_from_the_gates_and_sum_to_one(kind: str) -> None:
    policy, tokens = tiny_looped_policy(), texts(48)
    decoder = decoder_of(policy, kind)
    batch = batch_of(every_row(), tokens, heads=[3, 18, 30])
    gates_RT = exit_gates(decoder, batch, decoder.new_storage(8))
    dense = [_dense(policy, t) for t in tokens]
    wanted_RT = torch.stack(
        [torch.cat([run.gates[t] for run in dense])[[3, 18, 30]] for t in range(LOOPS)], 1
    )
    assert (gates_RT.double() - wanted_RT).abs().max() < LOGIT_TOLERANCE
    leave = gates_RT.sigmoid()
    probs_RT = exit_probabilities(gates_RT)
    stay = (1 - leave[:, 0]) * (1 - leave[:, 1])
    torch.testing.assert_close(probs_RT[:, 2], stay * leave[:, 2])
    torch.testing.assert_close(probs_RT[:, 3], stay * (1 - leave[:, 2]))
    torch.testing.assert_close(probs_RT.sum(1), torch.ones(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_without_a_gate_says_so(kind: str) -> None:
    decoder = decoder_of(tiny_policy(), kind)
    with pytest.raises(UnsupportedError, match="llama policy has no exit gate"):
        decoder.exit_gate(torch.zeros(1, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_loops_and_states_that_do_not_fit_are_refused(kind: str) -> None:
    decoder, tokens = decoder_of(tiny_looped_policy(), kind), texts(48)
    batch, kv = batch_of([(0, 0), (1, 0)], tokens), decoder.new_storage(8)
    states_MD = torch.zeros(2, 64)
    for loops in (range(5), range(2, 2), range(0, 4, 2), range(-1, 2)):
        with pytest.raises(ValueError, match="plain range within 4"):
            decoder.forward(batch, kv, loops=loops)
    with pytest.raises(ValueError, match="states were not given"):
        decoder.forward(batch, kv, loops=range(1, 4))
    with pytest.raises(ValueError, match="start at the tokens"):
        decoder.forward(batch, kv, hidden_MD=states_MD)
    with pytest.raises(ValueError, match=r"floats \(2, 64\)"):
        decoder.forward(batch, kv, loops=range(1, 4), hidden_MD=states_MD[:1])
    for bad in ([0], [0, 4], [-1, 0]):
        with pytest.raises(ValueError, match="loop"):
            decoder.advance(states_MD, batch, kv, loop_M=torch.tensor(bad, dtype=torch.int32))
    for tap in ("loop.4", "loop.0.layer.2", "loop.x", "gate"):
        with pytest.raises(ValueError, match="there is no tap"):
            decoder.forward(batch, kv, taps=[tap])
