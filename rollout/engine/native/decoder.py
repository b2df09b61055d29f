"""What computes a forward. Two kinds: compiled kernels (CPU) and torch (reference, fallback, CUDA)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from controller.types import ForwardSeconds
from drafters.types import LinearWeight, QuantizedLinear
from rollout.engine.native.decoder_work import DecoderWork
from rollout.engine.native.rows import RowBatch
from rollout.policy.spec import ModelSpec


class KVStorage(Protocol):
    """The memory of a page pool, in the layout its decoder wants. Bookkeeping is in ``pages.py``."""

    pages: int

    @property
    def bytes_per_page(self) -> int:
        """Over all planes, keys and values."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page on every plane."""
        ...

    def occupy(self, pages: Sequence[int]) -> None:
        """Make pages take memory of their own, what they hold kept.

        Until it is written, memory of the system is one page of zeros seen many times: always in the
        caches, so that reading it says nothing of reading keys and values.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardResult:
    """What a forward returned. Buffers belong to the decoder and live until its next forward."""

    logits_RV: Tensor
    """float32 (float64 in a float64 decoder), one row per head row."""

    hidden_MD: Tensor
    """States after the last loop run: what the next loop, the head and the exit gate read. Where its last
    layer was not run, the residual stream after the last one that was. Empty (0, D) where they were not
    wanted."""

    taps: Mapping[str, Tensor] = field(default_factory=dict)
    """Hidden states (M, hidden) by name: ``"layer.3"`` is the residual stream after layer 3 of the last
    loop run, ``"loop.1.layer.3"`` names the loop, ``"loop.1"`` is the state after that loop, ``"embed"`` the
    input, ``"final"`` after the last norm. Of layers that were not run there are none."""

    seconds: ForwardSeconds | None = None
    """What it spent its time on; None where the decoder cannot tell."""


class Decoder(Protocol):
    """A policy's forward over paged KV: ``embed``, ``block`` per loop, ``head``."""

    spec: ModelSpec
    compiled: bool
    row_invariant: bool
    """Whether a row's bits are independent of which and how many rows are computed with it."""

    @property
    def weight_bytes(self) -> int:
        """Memory of the policy's weights, shared ones once; a drafter's own are not counted."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Memory kept between forwards for hidden states and logits."""
        ...

    @property
    def work(self) -> DecoderWork:
        """All it has computed since it was made. Decoders of ``with_linears`` count their own."""
        ...

    def new_storage(self, pages: int) -> KVStorage:
        """Return zeroed KV memory: stale keys must be finite, they are multiplied by zero."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take a checked state dict (Hugging Face names) into the same buffers; addresses stay."""
        ...

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
        """Run ``loops`` (all by default), write KV on their planes, return logits of the head rows.

        Loops from 0 on start at the embeddings of the rows' tokens. Loops from later on start at
        ``hidden_MD``, the states after the loop before (kept as it is), and do not read the tokens. The head
        reads the state after the last loop run, whichever that is. Without ``states`` the result has none,
        and rows without a head end with writing their last keys and values, all that is read of them later;
        with taps they go on.

        ``layers`` (all by default) are some of one loop's. Those from 0 on start where the loop does, later
        ones at ``hidden_MD``, the residual stream after the layer before. Without the loop's last layer there
        is no norm behind them and no head, and the states are the residual stream as a tap shows it. Parts
        that make a loop have the whole forward's bits.

        Raises ``ValueError`` for loops and layers the policy does not have, for some layers of several loops,
        for head rows without the last layer, and for states that are missing, unwanted or mis-shaped.
        """
        ...

    def advance(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop_M: Tensor) -> ForwardResult:
        """Take every row one loop further, each on the planes of its own ``loop_M`` (int32), in one pass.

        A row of loop 0 starts at its token's embedding and its row of ``hidden_MD`` is not read; any other
        starts at its state after the loop before. The bits are those of one ``forward`` per depth. Rows of
        one position may stand at several depths. Raises ``ValueError`` as ``forward`` does.
        """
        ...

    def embed(self, token_ids_M: Tensor) -> Tensor:
        """Return the input hidden states (M, hidden)."""
        ...

    def block(self, hidden_MD: Tensor, batch: RowBatch, kv: KVStorage, *, loop: int) -> Tensor:
        """Run all layers once on KV planes of ``loop`` and return the states after it (M, hidden)."""
        ...

    def head(self, hidden_RD: Tensor) -> Tensor:
        """Return logits (R, vocab) of states after any loop; a final norm they still lack is included."""
        ...

    def exit_gate(self, hidden_MD: Tensor) -> Tensor:
        """Return the exit gate's values (M,), before the sigmoid, on states after a loop.

        Raises ``UnsupportedError`` for a policy that has no gate.
        """
        ...

    def linears(self) -> Iterator[LinearWeight]:
        """Yield ``layers.{i}.qkv|o|gate_up|down`` in order, then ``head``."""
        ...

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> "Decoder":
        """Return a decoder with these linears that shares embeddings, norms, biases and KV layout."""
        ...
