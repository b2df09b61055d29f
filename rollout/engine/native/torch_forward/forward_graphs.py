"""Forwards recorded once per shape and run again: CUDA graphs, for batches of few rows.

What a recording reads and writes has addresses that never change: the inputs of its bucket, the outputs all
of a decoder's recordings share, its KV memory and its weights. Hence what keeps one valid and what does not:

- Weights are updated within their buffers (``TorchWeights``, and a drafter's linears), so a recording reads
  the new ones.
- KV memory of another object has other addresses. Recordings belong to the storage they were made over and
  are dropped when another is used, or when it is given back.
- A decoder of other linears (``with_linears``) has recordings of its own, made when they are needed.

On a CPU ``EagerRecorder`` runs the same function on the same buffers, which tests all of this but the
recording.

Shapes: M rows of the batch, R rows of the bucket, H head rows, V vocabulary, D hidden.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout.engine.native.decoder import ForwardResult
from rollout.engine.native.rows import RowBatch
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.engine.native.torch_forward.row_buckets import MOST_ROWS, Bucket, StaticRows, place
from rollout.policy.spec import ModelSpec

log = logging.getLogger(__name__)

MOST_RECORDINGS = 64
"""Kept at once; the one that was not used for longest goes first."""

WARM_UPS = 2
"""Runs before recording: libraries choose their kernels and take their workspaces in the first ones."""

PaddedForward = Callable[[StaticRows, TorchKV, range], tuple[Tensor, Tensor]]
"""Computes a bucket's rows from its buffers, on the device alone: logits (R, V) and states (R, D)."""


class Recorder(Protocol):
    """Turns a function that only starts work on a device into a cheaper one that does the same."""

    description: str

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return what does what ``run`` does. May run it; running it twice must be as once."""
        ...


class EagerRecorder:
    """Records nothing: what it returns is the function itself. For tests, on any device."""

    description = "buckets run eagerly"

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See ``Recorder``."""
        return run


class CudaRecorder:
    """Records CUDA graphs. **Not run** on hardware. One memory pool serves all: one graph runs at a time, and
    no graph needs what another left in it."""

    description = "CUDA graphs"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._alive = weakref.WeakSet[torch.cuda.CUDAGraph]()
        """Graphs in the pool. One whose last graph is gone must not be recorded into again (CUDA allocator,
        before its pools outlived their graphs), and all go with the storage they were recorded over."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See ``Recorder``. Raises ``RuntimeError`` where ``run`` does what cannot be recorded."""
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            if self._pool is None or not self._alive:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may use the device meanwhile (a trainer's, Ray's).
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
            self._alive.add(graph)
        return graph.replay


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingKey:
    """What a recording is for."""

    bucket: Bucket
    loops: range


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One recorded forward and the buffers it reads."""

    rows: StaticRows
    run: Callable[[], None]


class ForwardGraphs:
    """The recordings of one decoder, made when a shape first comes up."""

    def __init__(
        self,
        recorder: Recorder,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        logits_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.recorder = recorder
        self._spec, self._dtype, self._logits_dtype, self._device = spec, dtype, logits_dtype, device
        self._recordings: OrderedDict[RecordingKey, Recording] = OrderedDict()
        self._unrecordable = set[RecordingKey]()
        """Shapes there was no memory to record. They are computed as they are."""
        self._storage: weakref.ref[TorchKV] | None = None
        self._logits_RV = torch.empty(0, dtype=logits_dtype, device=device)
        self._hidden_RD = torch.empty(0, dtype=dtype, device=device)

    @property
    def recordings(self) -> int:
        """How many there are now."""
        return len(self._recordings)

    @property
    def nbytes(self) -> int:
        """Memory of inputs and outputs. What graphs keep between is the allocator's and not told."""
        inputs = sum(recording.rows.nbytes for recording in self._recordings.values())
        return inputs + self._logits_RV.nbytes + self._hidden_RD.nbytes

    def forward(
        self,
        compute: PaddedForward,
        batch: RowBatch,
        kv: TorchKV,
        *,
        loops: range,
        hidden_MD: Tensor | None,
    ) -> ForwardResult | None:
        """Return what ``compute`` gives for a batch; None for one that no bucket takes, or none that fitted
        into memory.

        ``compute`` must be the same every time. Raises ``RuntimeError`` where it cannot be recorded.
        """
        placed = place(batch)
        if placed is None:
            return None
        self._belong_to(kv)
        key = RecordingKey(bucket=placed.bucket, loops=loops)
        if key in self._unrecordable:
            return None
        recording = self._recordings.get(key)
        if recording is None:
            try:
                rows = self._new_rows(key, kv)
                place_M = rows.fill(batch, placed.spans, hidden_MD)
                run = self._recorded(compute, rows, kv, loops)
            except torch.OutOfMemoryError as error:
                log.warning("no memory to record a forward of %s, run as it is from now on: %s", key, error)
                self._unrecordable.add(key)
                return None
            recording = self._keep(key, Recording(rows=rows, run=run))
        else:
            self._recordings.move_to_end(key)
            place_M = recording.rows.fill(batch, placed.spans, hidden_MD)
        recording.run()
        place_H = place_M[batch.head_rows_R.long().cpu()]
        return ForwardResult(
            logits_RV=self._logits_RV[place_H.to(self._device)],
            hidden_MD=self._hidden_RD[place_M.to(self._device)],
        )

    def _new_rows(self, key: RecordingKey, kv: TorchKV) -> StaticRows:
        if not self._logits_RV.numel():
            self._logits_RV = self._logits_RV.new_empty(MOST_ROWS, self._spec.vocab_size)
            self._hidden_RD = self._hidden_RD.new_empty(MOST_ROWS, self._spec.hidden_size)
        return StaticRows(
            key.bucket,
            spare_page=kv.spare_page,
            device=self._device,
            hidden_size=self._spec.hidden_size if key.loops.start else 0,
            dtype=self._dtype,
        )

    def _recorded(
        self, compute: PaddedForward, rows: StaticRows, kv: TorchKV, loops: range
    ) -> Callable[[], None]:
        logits_RV, hidden_RD = self._logits_RV[: rows.bucket.rows], self._hidden_RD[: rows.bucket.rows]
        storage = weakref.ref(kv)  # a recording must not keep memory that its engine gives back

        def run() -> None:
            live = storage()
            assert live is not None, "recordings go with their storage"
            logits, hidden = compute(rows, live, loops)
            logits_RV.copy_(logits)
            hidden_RD.copy_(hidden)

        log.info("recording a forward of %s, loops %s", rows.bucket, loops)
        return self.recorder.record(run)

    def _keep(self, key: RecordingKey, recording: Recording) -> Recording:
        self._recordings[key] = recording
        if len(self._recordings) > MOST_RECORDINGS:
            self._recordings.popitem(last=False)
        return recording

    def _belong_to(self, kv: TorchKV) -> None:
        """Drop what was recorded over another storage, and all of it when this one goes."""
        if self._storage is None or self._storage() is not kv:
            self._recordings.clear()
            recordings = self._recordings
            self._storage = weakref.ref(kv, lambda _: recordings.clear())
