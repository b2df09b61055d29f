"""The compiled decoder: one C call per forward, row-invariant by construction.

Weights are bf16 in panels, activations and sums float32, KV bf16. Every output is one chain of multiply-adds
in a fixed order, so a row's bits depend on its tokens and weights alone.

Shapes: M rows, R head rows, V vocabulary, D hidden, P positions, H half a head.
"""

import copy
import ctypes
import math
import mmap
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from controller.types import ForwardSeconds
from drafters.int4.memory import lazy_bytes
from drafters.types import SCREEN, LinearWeight, QuantizedLinear
from rollout.engine.native.compiled_forward.kernels import abi
from rollout.engine.native.compiled_forward.scratch import RowBuffer
from rollout.engine.native.compiled_forward.weights import PANEL, PackedCodes, Weights, checked_linear
from rollout.engine.native.decoder import ForwardResult, KVStorage
from rollout.engine.native.decoder_work import DecoderWork
from rollout.engine.native.loops import (
    Course,
    check_kept_states,
    check_states,
    checked_course,
    checked_standing,
    tap_place,
)
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.errors import UnsupportedError
from rollout.policy.spec import ModelSpec


def compiled_unavailable() -> str | None:
    """Return why compiled kernels cannot be had on this machine, or None. Builds them on first use."""
    return abi.unavailable()


@dataclass(kw_only=True, slots=True)
class CompiledKV:
    """KV memory as ``kv_pages.h`` lays it out."""

    pages: int
    data: Tensor
    """bf16 (planes, pages, kv heads, keys and values, 16 * head_dim)."""

    occupied: Tensor
    """bool (pages,): whether ``occupy`` has been here."""

    @property
    def bytes_per_page(self) -> int:
        """Over all planes, keys and values."""
        return self.data.nbytes // self.pages

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page on every plane."""
        self.data[:, target].copy_(self.data[:, source])

    def occupy(self, pages: Sequence[int]) -> None:
        """Write back one number of each page of the system that these pages lie on, the first time."""
        wanted = torch.tensor(pages, dtype=torch.long)
        fresh = wanted[~self.occupied[wanted]]
        numbers = self.data.view(self.data.shape[0], self.pages, -1)
        step = mmap.PAGESIZE // numbers.element_size()
        numbers[:, fresh, ::step] = numbers[:, fresh, ::step]
        numbers[:, fresh, -1] = numbers[:, fresh, -1]
        self.occupied[fresh] = True


class _Team:
    """The threads of a decoder and of those that share its weights."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        handle = library.taildraft_team_new(threads)
        if not handle:
            raise RuntimeError(f"could not start {threads} threads")
        self.handle: int = handle
        weakref.finalize(self, library.taildraft_team_free, handle)


