"""Forwards that run some layers of a loop: parts that make a loop are the whole, bit for bit.

Shapes: M rows, D hidden, R head rows, V vocabulary, H head dimension.
"""

import ctypes
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, CompiledKV, compiled_unavailable
from rollout.engine.native.compiled_forward.kernels import abi
from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.decoder_work import DecoderWork
from rollout.engine.native.rows import RowBatch, int32
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.native.torch_forward.forward_graphs import EagerRecorder
from rollout.testing import TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_native import tiny_decoder

needs_kernels = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))

LAYERS = 4
LOOPS = 3
POLICIES = {
    "dense": tiny_policy(family="qwen3", layers=LAYERS),
    "looped": tiny_looped_policy(loops=LOOPS, layers=LAYERS),  # with norms behind attention and MLP
}
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
KINDS = [
    pytest.param("torch"),
    pytest.param("compiled 1", marks=needs_kernels),
    pytest.param("compiled 2", marks=needs_kernels),
    pytest.param("generic 1", marks=needs_kernels),
]
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EACH_BORDER = pytest.mark.parametrize("border", range(1, LAYERS))

TABLES = torch.tensor([[2, 0, 5], [1, 3, 4]], dtype=torch.int32)
PAGES = 6
CHUNKS = (
    (((0, 0, 19), (1, 0, 3)), (18,)),
    (((0, 19, 20), (1, 3, 21)), (0, 18)),
    (((0, 20, 23), (1, 21, 22)), (0, 1, 2, 3)),
)
"""Per forward its rows, as (table, first position, end), and which have heads: prompt chunks with another's
first tokens, then beside a decode row, then rows that all have one, drafts among them."""


def decoder_of(policy: TinyPolicy, kind: str) -> Decoder:
    if kind == "torch":
        return tiny_decoder(policy)
    build, threads = kind.split()
    decoder = CompiledDecoder(
        policy.spec,
        cos_PH=policy.cos_PH,
        sin_PH=policy.sin_PH,
        threads=int(threads),
        defines=("TAILDRAFT_GENERIC",) if build == "generic" else (),
    )
    decoder.load(policy.state)
    return decoder


def chunk(rows: tuple[tuple[int, int, int], ...], heads: tuple[int, ...]) -> RowBatch:
    places = [(table, p) for table, begin, end in rows for p in range(begin, end)]
    return RowBatch(
        token_ids_M=int32([(7 * p + 3 + table) % 48 for table, p in places]),
        positions_M=int32([p for _, p in places]),
        table_M=int32([table for table, _ in places]),
        page_table_SP=TABLES,
        head_rows_R=int32(heads),
    )


def headless(batch: RowBatch) -> RowBatch:
    return replace(batch, head_rows_R=int32([]))


def memory_of(kv: KVStorage) -> Tensor:
    """Return keys and values of all planes."""
    if isinstance(kv, CompiledKV):
        return kv.data
    assert isinstance(kv, TorchKV)
    return torch.stack([kv.keys, kv.values])


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """What a forward of everything left, copied."""

    logits_RV: Tensor
    hidden_MD: Tensor
    taps: dict[str, Tensor]


def run_whole(decoder: Decoder, batch: RowBatch, kv: KVStorage) -> Whole:
    loops, layers = range(decoder.spec.loops), range(decoder.spec.layers)
    names = [f"loop.{loop}.layer.{layer}" for loop in loops for layer in layers]
    names += [f"loop.{loop}" for loop in loops]
    result = decoder.forward(batch, kv, taps=["embed", *names, "final"])
    return Whole(
        logits_RV=result.logits_RV.clone(), hidden_MD=result.hidden_MD.clone(), taps=dict(result.taps)
    )


# ---- the same, whatever the split


