"""What an engine holds of a sequence, plane by plane, and what plain decoding would hold in its place.

Shapes: P planes (``loop * layers + layer``), T positions, J KV heads, H head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine.native.compiled_forward.decoder import CompiledKV
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.rows import PAGE_TOKENS
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.testing_native import Text, ar_plan, text_of
from rollout.types import Completion, Request

_SLOTS = [2 * c if c < PAGE_TOKENS // 2 else 2 * c - PAGE_TOKENS + 1 for c in range(PAGE_TOKENS)]
"""Where each of sixteen neighbours stands in memory of compiled kernels (``bf16_panels.h``)."""

_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def planes_of(engine: NativeEngine, key: int, positions: int) -> Tensor:
    """Return keys, then values, of a running sequence's first positions, (2, P, T, J, H), copied."""
    pages = engine._scheduler.running[key].pages[: -(-positions // PAGE_TOKENS)]
    storage = engine._state.storage
    if isinstance(storage, TorchKV):
        slots = [pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(positions)]
        return torch.stack([storage.keys[:, slots], storage.values[:, slots]])
    assert isinstance(storage, CompiledKV)
    planes, _, heads, _, numbers = storage.data.shape
    head_dim = numbers // PAGE_TOKENS
    both = storage.data[:, pages]
    keys = both[:, :, :, 0].view(planes, len(pages), heads, head_dim, PAGE_TOKENS)[..., _SLOTS]
    blocks = (planes, len(pages), heads, PAGE_TOKENS, head_dim // PAGE_TOKENS, PAGE_TOKENS)
    values = both[:, :, :, 1].view(blocks)[..., _SLOTS].flatten(-2)
    by_token = torch.stack([keys.permute(0, 1, 4, 2, 3), values.permute(0, 1, 3, 2, 4)])
    return by_token.flatten(2, 3)[:, :, :positions]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are one, bit for bit: zeros of different sign are not."""
    kind = _BITS[a.dtype]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeRun:
    """What plain decoding makes of one request."""

    tokens: tuple[int, ...]
    """Prompt and text."""

    text: Text
    planes: Tensor
    """(2, P, T, J, H) of every position but the last one's, which is never computed, and the one before's
    where no round came after it."""


def native_runs(engine: NativeEngine, requests: Sequence[Request]) -> dict[int, NativeRun]:
    """Decode requests plainly in an idle engine; return what it held of each, by the request's seed."""
    by_key = {request.key: request for request in requests}
    assert len({request.seed for request in requests}) == len(requests), "seeds name requests here"
    held: dict[int, Tensor] = {}
    done: dict[int, Completion] = {}
    for request in requests:
        engine.add(request)
    while engine.busy:
        outcome = engine.run_round(ar_plan(engine.load()))
        for sequence in engine._scheduler.running.values():
            held[sequence.request.seed] = planes_of(engine, sequence.key, sequence.frontier)
        for completion in outcome.completions:
            done[by_key[completion.prompt_uid, completion.sample_index].seed] = completion
    return {
        request.seed: NativeRun(
            tokens=request.prompt_ids + done[request.seed].token_ids,
            text=text_of(done[request.seed]),
            planes=held[request.seed],
        )
        for request in requests
    }


def assert_stands_as_native(
    engine: NativeEngine, natives: dict[int, NativeRun], *, tolerance: float = 0.0
) -> int:
    """Check every decoding sequence between two rounds; return how many positions were compared.

    Its frontier is its last token's position, its tokens are plain decoding's, and so are the keys and values
    on all planes up to the frontier: bit for bit, or within ``tolerance`` where sums have another order.
    """
    compared = 0
    for sequence in engine._scheduler.decoding():
        native, frontier = natives[sequence.request.seed], sequence.frontier
        tokens = tuple(sequence.tokens)
        assert frontier == len(tokens) - 1, f"{sequence.key}: frontier {frontier} of {len(tokens)} tokens"
        assert tokens == native.tokens[: len(tokens)], f"{sequence.key}: another text"
        held, wanted = planes_of(engine, sequence.key, frontier), native.planes[:, :, :frontier]
        assert held.shape == wanted.shape, f"{sequence.key}: plain decoding was not there yet"
        if tolerance:
            error = (held - wanted).abs().amax(dim=(0, 2, 3, 4))
            assert error.max() <= tolerance, f"{sequence.key}: planes differ by {error.tolist()}"
        else:
            wrong = [p for p in range(held.shape[1]) if not same_bits(held[:, p], wanted[:, p])]
            assert not wrong, f"{sequence.key}: other bits on planes {wrong} before {frontier}"
        compared += frontier
    return compared