class CompiledDecoder:
    """A ``Decoder`` of compiled kernels. One forward at a time; the interpreter lock is free meanwhile."""

    compiled = True
    row_invariant = True

    def __init__(
        self,
        spec: ModelSpec,
        *,
        cos_PH: Tensor,
        sin_PH: Tensor,
        threads: int,
        defines: tuple[str, ...] = (),
    ) -> None:
        """``defines`` builds another back end (``TAILDRAFT_GENERIC``). Raises ``KernelBuildError``."""
        _check(spec, cos_PH, sin_PH, threads)
        self.spec = spec
        self.threads = threads
        self._library = abi.library(defines)
        self._cos_PH, self._sin_PH = cos_PH.contiguous(), sin_PH.contiguous()
        self._team = _Team(self._library, threads)
        self._weights = Weights(spec=spec, library=self._library, team=self._team.handle)
        self._quantized: Mapping[str, PackedCodes] = {}
        self._attach()

    def _attach(self) -> None:
        """Make this object's own C decoder, buffers and counters."""
        self._work = (ctypes.c_int64 * (len(abi.WORK) + self.spec.loops))()
        model, self._layer_structs = self._model_struct()
        handle = self._library.taildraft_decoder_new(ctypes.byref(model), self._team.handle)
        if not handle:
            raise MemoryError("could not make a decoder")
        self._handle: int = handle
        self._hidden, self._logits = RowBuffer(), RowBuffer()
        # In the order of ``abi.PHASES``, filled by every forward.
        self._phase_s = (ctypes.c_double * len(abi.PHASES))()
        self._phase_address = ctypes.addressof(self._phase_s)
        weakref.finalize(self, self._library.taildraft_decoder_free, handle)

    @property
    def weight_bytes(self) -> int:
        """Memory of the policy's weights."""
        return self._weights.nbytes

    @property
    def scratch_bytes(self) -> int:
        """Memory of the hidden states and logits of the widest forward so far."""
        return self._hidden.nbytes + self._logits.nbytes

    @property
    def work(self) -> DecoderWork:
        """What the kernels counted where they did it, in every call alike."""
        passes, head_rows, *rows_by_loop = self._work
        return DecoderWork(passes=passes, head_rows=head_rows, rows_by_loop=tuple(rows_by_loop))

    @property
    def screens(self) -> bool:
        """Whether there is a screen: a head in fewer bits that says where the head need look."""
        return SCREEN in self._quantized

    def description(self) -> str:
        """Return what the numerics of this build depend on: a part of the numerics fingerprint."""
        name: bytes = self._library.taildraft_isa()
        return f"compiled-{name.decode()}-bf16"

    def new_storage(self, pages: int) -> CompiledKV:
        """Return zeroed KV memory of ``pages`` pages; a page takes memory once it is written."""
        spec = self.spec
        shape = (spec.planes, pages, spec.kv_heads, 2, PAGE_TOKENS * spec.head_dim)
        data = lazy_bytes(2 * math.prod(shape)).view(torch.bfloat16).view(shape)
        return CompiledKV(pages=pages, data=data, occupied=torch.zeros(pages, dtype=torch.bool))

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take a state dict into the same buffers; decoders that share them see it too.

        Raises ``ValueError``, and then nothing has changed.
        """
        self._weights.load(state)

    def linears(self) -> Iterator[LinearWeight]:
        """Yield ``layers.{i}.qkv|o|gate_up|down`` in order, then ``head``; always the policy's own."""
        yield from self._weights.linears.values()

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> "CompiledDecoder":
        """Return a decoder with these linears, 4 or 8 bits packed for ``linear_int4.h``; those not named, and
        all else, threads included, are shared with this one. One named ``screen`` stands beside the head.
        Raises ``ValueError``."""
        quantized = {}
        for name, linear in linears.items():
            own = "head" if name == SCREEN else name
            if own not in self._weights.linears:
                raise ValueError(f"there is no linear {name!r} to replace")
            quantized[name] = checked_linear(linear, self._weights.linears[own])
        other = copy.copy(self)
        other._quantized = {**self._quantized, **quantized}
        other._attach()
        return other

    def _share(self, other: "CompiledDecoder") -> None:
        """Begin with another's weights and threads: for kinds of decoder that are made of one."""
        self.__dict__.update(other.__dict__)
        self._attach()

    def forward(
        self,
        batch: RowBatch,
        kv: KVStorage,
        *,
        taps: Sequence[str] = (),
        loops: range | None = None,
        layers: range | None = None,
        hidden_MD: Tensor | None = None,
        states: bool = True,
        screened: bool = False,
    ) -> ForwardResult:
        """Run ``layers`` of ``loops``, write KV on their planes, return logits of the head rows.

        ``screened``: the logits of the screen, where there is one, instead of the head's.
        """
        course = checked_course(self.spec, batch, loops=loops, layers=layers, hidden_MD=hidden_MD)
        call = self._call(batch, kv, course.loops, course.layers)
        if hidden_MD is None:
            call.tokens = batch.token_ids_M.data_ptr()
            out_MD = self._hidden.rows(batch.rows, self.spec.hidden_size)
        else:
            out_MD = _own_copy(hidden_MD)
        tapped = self._add_taps(call, taps, course, batch.rows) if taps else {}
        call.heads_only, call.screened = not states, screened and self.screens
        logits_RV = self._run_to_head(call, batch, out_MD)
        wanted_MD = out_MD if states else out_MD[:0]
        return ForwardResult(
            logits_RV=logits_RV, hidden_MD=wanted_MD, taps=tapped, seconds=seconds_of(self._phase_s)
        )

    def advance(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop_M: Tensor) -> ForwardResult:
        """Take every row one loop further, each on the planes of its own loop, in one pass of the block."""
        check_states(self.spec, hidden_MD, rows=batch.rows)
        _check_index(loop_M)
        if loop_M.shape[0] != batch.rows:
            raise ValueError(f"loop_M names loops of {loop_M.shape[0]} rows, the batch has {batch.rows}")
        call = self._call(batch, kv, range(1))
        call.tokens, call.row_loop = batch.token_ids_M.data_ptr(), loop_M.data_ptr()
        out_MD = _own_copy(hidden_MD)
        logits_RV = self._run_to_head(call, batch, out_MD)
        return ForwardResult(logits_RV=logits_RV, hidden_MD=out_MD, seconds=seconds_of(self._phase_s))

    def forward_from(
        self,
        batch: RowBatch,
        kv: KVStorage,
        *,
        depths: Sequence[int],
        numbers: Sequence[int],
        states_ND: Tensor,
    ) -> ForwardResult:
        """Run every row from where it stands to the last loop, in one call: see ``depths.py``.

        Row m has had ``depths[m]`` loops, fewer than all, and goes on from state ``numbers[m]``; with none of
        them it starts at its token. Nobody wants the states it ends with: ``hidden_MD`` is empty.
        """
        check_kept_states(self.spec, states_ND)
        depth_M, number_M = checked_standing(depths, numbers, states=len(states_ND), rows=batch.rows)
        call = self._call(batch, kv, range(self.spec.loops))
        call.tokens = batch.token_ids_M.data_ptr()
        call.heads_only = True
        hidden_MD = self._hidden.rows(batch.rows, self.spec.hidden_size)
        logits_RV = self._add_head(call, batch, hidden_MD)
        self._check_loaded()
        status = self._library.taildraft_forward_from(
            self._handle,
            ctypes.byref(call),
            depth_M.buffer_info()[0],
            number_M.buffer_info()[0],
            states_ND.data_ptr(),
        )
        abi.check(status)
        return ForwardResult(logits_RV=logits_RV, hidden_MD=hidden_MD[:0], seconds=seconds_of(self._phase_s))

    def embed(self, token_ids_M: Tensor) -> Tensor:
        """Return the input hidden states (M, hidden)."""
        _check_index(token_ids_M)
        hidden_MD = torch.empty(token_ids_M.shape[0], self.spec.hidden_size)
        call = abi.CallStruct(rows=token_ids_M.shape[0], hidden=hidden_MD.data_ptr())
        call.tokens = token_ids_M.data_ptr()
        self._run(call)
        return hidden_MD

    def block(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop: int) -> Tensor:
        """Run all layers once on KV planes of ``loop`` and return the states after it; the input is kept."""
        check_states(self.spec, hidden_MD, rows=batch.rows)
        out_MD = _own_copy(hidden_MD)
        call = self._call(batch, kv, range(loop, loop + 1))
        call.hidden = out_MD.data_ptr()
        self._run(call)
        return out_MD

    def head(self, hidden_RD: Tensor) -> Tensor:
        """Return logits (R, vocab) of states after any loop; a final norm they still lack is included."""
        rows = hidden_RD.shape[0]
        check_states(self.spec, hidden_RD, rows=rows)
        hidden_RD = hidden_RD.to(torch.float32).contiguous()
        index_R = torch.arange(rows, dtype=torch.int32)
        logits_RV = torch.empty(rows, self.spec.vocab_size)
        call = abi.CallStruct(rows=rows, head_rows=rows, hidden=hidden_RD.data_ptr())
        call.head_index, call.logits = index_R.data_ptr(), logits_RV.data_ptr()
        self._run(call)
        return logits_RV

    def exit_gate(self, hidden_MD: Tensor) -> Tensor:
        """Return the exit gate's values (M,), float32."""
        weight_1D, bias = self._weights.gate_1D, self._weights.gate_bias
        if weight_1D is None or bias is None:
            raise UnsupportedError(f"a {self.spec.family} policy has no exit gate")
        check_states(self.spec, hidden_MD, rows=hidden_MD.shape[0])
        return (hidden_MD.to(torch.float32) * weight_1D).sum(-1) + bias

    def _run_to_head(self, call: abi.CallStruct, batch: RowBatch, hidden_MD: Tensor) -> Tensor:
        """Run a call over ``hidden_MD``, in place, and return the logits of the batch's head rows."""
        logits_RV = self._add_head(call, batch, hidden_MD)
        self._run(call)
        return logits_RV

    def _add_head(self, call: abi.CallStruct, batch: RowBatch, hidden_MD: Tensor) -> Tensor:
        """Let a call run over ``hidden_MD``, in place, to the head; return where logits will stand."""
        logits_RV = self._logits.rows(batch.head_rows_R.shape[0], self.spec.vocab_size)
        call.hidden = hidden_MD.data_ptr()
        call.head_rows, call.logits = logits_RV.shape[0], logits_RV.data_ptr()
        call.head_index = batch.head_rows_R.data_ptr()
        call.phase_s = self._phase_address
        return logits_RV

    def _call(
        self, batch: RowBatch, kv: KVStorage, loops: range, layers: range | None = None
    ) -> abi.CallStruct:
        memory = self.memory_of(kv)
        layers = range(self.spec.layers) if layers is None else layers
        for index in (batch.token_ids_M, batch.positions_M, batch.table_M):
            _check_index(index)
        _check_index(batch.page_table_SP)
        _check_index(batch.head_rows_R)
        if not batch.rows == batch.positions_M.shape[0] == batch.table_M.shape[0]:
            raise ValueError("token_ids_M, positions_M and table_M must have one length")
        tables, table_pages = batch.page_table_SP.shape
        return abi.CallStruct(
            rows=batch.rows,
            tables=tables,
            table_pages=table_pages,
            loop_begin=loops.start,
            loop_end=loops.stop,
            layer_begin=layers.start,
            layer_end=layers.stop,
            positions=batch.positions_M.data_ptr(),
            table=batch.table_M.data_ptr(),
            page_table=batch.page_table_SP.data_ptr(),
            kv=memory.data.data_ptr(),
            kv_pages=memory.pages,
        )

    def memory_of(self, kv: KVStorage) -> CompiledKV:
        """Return ``kv``. Raises ``ValueError`` when it is not a decoder's of this policy."""
        if not isinstance(kv, CompiledKV) or kv.data.shape[0] != self.spec.planes:
            raise ValueError("KV memory must come from new_storage of a decoder of this policy")
        return kv

    def _add_taps(
        self, call: abi.CallStruct, names: Sequence[str], course: Course, rows: int
    ) -> dict[str, Tensor]:
        loops, layers = course.loops, self.spec.layers
        places = {name: tap_place(name, course) for name in names}
        # A place may have two names, "layer.1" and that layer of the last loop: one buffer.
        taps = {place: torch.empty(rows, self.spec.hidden_size) for place in places.values()}
        call.layer_taps = (ctypes.c_void_p * (len(loops) * layers))()
        call.loop_taps = (ctypes.c_void_p * len(loops))()
        for place, tap_MD in taps.items():
            if place.loop is None:
                setattr(call, "final_tap" if place.final else "embed_tap", tap_MD.data_ptr())
            elif place.layer is None:
                call.loop_taps[place.loop - loops.start] = tap_MD.data_ptr()
            else:
                call.layer_taps[(place.loop - loops.start) * layers + place.layer] = tap_MD.data_ptr()
        return {name: taps[place] for name, place in places.items()}

    def _run(self, call: abi.CallStruct) -> None:
        self._check_loaded()
        abi.check(self._library.taildraft_forward(self._handle, ctypes.byref(call)))

    def run_chain(self, call: abi.ChainStruct) -> tuple[int, ForwardSeconds]:
        """Run draft passes, as ``draft_chain.py`` knows; return what ended them, and what they took."""
        self._check_loaded()
        rows, width = call.forward.rows, self.spec.hidden_size
        call.forward.logits = self._logits.rows(rows, self.spec.vocab_size).data_ptr()
        if not call.keep_states:
            call.forward.hidden = self._hidden.rows(rows, width).data_ptr()
        call.phase_s = self._phase_address
        status: int = self._library.taildraft_chain(self._handle, ctypes.byref(call))
        return status, seconds_of(self._phase_s)

    def run_choosing(self, call: abi.ChoosingStruct, batch: RowBatch, kv: KVStorage) -> ForwardSeconds:
        """Run all loops of a batch and choose from its logits, as ``choosing.py`` knows; return the forward's
        time. Raises as ``forward`` does."""
        self._check_loaded()
        call.forward = self._call(batch, kv, range(self.spec.loops))
        call.forward.tokens = batch.token_ids_M.data_ptr()
        call.forward.heads_only = True
        self._add_head(call.forward, batch, self._hidden.rows(batch.rows, self.spec.hidden_size))
        abi.check(self._library.taildraft_forward_choosing(self._handle, ctypes.byref(call)))
        return seconds_of(self._phase_s)

    def run_lanes(self, call: ctypes.Structure) -> None:
        """Run the passes of lanes: ``compiled_lanes.py`` knows how. Raises as ``forward`` does."""
        self._check_loaded()
        abi.check(self._library.taildraft_lanes(self._handle, ctypes.byref(call)))

    def _check_loaded(self) -> None:
        if not self._weights.loaded:
            raise ValueError("the decoder has no weights yet: call load first")

    def _model_struct(self) -> tuple[abi.ModelStruct, object]:
        """Return the model by address, and the array it points into."""
        spec, weights = self.spec, self._weights
        layers = (abi.LayerStruct * spec.layers)()
        for index, norms in enumerate(weights.layers):
            layers[index] = abi.LayerStruct(
                **{part: self._linear(f"layers.{index}.{part}") for part in ("qkv", "o", "gate_up", "down")},
                input_norm=norms.input_norm.data_ptr(),
                post_norm=norms.post_norm.data_ptr(),
                query_norm=_address(norms.query_norm),
                key_norm=_address(norms.key_norm),
                attention_out_norm=_address(norms.attention_out_norm),
                mlp_out_norm=_address(norms.mlp_out_norm),
            )
        tied, embedding = weights.linears["head"].panels, weights.embedding_VD
        embedding = tied if embedding is None else embedding
        model = abi.ModelStruct(
            vocab=spec.vocab_size,
            hidden=spec.hidden_size,
            layers=spec.layers,
            query_heads=spec.query_heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            max_positions=self._cos_PH.shape[0],
            window=spec.sliding_window or 0,
            loops=spec.loops,
            recurrent_norm=spec.recurrent_norm,
            tied_panels=int(weights.embedding_VD is None),
            eps=spec.norm_eps,
            embedding=embedding.data_ptr(),
            cosine=self._cos_PH.data_ptr(),
            sine=self._sin_PH.data_ptr(),
            final_norm=weights.final_norm_D.data_ptr(),
            layer=layers,
            head=self._linear("head"),
            screen=self._linear("head", stored=SCREEN) if self.screens else abi.LinearStruct(),
            work=ctypes.addressof(self._work),
        )
        return model, layers

    def _linear(self, name: str, *, stored: str | None = None) -> abi.LinearStruct:
        """Return a linear of the policy's shape, replaced by what is stored under ``stored`` or its name."""
        own = self._weights.linears[name]
        quantized = self._quantized.get(stored or name)
        if quantized is None:
            data, bits, scale = own.panels, 16, None
        else:
            data, bits, scale = quantized.packed, quantized.bits, quantized.scales
        return abi.LinearStruct(
            bits=bits,
            n=own.out_features,
            k=own.in_features,
            data=data.data_ptr(),
            scale=_address(scale),
            bias=_address(own.bias),
        )