@EACH_POLICY
@EACH_KIND
@EACH_BORDER
def test_two_parts_of_every_loop_leave_states_taps_keys_and_logits_of_the_whole(
    policy: TinyPolicy, kind: str, border: int
) -> None:
    decoder = decoder_of(policy, kind)
    whole_kv, kv = decoder.new_storage(PAGES), decoder.new_storage(PAGES)
    first, last = range(border), range(border, LAYERS)
    for rows, heads in CHUNKS:
        batch = chunk(rows, heads)
        whole = run_whole(decoder, batch, whole_kv)
        hidden_MD = None
        for loop in range(policy.spec.loops):
            one, ends = range(loop, loop + 1), loop == policy.spec.loops - 1
            names = [f"loop.{loop}.layer.{layer}" for layer in first]
            before = decoder.forward(
                headless(batch), kv, taps=["embed", *names], loops=one, layers=first, hidden_MD=hidden_MD
            )
            start = whole.taps[f"loop.{loop - 1}" if loop else "embed"]
            assert torch.equal(before.taps["embed"], start)
            assert all(torch.equal(before.taps[name], whole.taps[name]) for name in names)
            assert torch.equal(before.hidden_MD, whole.taps[names[-1]])
            assert before.logits_RV.shape == (0, policy.spec.vocab_size)
            names = [f"loop.{loop}.layer.{layer}" for layer in last] + [f"loop.{loop}"]
            after = decoder.forward(
                batch if ends else headless(batch),
                kv,
                taps=[*names, *(["final"] if ends else [])],
                loops=one,
                layers=last,
                hidden_MD=before.hidden_MD,
            )
            assert all(torch.equal(after.taps[name], whole.taps[name]) for name in names)
            assert torch.equal(after.hidden_MD, whole.taps[f"loop.{loop}"])
            hidden_MD = after.hidden_MD
        assert torch.equal(after.hidden_MD, whole.hidden_MD)
        assert torch.equal(after.taps["final"], whole.taps["final"])
        assert torch.equal(after.logits_RV, whole.logits_RV)
        assert torch.equal(memory_of(kv), memory_of(whole_kv))


@EACH_POLICY
@EACH_KIND
@EACH_BORDER
def test_parts_without_taps_and_states_end_rows_early_and_leave_the_same(
    policy: TinyPolicy, kind: str, border: int
) -> None:
    """The first loops whole, the last in parts: of its last part only head rows are computed whole."""
    decoder = decoder_of(policy, kind)
    whole_kv, kv = decoder.new_storage(PAGES), decoder.new_storage(PAGES)
    deep = policy.spec.loops - 1
    for rows, heads in CHUNKS:
        batch = chunk(rows, heads)
        logits_RV = decoder.forward(batch, whole_kv, states=False).logits_RV.clone()
        before = decoder.forward(headless(batch), kv, loops=range(deep)).hidden_MD if deep else None
        part = {"loops": range(deep, deep + 1), "layers": range(border), "hidden_MD": before}
        states_MD = decoder.forward(headless(batch), kv, **part).hidden_MD  # type: ignore[arg-type]
        part |= {"layers": range(border, LAYERS), "hidden_MD": states_MD}
        result = decoder.forward(batch, kv, states=False, **part)  # type: ignore[arg-type]
        assert torch.equal(result.logits_RV, logits_RV)
        assert torch.equal(memory_of(kv), memory_of(whole_kv))


@EACH_POLICY
@EACH_KIND
def test_early_layers_whose_states_nobody_wants_write_their_keys_and_no_others(
    policy: TinyPolicy, kind: str
) -> None:
    decoder = decoder_of(policy, kind)
    whole_kv, kv = decoder.new_storage(PAGES), decoder.new_storage(PAGES)
    batch = headless(chunk(*CHUNKS[0]))
    decoder.forward(batch, whole_kv)
    for border in range(1, LAYERS):
        result = decoder.forward(batch, kv, loops=range(1), layers=range(border), states=False)
        assert result.hidden_MD.shape == (0, policy.spec.hidden_size)
        found, wanted = memory_of(kv), memory_of(whole_kv)
        planes = 1 if kind == "torch" else 0
        written = found.ne(0).movedim(planes, 0).flatten(1).any(1)
        assert written.tolist() == [plane < border for plane in range(policy.spec.planes)]
        mine, other = (memory.narrow(planes, 0, border) for memory in (found, wanted))
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", [*KINDS[:2]])
def test_all_layers_by_name_are_the_default_over_several_loops_too(kind: str) -> None:
    decoder = decoder_of(POLICIES["looped"], kind)
    whole_kv, kv = decoder.new_storage(PAGES), decoder.new_storage(PAGES)
    batch = chunk(*CHUNKS[0])
    logits_RV = decoder.forward(batch, whole_kv).logits_RV.clone()
    assert torch.equal(decoder.forward(batch, kv, layers=range(LAYERS)).logits_RV, logits_RV)
    assert torch.equal(memory_of(kv), memory_of(whole_kv))


