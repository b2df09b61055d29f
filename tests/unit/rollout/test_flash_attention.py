"""flash-attn's paths on the CPU: everything but the foreign kernels, which stand here as their documentation.

The stand-ins check what the real functions check (types, shapes, page sizes), compute in any precision, and
give NaN where the real ones give zeros for a row without keys: whoever reads such a row is found out.
"""

import itertools
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.native.torch_forward.fast_paths import (
    Device,
    disagreement,
    refuse_off_device,
    with_fast_paths,
)
from rollout.engine.native.torch_forward.flash_attention import NARROW_ROWS, FlashAttention
from rollout.engine.native.torch_forward.flash_kernels import (
    MODULES,
    FlashKernels,
    find_flash,
    flash2_kernels,
    flash3_kernels,
    flash_refusal,
)
from rollout.engine.native.torch_forward.forward_graphs import EagerRecorder
from rollout.errors import ConfigError, UnsupportedError
from rollout.testing import TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_native import CountingRecorder

VERSIONS = (2, 3)


def _attention(query: Tensor, keys: Tensor, values: Tensor, window: tuple[int, int], shift: int) -> Tensor:
    """One sequence: (Q, A, H) over (T, N, H), causal, the last query beside the last key plus ``shift``."""
    rows, group = query.shape[0], query.shape[1] // keys.shape[1]
    count = keys.shape[0]
    scores = torch.einsum("qah,tah->aqt", query, keys.repeat_interleave(group, 1)) * query.shape[-1] ** -0.5
    # How far a key lies behind the place of the row.
    behind = torch.arange(rows)[:, None] + count - rows + shift - torch.arange(count)
    seen = behind >= 0
    if window[0] >= 0:
        seen &= behind <= window[0]
    probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("aqt,tah->qah", probs, values.repeat_interleave(group, 1))


