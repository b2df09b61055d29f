"""The policy's forward in torch: reference, fallback where no compiler is, and the CUDA path.

``exact`` computes every row alone: its norms, linears, activations and attention have shapes given by
the model and the row's position, so its bits cannot depend on the batch. It is slow, and in float64
it is what every other forward is tested against. ``fast`` computes the batch at once and promises no
bits; it takes a CUDA device, where it has not been run, another attention than SDPA, and a recorder, which
makes forwards of few rows CUDA graphs.

Norms and rotations are computed in at least float32. Shapes: M rows, R head rows, D hidden size,
H head dimension, N KV heads, G query heads per KV head, K in features, V vocabulary, P positions.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.types import LinearWeight, QuantizedLinear
from rollout.engine.native.decoder import ForwardResult, KVStorage
from rollout.engine.native.decoder_work import DecoderWork, WorkCount
from rollout.engine.native.loops import (
    EMBED,
    FINAL,
    Course,
    TapPlace,
    check_loop_rows,
    check_states,
    checked_course,
    tap_place,
)
from rollout.engine.native.rows import RowBatch, rows_of
from rollout.engine.native.torch_forward import prepacked
from rollout.engine.native.torch_forward.attention import (
    AttentionPlan,
    FastAttention,
    TorchKV,
    attend_row,
    plan_batch,
    plan_rows,
)
from rollout.engine.native.torch_forward.forward_graphs import ForwardGraphs, Recorder
from rollout.engine.native.torch_forward.row_buckets import StaticRows
from rollout.engine.native.torch_forward.sdpa_attention import SdpaAttention
from rollout.engine.native.torch_forward.weights import TorchWeights
from rollout.errors import UnsupportedError
from rollout.policy.spec import ModelSpec

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class TorchLinear:
    """One linear of the live policy; ``rows`` is the live buffer itself, not a copy."""

    name: str
    out_features: int
    in_features: int
    weight_NK: Tensor

    def rows(self) -> Tensor:
        """Return the weight as an (N, K) tensor."""
        return self.weight_NK

    @property
    def panels(self) -> Tensor | None:
        """None: there is no panel layout here."""
        return None


class TorchDecoder:
    """A ``Decoder`` in plain torch. Weights are zero until ``load``."""

    compiled = False

    def __init__(
        self,
        spec: ModelSpec,
        *,
        cos_PH: Tensor,
        sin_PH: Tensor,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        exact: bool,
    ) -> None:
        if cos_PH.shape != sin_PH.shape or cos_PH.shape[1] * 2 != spec.head_dim:
            raise ValueError(
                f"rotary tables {tuple(cos_PH.shape)} and {tuple(sin_PH.shape)} "
                f"do not fit head_dim {spec.head_dim}"
            )
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        self.row_invariant = exact
        if self.device.type != "cpu":
            log.warning("the torch decoder on %s has not been run on that hardware", self.device.type)
        self.weights = TorchWeights(spec, dtype=dtype, device=self.device)
        self._accurate = dtype if dtype.itemsize >= 4 else torch.float32
        self._cos_PH = cos_PH.to(self.device, self._accurate)
        self._sin_PH = sin_PH.to(self.device, self._accurate)
        self.attention: FastAttention = SdpaAttention()
        """How fast batches attend; exact ones never ask."""
        self._work = WorkCount(spec.loops)
        self._graphs: ForwardGraphs | None = None
        self._last_replacing: TorchDecoder | None = None
        self._replaced: dict[str, QuantizedLinear] = {}
        self._packed: dict[str, prepacked.PrepackedLinear] = {}

    @property
    def weight_bytes(self) -> int:
        """Memory of the policy's weights; where oneDNN's packed form is kept beside them, of both."""
        packed = sum(self.weights.linears[name].nbytes for name in self._packed)
        return self.weights.nbytes + packed

    @property
    def work(self) -> DecoderWork:
        """What its methods were asked for; a recorded forward counts whenever it runs again."""
        return self._work.total()

    @property
    def positions(self) -> int:
        """Positions its rotary tables reach."""
        return self._cos_PH.shape[0]

    @property
    def scratch_bytes(self) -> int:
        """Buffers of recorded forwards; else nothing is kept between forwards."""
        return 0 if self._graphs is None else self._graphs.nbytes

    @property
    def graphs(self) -> ForwardGraphs | None:
        """Forwards recorded so far; None where none are."""
        return self._graphs

    def new_storage(self, pages: int) -> KVStorage:
        """Return zeroed KV memory for ``pages`` pages."""
        return TorchKV(self.spec, pages=pages, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy a checked state dict into the buffers. Decoders made by ``with_linears`` see it too."""
        self.weights.load(state)
        if self.device.type == "cpu" and self.dtype == torch.bfloat16 and prepacked.supported():
            for name, weight_NK in self.weights.linears.items():
                if name in self._packed:
                    self._packed[name].load(weight_NK)
                else:
                    self._packed[name] = prepacked.PrepackedLinear(weight_NK)

    def linears(self) -> Iterator[LinearWeight]:
        """Yield ``layers.{i}.qkv|o|gate_up|down`` in order, then ``head``."""
        for name, weight_NK in self.weights.linears.items():
            out_features, in_features = weight_NK.shape
            yield TorchLinear(
                name=name, out_features=out_features, in_features=in_features, weight_NK=weight_NK
            )

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> "TorchDecoder":
        """Return a decoder with these linears; those not named, and all else, stay this policy's own.

        Where forwards are recorded, the linears of the last call give the last decoder, recordings included:
        linears are rebuilt within their buffers, and a weight update must not cost every recording of drafts.
        """
        for name, linear in linears.items():
            if name not in self.weights.linears:
                raise ValueError(f"there is no linear {name!r} to replace")
            shape = tuple(self.weights.linears[name].shape)
            if (linear.out_features, linear.in_features) != shape:
                raise ValueError(
                    f"{name}: {(linear.out_features, linear.in_features)} cannot replace {shape}"
                )
        replaced = {**self._replaced, **linears}
        last = self._last_replacing
        if last is not None and _same_objects(last._replaced, replaced):
            return last
        other = self.with_fast_paths(self.attention, None if self._graphs is None else self._graphs.recorder)
        other._replaced = replaced
        self._last_replacing = None if self._graphs is None else other
        return other

    def with_fast_paths(self, attention: FastAttention, recorder: Recorder | None) -> "TorchDecoder":
        """Return a decoder of the same weights that attends so and records its forwards, or does not.

        Raises ``ValueError`` for a recorder where rows are computed one by one.
        """
        if recorder is not None and self.row_invariant:
            raise ValueError(
                "forwards that compute every row alone have as many shapes as rows: not recorded"
            )
        other = copy.copy(self)
        other.attention, other._graphs, other._last_replacing = attention, None, None
        other._work = WorkCount(self.spec.loops)
        if recorder is not None:
            other._graphs = ForwardGraphs(
                recorder, self.spec, dtype=self.dtype, logits_dtype=self._accurate, device=self.device
            )
        return other

    @torch.no_grad()
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
    ) -> ForwardResult:
        """Run ``layers`` of ``loops``, write KV on their planes, return logits of the head rows."""
        course = checked_course(self.spec, batch, loops=loops, layers=layers, hidden_MD=hidden_MD)
        if course.ends_loops:
            self._work.through(course.loops, batch.rows)
        self._work.head_rows += batch.head_rows_R.shape[0]
        replayed = None if taps else self._replayed(batch, kv, course, hidden_MD)
        if replayed is not None:
            return replayed if states else replace(replayed, hidden_MD=replayed.hidden_MD[:0])
        places = {name: tap_place(name, course) for name in taps}
        plan = self._plan(batch)
        seen: dict[TapPlace, Tensor] = {}

        def see(place: TapPlace, state_MD: Tensor) -> None:
            if place in places.values():
                seen[place] = state_MD.clone()

        hidden_MD = self.embed(batch.token_ids_M) if hidden_MD is None else hidden_MD.to(self.dtype)
        if not states and not taps and len(batch.head_rows_R) < batch.rows:
            logits_RV = self._head_logits(hidden_MD, batch, plan, kv, course)
            return ForwardResult(logits_RV=logits_RV, hidden_MD=hidden_MD[:0])
        see(EMBED, hidden_MD)
        for loop in course.loops:
            for layer in course.layers:
                hidden_MD = self._layer(hidden_MD, plan, kv, loop=loop, layer=layer)
                see(TapPlace(loop=loop, layer=layer), hidden_MD)
            if course.ends_loops:
                hidden_MD = self._close_loop(hidden_MD)
                see(TapPlace(loop=loop), hidden_MD)
        if FINAL in places.values():
            see(FINAL, self._before_head(hidden_MD))
        logits_RV = self._head(hidden_MD[batch.head_rows_R.long().to(self.device)])
        kept = {name: seen[place] for name, place in places.items()}
        return ForwardResult(logits_RV=logits_RV, hidden_MD=hidden_MD if states else hidden_MD[:0], taps=kept)

    def _replayed(
        self, batch: RowBatch, kv: KVStorage, course: Course, hidden_MD: Tensor | None
    ) -> ForwardResult | None:
        """Return a recorded forward's result, with all states; None for one that is not recorded."""
        if self._graphs is None or not course.whole_loops:
            return None
        storage = _torch_kv(kv)
        return self._graphs.forward(
            self._padded_forward, batch, storage, loops=course.loops, hidden_MD=hidden_MD
        )

    def _head_logits(
        self, hidden_MD: Tensor, batch: RowBatch, plan: AttentionPlan, kv: KVStorage, course: Course
    ) -> Tensor:
        """Run a course and return the logits (R, vocab); rows without a head end with their last keys.

        In the last layer nothing is read of them but keys and values, which the layer before decides.
        """
        for loop in course.loops[:-1]:
            hidden_MD = self._block(hidden_MD, plan, kv, loop=loop)
        loop, layer = course.loops[-1], course.layers[-1]
        for before in course.layers[:-1]:
            hidden_MD = self._layer(hidden_MD, plan, kv, loop=loop, layer=before)
        heads_R = batch.head_rows_R.long()
        rest_M = torch.ones(batch.rows, dtype=torch.bool)
        rest_M[heads_R.cpu()] = False
        # All keys of the batch are written before any row reads, as within a layer.
        self._write_keys(hidden_MD, rest_M.nonzero()[:, 0].tolist(), plan, kv, loop=loop, layer=layer)
        part_RD = hidden_MD[heads_R.to(self.device)]
        if len(heads_R):
            part_RD = self._layer(part_RD, self._plan(rows_of(batch, heads_R)), kv, loop=loop, layer=layer)
        return self._head(self._close_loop(part_RD))

    def _write_keys(
        self,
        hidden_MD: Tensor,
        rows: Sequence[int],
        plan: AttentionPlan,
        kv: KVStorage,
        *,
        loop: int,
        layer: int,
    ) -> None:
        """Write keys and values of these rows in one layer, from the residual stream before it."""
        storage, plane = _torch_kv(kv), loop * self.spec.layers + layer
        parts = [[row] for row in rows] if self.row_invariant else [list(rows)] if rows else []
        for mine in parts:
            # Fresh, as ``_parts`` has it.
            _, key_MNH, value_MNH = self._qkv(layer, hidden_MD[mine], plan.positions_M[mine])
            storage.keys[plane][plan.write_slots_M[mine]] = key_MNH
            storage.values[plane][plan.write_slots_M[mine]] = value_MNH

    @torch.no_grad()
    def _padded_forward(self, rows: StaticRows, kv: TorchKV, loops: range) -> tuple[Tensor, Tensor]:
        """Return logits and states of all rows of a bucket. Takes no number back to the host."""
        plan = AttentionPlan(
            write_slots_M=rows.write_slots_R.long(),
            positions_M=rows.positions_R.long(),
            reads=self.attention.plan_padded(rows.sequences, window=self.spec.sliding_window),
        )
        hidden_RD = self.embed(rows.token_ids_R) if rows.hidden_RD is None else rows.hidden_RD
        for loop in loops:
            hidden_RD = self._block(hidden_RD, plan, kv, loop=loop)
        return self._head(hidden_RD), hidden_RD

    @torch.no_grad()
    def advance(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop_M: Tensor) -> ForwardResult:
        """Take every row one loop further, each on the planes of its own loop.

        Rows of different loops read and write different planes, so a pass per depth is the same thing.
        """
        check_loop_rows(self.spec, loop_M, rows=batch.rows)
        check_states(self.spec, hidden_MD, rows=batch.rows)
        self._work.advanced(loop_M.tolist())
        out_MD = torch.empty_like(hidden_MD, dtype=self.dtype)
        for loop in sorted(set(loop_M.tolist())):
            rows_K = (loop_M == loop).nonzero()[:, 0]
            part = rows_of(batch, rows_K)
            states = self.embed(part.token_ids_M) if loop == 0 else hidden_MD[rows_K].to(self.dtype)
            out_MD[rows_K] = self._block(states, self._plan(part), kv, loop=loop)
        logits_RV = self.head(out_MD[batch.head_rows_R.long().to(self.device)])
        return ForwardResult(logits_RV=logits_RV, hidden_MD=out_MD)

    @torch.no_grad()
    def embed(self, token_ids_M: Tensor) -> Tensor:
        """Return the input hidden states (M, hidden)."""
        return self.weights.embedding_VD[token_ids_M.long().to(self.device)]

    @torch.no_grad()
    def block(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop: int) -> Tensor:
        """Run all layers once on KV planes of ``loop`` and return the states after it (M, hidden)."""
        if loop not in range(self.spec.loops):
            raise ValueError(f"loop {loop} is outside 0..{self.spec.loops - 1}")
        self._work.through((loop,), batch.rows)
        return self._block(hidden_MD, self._plan(batch), kv, loop=loop)

    def _block(self, hidden_MD: Tensor, plan: AttentionPlan, kv: KVStorage, *, loop: int) -> Tensor:
        for layer in range(self.spec.layers):
            hidden_MD = self._layer(hidden_MD, plan, kv, loop=loop, layer=layer)
        return self._close_loop(hidden_MD)

    @torch.no_grad()
    def head(self, hidden_RD: Tensor) -> Tensor:
        """Return logits (R, vocab) of states after any loop; float32, or float64 in float64."""
        self._work.head_rows += hidden_RD.shape[0]
        return self._head(hidden_RD)

    def _head(self, hidden_RD: Tensor) -> Tensor:
        if hidden_RD.shape[0] == 0:
            return hidden_RD.new_empty((0, self.spec.vocab_size), dtype=self._accurate)
        parts = [self._linear("head", x_RD) for x_RD in self._parts(self._before_head(hidden_RD))]
        return torch.cat(parts).to(self._accurate)

    @torch.no_grad()
    def exit_gate(self, hidden_MD: Tensor) -> Tensor:
        """Return the exit gate's values (M,); float32, or float64 in float64."""
        if self.weights.gate_D is None or self.weights.gate_bias is None:
            raise UnsupportedError(f"a {self.spec.family} policy has no exit gate")
        weighted_MD = hidden_MD.to(self._accurate) * self.weights.gate_D.to(self._accurate)
        return weighted_MD.sum(-1) + self.weights.gate_bias.to(self._accurate)

    def _plan(self, batch: RowBatch) -> AttentionPlan:
        window = self.spec.sliding_window
        if self.row_invariant:
            return plan_rows(batch, window=window, device=self.device)
        return plan_batch(self.attention, batch, window=window, device=self.device)

    def _parts(self, x_MD: Tensor) -> list[Tensor]:
        """Return what is computed in one go: every row alone, freshly allocated, or all rows."""
        if not self.row_invariant:
            return [x_MD]
        # A fresh tensor has the allocator's alignment; a slice has its row's, and that may pick
        # another code path inside a matrix product.
        return [x_MD[m : m + 1].clone() for m in range(x_MD.shape[0])]

    def _layer(
        self, hidden_MD: Tensor, plan: AttentionPlan, kv: KVStorage, *, loop: int, layer: int
    ) -> Tensor:
        """Return the residual stream after one layer; its keys and values are written on the way."""
        storage, plane = _torch_kv(kv), loop * self.spec.layers + layer
        keys_XNH, values_XNH = storage.keys[plane], storage.values[plane]
        parts = self._parts(hidden_MD)
        starts = range(0, hidden_MD.shape[0], parts[0].shape[0]) if parts else ()
        queries = []
        for start, x_MD in zip(starts, parts, strict=True):
            mine = slice(start, start + x_MD.shape[0])
            query_MNGH, key_MNH, value_MNH = self._qkv(layer, x_MD, plan.positions_M[mine])
            keys_XNH[plan.write_slots_M[mine]] = key_MNH
            values_XNH[plan.write_slots_M[mine]] = value_MNH
            queries.append(query_MNGH)
        # All keys of the batch are written before any row reads: rows may stand in any order.
        out = []
        for index, (x_MD, query_MNGH) in enumerate(zip(parts, queries, strict=True)):
            if plan.reads is None:
                slots_T = plan.row_slots[index]
                attended = attend_row(query_MNGH[0].contiguous(), keys_XNH, values_XNH, slots_T)
            else:
                attended = plan.reads.attend(query_MNGH, keys_XNH, values_XNH)
            out.append(self._after_attention(layer, x_MD, attended.reshape(x_MD.shape[0], -1)))
        return torch.cat(out) if out else hidden_MD

    def _qkv(self, layer: int, x_MD: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries (M, N, G, H), rotated keys and values (M, N, H)."""
        spec, weights = self.spec, self.weights
        normed_MD = self._norm(x_MD, weights.norms[f"layers.{layer}.input"])
        fused = self._linear(f"layers.{layer}.qkv", normed_MD).view(x_MD.shape[0], -1, spec.head_dim)
        keys_from, values_from = spec.query_heads, spec.query_heads + spec.kv_heads
        query_MQH = fused[:, :keys_from]
        key_MNH, value_MNH = fused[:, keys_from:values_from], fused[:, values_from:]
        if spec.qk_norm:
            query_MQH = self._norm(query_MQH, weights.norms[f"layers.{layer}.q"])
            key_MNH = self._norm(key_MNH, weights.norms[f"layers.{layer}.k"])
        query_MQH = self._rotate(query_MQH, positions_M)
        grouped = query_MQH.view(-1, spec.kv_heads, spec.group_size, spec.head_dim)
        return grouped, self._rotate(key_MNH, positions_M), value_MNH

    def _after_attention(self, layer: int, x_MD: Tensor, attended_MK: Tensor) -> Tensor:
        branch_MD = self._linear(f"layers.{layer}.o", attended_MK)
        x_MD = x_MD + self._branch_norm(branch_MD, f"layers.{layer}.attention_out")
        normed_MD = self._norm(x_MD, self.weights.norms[f"layers.{layer}.post"])
        gate_MI, up_MI = self._linear(f"layers.{layer}.gate_up", normed_MD).chunk(2, dim=-1)
        branch_MD = self._linear(f"layers.{layer}.down", F.silu(gate_MI) * up_MI)
        return x_MD + self._branch_norm(branch_MD, f"layers.{layer}.mlp_out")

    def _branch_norm(self, branch_MD: Tensor, name: str) -> Tensor:
        if not self.spec.sandwich_norms:
            return branch_MD
        return self._norm(branch_MD, self.weights.norms[name])

    def _close_loop(self, hidden_MD: Tensor) -> Tensor:
        return self._final_norm(hidden_MD) if self.spec.recurrent_norm else hidden_MD

    def _before_head(self, hidden_MD: Tensor) -> Tensor:
        return hidden_MD if self.spec.recurrent_norm else self._final_norm(hidden_MD)

    def _linear(self, name: str, x_MK: Tensor) -> Tensor:
        if name in self._replaced:
            y_MN = self._replaced[name].apply(x_MK)
        elif name in self._packed:
            y_MN = self._packed[name].apply(x_MK)
        else:
            y_MN = F.linear(x_MK, self.weights.linears[name])
        bias_N = self.weights.biases.get(name)
        return y_MN if bias_N is None else y_MN + bias_N

    def _final_norm(self, hidden_MD: Tensor) -> Tensor:
        normed = [self._norm(x_MD, self.weights.norms["final"]) for x_MD in self._parts(hidden_MD)]
        return torch.cat(normed) if normed else hidden_MD

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        accurate = x.to(self._accurate)
        scale = torch.rsqrt(accurate.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps)
        return weight * (accurate * scale).to(self.dtype)

    def _rotate(self, x_MNH: Tensor, positions_M: Tensor) -> Tensor:
        cos, sin = self._cos_PH[positions_M][:, None], self._sin_PH[positions_M][:, None]
        first, second = x_MNH.to(self._accurate).chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.to(self.dtype)


def _same_objects(some: Mapping[str, object], others: Mapping[str, object]) -> bool:
    return some.keys() == others.keys() and all(some[name] is others[name] for name in some)


def _torch_kv(kv: KVStorage) -> TorchKV:
    if not isinstance(kv, TorchKV):
        raise TypeError(f"the torch decoder cannot read {type(kv).__name__}")
    return kv