@EACH_KIND
def test_every_layer_alone_is_the_whole_too(kind: str) -> None:
    decoder = decoder_of(POLICIES["dense"], kind)
    whole_kv, kv = decoder.new_storage(PAGES), decoder.new_storage(PAGES)
    for rows, heads in CHUNKS:
        batch = chunk(rows, heads)
        logits_RV = decoder.forward(batch, whole_kv).logits_RV.clone()
        hidden_MD = None
        for layer in range(LAYERS):
            mine = batch if layer == LAYERS - 1 else headless(batch)
            result = decoder.forward(mine, kv, layers=range(layer, layer + 1), hidden_MD=hidden_MD)
            hidden_MD = result.hidden_MD
        assert torch.equal(result.logits_RV, logits_RV)
        assert torch.equal(memory_of(kv), memory_of(whole_kv))


# ---- planes


@needs_kernels
def test_a_decoder_of_one_layer_takes_a_plane_of_a_larger_memory_for_its_own() -> None:
    """What a head of one layer needs: its keys stand where its pages are, and no other plane is touched."""
    policy, layer = POLICIES["dense"], 2
    state = {
        name.replace(f"layers.{layer}.", "layers.0."): value
        for name, value in policy.state.items()
        if f"layers.{layer}." in name or "layers." not in name
    }
    decoder = decoder_of(policy, "compiled 2")
    head = decoder_of(replace(policy, spec=replace(policy.spec, layers=1), state=state), "compiled 2")
    whole_kv, kv = decoder.new_storage(PAGES), decoder.new_storage(PAGES)
    assert isinstance(kv, CompiledKV)
    plane = CompiledKV(pages=PAGES, data=kv.data[layer : layer + 1], occupied=kv.occupied)
    for rows, heads in CHUNKS:
        batch = headless(chunk(rows, heads))
        taps = decoder.forward(batch, whole_kv, taps=["layer.1", "layer.2"]).taps
        assert torch.equal(head.block(taps["layer.1"], batch, plane, loop=0), taps["layer.2"])
    assert torch.equal(kv.data[layer], memory_of(whole_kv)[layer])
    kv.data[layer] = 0
    assert not kv.data.any()


# ---- counted


@EACH_KIND
def test_parts_count_as_the_whole_and_early_layers_alone_count_nothing(kind: str) -> None:
    decoder = decoder_of(POLICIES["looped"], kind)
    kv, batch = decoder.new_storage(PAGES), chunk(*CHUNKS[0])
    states_MD = decoder.forward(headless(batch), kv, loops=range(1)).hidden_MD.clone()
    before = decoder.work
    for states in (True, False):
        part = decoder.forward(
            headless(batch), kv, loops=range(1, 2), layers=range(2), hidden_MD=states_MD, states=states
        )
        states_MD = part.hidden_MD.clone() if states else states_MD
    assert decoder.work == before
    decoder.forward(batch, kv, loops=range(1, 2), layers=range(2, LAYERS), hidden_MD=states_MD)
    assert decoder.work - before == DecoderWork(passes=1, head_rows=1, rows_by_loop=(0, batch.rows, 0))