class FlashModule:
    """Both functions of one version, with the names of their arguments. ``shift`` plants a fault."""

    def __init__(self, version: int, *, shift: int = 0) -> None:
        self.shift = shift
        self.calls: list[SimpleNamespace] = []
        self.flash_attn_with_kvcache = self._kvcache2 if version == 2 else self._kvcache3

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert causal
        assert softmax_scale is None
        for starts, most, total in (
            (cu_seqlens_q, max_seqlen_q, len(q)),
            (cu_seqlens_k, max_seqlen_k, len(k)),
        ):
            assert starts.dtype == torch.int32
            assert starts.is_contiguous()
            assert starts[0] == 0
            assert starts[-1] == total
            assert starts.diff().max() <= most
        assert len(cu_seqlens_q) == len(cu_seqlens_k)
        self.calls.append(SimpleNamespace(name="varlen", rows=cu_seqlens_q.diff().tolist()))
        out = torch.empty_like(q)
        spans = zip(
            itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True
        )
        for (q0, q1), (k0, k1) in spans:
            out[q0:q1] = _attention(q[q0:q1], k[k0:k1], v[k0:k1], window_size, self.shift)
        return out

    def _kvcache2(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        if block_table is not None and k_cache.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        return self._kvcache(q, k_cache, v_cache, cache_seqlens, block_table, causal, window_size)

    def _kvcache3(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None = None,
        page_table: Tensor | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        return self._kvcache(q, k_cache, v_cache, cache_seqlens, page_table, causal, window_size)

    def _kvcache(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor | None,
        table: Tensor | None,
        causal: bool,
        window: tuple[int, int],
    ) -> Tensor:
        assert causal
        assert lengths is not None
        assert lengths.dtype == torch.int32
        assert lengths.is_contiguous()
        assert lengths.shape == q.shape[:1]
        assert keys.stride(-1) == values.stride(-1) == q.stride(-1) == 1
        if table is not None:
            assert table.dtype == torch.int32
            assert table.stride(-1) == 1
            assert len(table) == len(q)
            assert lengths.max() <= table.shape[1] * keys.shape[1]
        else:
            assert len(keys) == len(q)
            assert lengths.max() <= keys.shape[1]
        self.calls.append(SimpleNamespace(name="kvcache", table=table, keys=keys, rows=q.shape[:2]))
        out = []
        for s, count in enumerate(lengths.tolist()):
            mine = (
                (store[table[s].long()].flatten(0, 1) if table is not None else store[s])[:count]
                for store in (keys, values)
            )
            out.append(_attention(q[s], *mine, window, self.shift))
        return torch.stack(out)


def kernels_of(version: int, module: FlashModule) -> FlashKernels:
    make = flash2_kernels if version == 2 else flash3_kernels
    return make(cast("ModuleType", module))


def sdpa_decoder(policy: TinyPolicy, dtype: torch.dtype = torch.float64) -> TorchDecoder:
    made = TorchDecoder(policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=dtype, exact=False)
    made.load(policy.state)
    return made


def batch_of(rows: list[tuple[int, int]], table: list[list[int]], head: list[int] | None = None) -> RowBatch:
    """Rows are (sequence, position)."""
    return RowBatch(
        token_ids_M=torch.tensor([(7 * s + 5 * p + 3) % 48 for s, p in rows], dtype=torch.int32),
        positions_M=torch.tensor([p for _, p in rows], dtype=torch.int32),
        table_M=torch.tensor([s for s, _ in rows], dtype=torch.int32),
        page_table_SP=torch.tensor(table, dtype=torch.int32),
        head_rows_R=torch.tensor(list(range(len(rows))) if head is None else head, dtype=torch.int32),
    )


TABLE = [[9, 1, 4], [0, 5, 8], [2, 3, 7], [6, 10, 11]]
PROMPTS = [(0, p) for p in range(20)] + [(1, p) for p in range(10)] + [(2, p) for p in range(5)] + [(3, 0)]
"""A wide span and narrow ones."""

CHUNKS = [(2, p) for p in range(5, 9)] + [(1, p) for p in range(10, 35)]
"""What follows: a narrow span and a wide one that does not begin its sequence."""

DRAFTS = [(1, 33), (0, 22), (0, 21), (0, 20), *[(3, p) for p in range(1, 5)], (2, 5), (2, 6), (2, 9), (1, 35)]
"""In disorder, and three rows beside four; the last of sequences 2 and 1 stand apart, as lanes may: keys in
between are of before."""


def two_forwards(decoder: TorchDecoder) -> tuple[Tensor, TorchKV]:
    storage = decoder.new_storage(12)
    assert isinstance(storage, TorchKV)
    # Whatever is read that was not written shows.
    storage.keys.fill_(float("nan"))
    storage.values.fill_(float("nan"))
    logits = [decoder.forward(batch_of(rows, TABLE), storage).logits_RV for rows in (PROMPTS, CHUNKS, DRAFTS)]
    return torch.cat(logits), storage


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("family", ["smollm2", "mistral"])
def test_flash_reads_what_sdpa_reads_in_any_batch(family: str, version: int) -> None:
    policy = tiny_policy(family=family)
    assert (family == "mistral") == (policy.spec.sliding_window is not None)
    plain, module = sdpa_decoder(policy), FlashModule(version)
    flash = plain.with_fast_paths(FlashAttention(kernels_of(version, module)), None)
    expected, _ = two_forwards(plain)
    found, storage = two_forwards(flash)
    assert (found - expected).abs().max() < 1e-10
    assert {tuple(call.rows) for call in module.calls if call.name == "varlen"} == {(20,), (25,)}
    cached = [call for call in module.calls if call.name == "kvcache"]
    # Spans of like width share a call.
    assert {tuple(call.rows) for call in cached} == {(1, 10), (1, 5), (1, 1), (1, 4), (3, 1), (1, 2), (2, 4)}
    pool = range(storage.keys.data_ptr(), storage.keys.data_ptr() + storage.keys.nbytes)
    for call in cached:
        # Version 3 reads pages where they are; version 2 takes none of their size.
        assert (call.table is not None) == (call.keys.data_ptr() in pool) == (version == 3)


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_rows_read_through_flash_what_plain_ones_read(version: int) -> None:
    policy, module = tiny_policy(family="mistral"), FlashModule(version)
    plain = sdpa_decoder(policy)
    recorder = CountingRecorder()
    flash = plain.with_fast_paths(FlashAttention(kernels_of(version, module)), recorder)
    assert disagreement(flash, plain) < 1e-12
    assert (recorder.recorded, recorder.runs) == (1, 2)
    assert {call.table is not None for call in module.calls if call.name == "kvcache"} == {version == 3}


def test_flash_serves_loops_one_by_one() -> None:
    plain = sdpa_decoder(tiny_looped_policy(vocab=48))
    flash = plain.with_fast_paths(FlashAttention(kernels_of(3, FlashModule(3))), None)
    storages = [decoder.new_storage(12) for decoder in (plain, flash)]
    loop_M = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    out = []
    for decoder, storage in zip((plain, flash), storages, strict=True):
        decoder.forward(batch_of(PROMPTS, TABLE), storage)
        lanes = batch_of([(0, 21), (0, 20), (2, 5), (3, 1)], TABLE, head=[1])
        states = torch.linspace(-1, 1, 4 * plain.spec.hidden_size).double().view(4, -1)
        out.append(decoder.advance(states, lanes, storage, loop_M=loop_M).hidden_MD)
    assert (out[0] - out[1]).abs().max() < 1e-10


def test_pages_of_this_size_are_none_that_version_2_takes() -> None:
    # What the adapter avoids is really refused: else gathering would be for nothing.
    module = FlashModule(2)
    cache = torch.zeros(4, PAGE_TOKENS, 1, 8)
    with pytest.raises(RuntimeError, match="divisible by 256"):
        kernels_of(2, module).cache(
            torch.zeros(1, 1, 1, 8),
            cache,
            cache,
            lengths_S=torch.ones(1, dtype=torch.int32),
            table_SP=torch.zeros(1, 1, dtype=torch.int32),
            window=None,
        )


def test_narrow_rows_go_to_the_kernel_that_splits_keys_and_wide_ones_do_not() -> None:
    policy, module = tiny_policy(), FlashModule(3)
    decoder = sdpa_decoder(policy).with_fast_paths(FlashAttention(kernels_of(3, module)), None)
    for rows, name in ((NARROW_ROWS, "kvcache"), (NARROW_ROWS + 1, "varlen")):
        module.calls.clear()
        decoder.forward(batch_of([(0, p) for p in range(rows)], TABLE), decoder.new_storage(12))
        assert {call.name for call in module.calls} == {name}


# ---- what is installed, asked for and allowed ---------------------------------------------------


def test_without_flash_attn_the_error_says_what_was_tried_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in MODULES.values():
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UnsupportedError, match=r"flash_attn_interface: .*flash_attn\.flash_attn_interface.*pip"
    ):
        find_flash((9, 0))


@pytest.mark.parametrize(("capability", "pages"), [((9, 0), 1), ((8, 6), 256), ((10, 0), 256)])
def test_version_3_is_taken_on_its_own_devices_only(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], pages: int
) -> None:
    for version, name in MODULES.items():
        monkeypatch.setitem(sys.modules, name, cast("ModuleType", FlashModule(version)))
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert find_flash(capability).page_multiple == pages