def seconds_of(phase_s: Iterable[float]) -> ForwardSeconds:
    """Return the phases of a forward, in the order of ``abi.PHASES``, by name."""
    linears_s, attention_s, head_s, rest_s = phase_s
    return ForwardSeconds(linears_s=linears_s, attention_s=attention_s, head_s=head_s, rest_s=rest_s)


def _check(spec: ModelSpec, cos_PH: Tensor, sin_PH: Tensor, threads: int) -> None:
    for name, size in (("hidden_size", spec.hidden_size), ("head_dim", spec.head_dim)):
        if size % PANEL:
            raise ValueError(f"compiled kernels want {name} to be a multiple of {PANEL}, got {size}")
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    for table in (cos_PH, sin_PH):
        if table.dtype != torch.float32 or table.dim() != 2 or table.shape[1] * 2 != spec.head_dim:
            raise ValueError(f"rotary tables must be float32 (positions, {spec.head_dim // 2})")
    if cos_PH.shape != sin_PH.shape:
        raise ValueError("rotary tables differ in length")


def _own_copy(hidden_MD: Tensor) -> Tensor:
    """Return states the kernels may write to: a copy, since the given ones may be a decoder's own buffer."""
    return hidden_MD.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_index(index: Tensor) -> None:
    if index.dtype != torch.int32 or not index.is_contiguous():
        raise ValueError("indices of a batch must be contiguous int32")
