"""The 4-bit drafter inside the compiled decoder: its linears, its buffers, its bits.

Shapes: M rows, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.types import DraftRequest, DraftStep, LinearWeight, QuantizedLinear
from drafters.w4 import W4Drafter
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, compiled_unavailable
from rollout.engine.native.decoder import Decoder
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.testing import tiny_policy

pytestmark = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))

TOKENS = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38, 46, 2, 6, 43, 38, 32]


class DecoderModel:
    """A draft model of which only the decoder is used."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def chain(self, requests: Sequence[DraftRequest], gammas: Sequence[int]) -> None:
        return None

    def step(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> DraftStep:
        raise AssertionError("not stepped here")


class DecoderView:
    """A ``PolicyView`` straight on a decoder."""

    vocab_size = 48

    def __init__(self, decoder: Decoder, *, policy_version: int = 0) -> None:
        self.decoder = decoder
        self.policy_version = policy_version
        self.compiled = self.chains = decoder.compiled
        self.loops = decoder.spec.loops

    def linears(self) -> Iterator[LinearWeight]:
        return self.decoder.linears()

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> DecoderModel:
        return DecoderModel(self.decoder.with_linears(linears))


def compiled(family: str, seed: int = 0, defines: tuple[str, ...] = ()) -> CompiledDecoder:
    policy = tiny_policy(seed, family=family)
    decoder = CompiledDecoder(
        policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, threads=1, defines=defines
    )
    decoder.load(policy.state)
    return decoder


def drafting(view: DecoderView, **settings: object) -> tuple[W4Drafter, Decoder]:
    drafter = W4Drafter(DrafterConfig(**settings))  # type: ignore[arg-type]
    drafter.rebuild(view)
    assert isinstance(drafter.model, DecoderModel)
    return drafter, drafter.model.decoder


def logits(decoder: Decoder) -> Tensor:
    """Logits of every row of ``TOKENS``, as one prompt."""
    count = len(TOKENS)
    pages = -(-count // PAGE_TOKENS)
    rows = torch.arange(count, dtype=torch.int32)
    batch = RowBatch(
        token_ids_M=torch.tensor(TOKENS, dtype=torch.int32),
        positions_M=rows,
        table_M=torch.zeros(count, dtype=torch.int32),
        page_table_SP=torch.arange(pages, dtype=torch.int32)[None],
        head_rows_R=rows,
    )
    return decoder.forward(batch, decoder.new_storage(pages)).logits_RV.clone()


@pytest.mark.parametrize("family", ["smollm2", "llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("head_bits", [8, 16])
def test_the_compiled_draft_forward_agrees_with_the_oracles(family: str, head_bits: int) -> None:
    policy = tiny_policy(0, family=family, dtype=torch.float32)
    state = {name: t.bfloat16().float() for name, t in policy.state.items()}
    oracle = TorchDecoder(
        policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=torch.float32, exact=False
    )
    oracle.load(state)
    expected_MV = logits(drafting(DecoderView(oracle), w4_kernel="torch", w4_head_bits=head_bits)[1])
    own_MV = logits(oracle)
    drafted_MV = logits(drafting(DecoderView(compiled(family)), w4_head_bits=head_bits)[1])
    # 8-bit activations move logits; 4-bit weights must be what moved them most.
    moved = (expected_MV - own_MV).square().mean().sqrt()
    error = (drafted_MV - expected_MV).square().mean().sqrt()
    assert 0 < error < 0.15 * moved


def test_a_weight_update_reaches_the_compiled_drafter_through_the_same_buffers() -> None:
    decoder = compiled("smollm2")
    drafter, drafted = drafting(DecoderView(decoder))
    before_MV = logits(drafted)
    decoder.load(tiny_policy(7, family="smollm2").state)
    drafter.rebuild(DecoderView(decoder, policy_version=1))
    fresh_MV = logits(drafting(DecoderView(compiled("smollm2", seed=7)))[1])
    # The decoder made before the update reads the same memory, so it has followed too.
    assert torch.equal(logits(drafted), fresh_MV)
    assert isinstance(drafter.model, DecoderModel)
    assert torch.equal(logits(drafter.model.decoder), fresh_MV)
    assert not torch.equal(before_MV, fresh_MV)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["smollm2", "qwen2"])
def test_plain_cpp_and_vector_code_draft_the_same_bits(family: str) -> None:
    vector, plain = (
        logits(drafting(DecoderView(compiled(family, defines=defines)))[1])
        for defines in ((), ("TAILDRAFT_GENERIC",))
    )
    assert torch.equal(vector, plain)