def test_a_policy_or_device_flash_cannot_take_is_named() -> None:
    spec = tiny_policy().spec
    assert flash_refusal(spec, torch.bfloat16, (8, 0)) is None
    assert "engine.dtype is float32" in str(flash_refusal(spec, torch.float32, (8, 0)))
    assert "has 7.5" in str(flash_refusal(spec, torch.bfloat16, (7, 5)))
    for head_dim in (12, 264):
        odd = replace(spec, head_dim=head_dim)
        assert f"this one is {head_dim}" in str(flash_refusal(odd, torch.bfloat16, (8, 0)))


@pytest.mark.parametrize("setting", [{"attention": "flash"}, {"cuda_graphs": "always"}])
def test_what_needs_fast_numerics_and_cuda_is_refused_by_name_elsewhere(setting: dict[str, Any]) -> None:
    name = "engine." + "=".join(next(iter(setting.items())))
    with pytest.raises(ConfigError, match=f"{name} and engine.numerics=exact exclude each other"):
        EngineConfig(numerics="exact", device="cuda", **setting)
    with pytest.raises(ConfigError, match=f"{name} needs engine.device=cuda, got cpu"):
        refuse_off_device(EngineConfig(**setting))
    refuse_off_device(EngineConfig(device="cuda:1", **setting))
    refuse_off_device(EngineConfig())


def test_what_passes_the_self_check_is_taken_and_named_and_what_does_not_is_not() -> None:
    decoder = sdpa_decoder(tiny_policy(), torch.bfloat16)

    def settle(config: EngineConfig, *, shift: int) -> tuple[TorchDecoder, str]:
        kernels = kernels_of(3, FlashModule(3, shift=shift))
        device = Device(capability=(9, 0), find_flash=lambda _: kernels, recorder=EagerRecorder)
        return with_fast_paths(decoder, config, device)

    taken, names = settle(EngineConfig(device="cuda"), shift=0)
    assert isinstance(taken.attention, FlashAttention)
    assert taken.graphs is not None
    assert names == "attention=flash-attn 3 in place, buckets run eagerly"
    without, names = settle(EngineConfig(device="cuda", attention="sdpa", cuda_graphs="never"), shift=0)
    assert (without.attention, without.graphs, names) == (decoder.attention, None, "attention=sdpa")
    # A kernel that lets no row see its own key.
    wrong, names = settle(EngineConfig(device="cuda"), shift=-1)
    assert wrong.attention is decoder.attention
    with pytest.raises(ConfigError, match=r"engine.attention=flash: the self-check found logits"):
        settle(EngineConfig(device="cuda", attention="flash"), shift=-1)


def test_a_recorder_that_fails_is_an_error_only_where_it_was_asked_for() -> None:
    class Failing(EagerRecorder):
        def record(self, run: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    decoder = sdpa_decoder(tiny_policy(), torch.bfloat16)
    device = Device(capability=(9, 0), recorder=Failing)
    auto, _ = with_fast_paths(decoder, EngineConfig(device="cuda", attention="sdpa"), device)
    assert auto.graphs is None
    with pytest.raises(ConfigError, match=r"engine.cuda_graphs=always: .*not permitted"):
        with_fast_paths(decoder, EngineConfig(device="cuda", attention="sdpa", cuda_graphs="always"), device)