def test_a_decoder_that_records_its_forwards_runs_some_layers_as_they_are() -> None:
    plain = tiny_decoder(POLICIES["dense"], exact=False)
    assert isinstance(plain, TorchDecoder)
    decoder = plain.with_fast_paths(plain.attention, EagerRecorder())
    whole_kv, kv = plain.new_storage(PAGES), decoder.new_storage(PAGES)
    for rows, heads in CHUNKS:
        batch = chunk(rows, heads)
        whole = plain.forward(batch, whole_kv)
        states_MD = decoder.forward(headless(batch), kv, layers=range(2)).hidden_MD
        result = decoder.forward(batch, kv, layers=range(2, LAYERS), hidden_MD=states_MD)
        torch.testing.assert_close(result.logits_RV, whole.logits_RV, atol=1e-10, rtol=0)
    assert decoder.graphs is not None
    assert decoder.graphs.recordings == 0


# ---- refused


@pytest.mark.parametrize("kind", [*KINDS[:2]])
def test_layers_that_do_not_fit_are_refused_by_name(kind: str) -> None:
    decoder = decoder_of(POLICIES["looped"], kind)
    kv, batch = decoder.new_storage(PAGES), chunk(*CHUNKS[2])
    silent, states_MD = headless(batch), torch.zeros(batch.rows, decoder.spec.hidden_size)
    one = range(1)
    for layers in (range(5), range(2, 2), range(0, 4, 2), range(-1, 2)):
        with pytest.raises(ValueError, match="layers must be a plain range within 4"):
            decoder.forward(silent, kv, loops=one, layers=layers)
    with pytest.raises(ValueError, match=r"layers range\(0, 2\) are some .* loops range\(0, 3\) are several"):
        decoder.forward(silent, kv, layers=range(2))
    with pytest.raises(ValueError, match=r"layers range\(0, 2\) have no logits for 4 head rows"):
        decoder.forward(batch, kv, loops=one, layers=range(2))
    with pytest.raises(ValueError, match=r"layers range\(2, 4\) start at given states, .* not given"):
        decoder.forward(batch, kv, loops=one, layers=range(2, 4))
    with pytest.raises(ValueError, match=r"layers range\(0, 2\) start at the tokens"):
        decoder.forward(silent, kv, loops=one, layers=range(2), hidden_MD=states_MD)
    with pytest.raises(ValueError, match=r"floats \(4, 64\)"):
        decoder.forward(silent, kv, loops=one, layers=range(2, 3), hidden_MD=states_MD[:1])
    for tap in ("loop.0", "final", "layer.0", "loop.0.layer.3", "loop.1.layer.2"):
        with pytest.raises(ValueError, match="there is no tap"):
            decoder.forward(silent, kv, taps=[tap], loops=one, layers=range(1, 3), hidden_MD=states_MD)
    assert not memory_of(kv).any()


@needs_kernels
def test_the_kernels_refuse_what_python_would_have() -> None:
    """A call that somebody forgot to give layers runs none of them, and says so."""
    decoder = decoder_of(POLICIES["looped"], "compiled 1")
    assert isinstance(decoder, CompiledDecoder)
    batch, kv = chunk(*CHUNKS[2]), decoder.new_storage(PAGES)
    for loop_end, layer_begin, layer_end, heads in (
        (1, 0, 0, 0),
        (1, 3, 2, 0),
        (1, -1, 2, 0),
        (1, 0, LAYERS + 1, 0),
        (2, 0, 2, 0),
        (1, 0, 2, 1),
    ):
        call = decoder._call(batch, kv, range(loop_end))
        hidden_MD, logits_RV = torch.zeros(batch.rows, 64), torch.zeros(4, 48)
        call.layer_begin, call.layer_end, call.head_rows = layer_begin, layer_end, heads
        call.hidden, call.logits = hidden_MD.data_ptr(), logits_RV.data_ptr()
        call.head_index = batch.head_rows_R.data_ptr()
        status = decoder._library.taildraft_forward(decoder._handle, ctypes.byref(call))
        with pytest.raises(ValueError, match="layers lie outside"):
            abi.check(status)
        assert not hidden_MD.any()
