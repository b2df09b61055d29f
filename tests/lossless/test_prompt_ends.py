"""Prompt rows end with their last keys and values: nobody can tell, from any text or any page."""

import pytest
import torch
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.shallow_loop import ShallowLoopDrafter
from rollout.config import EngineConfig
from rollout.engine.native.compiled_forward.decoder import CompiledKV, compiled_unavailable
from rollout.engine.native.decoder import ForwardResult, KVStorage
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.rows import RowBatch
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.testing import TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_looped import CountingDecoder
from rollout.testing_native import (
    MIXED_PARAMS,
    ar_plan,
    random_plan,
    requests_for,
    run_engine,
    texts,
    tiny_decoder,
    tiny_engine,
)

POLICIES = {"smollm2": tiny_policy(family="smollm2"), "ouro": tiny_looped_policy(loops=3)}
KINDS = [
    pytest.param(False, id="torch"),
    pytest.param(
        True,
        id="compiled",
        marks=pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable())),
    ),
]


class WholeRows(CountingDecoder):
    """Computes every row whole, whoever wants its state."""

    def forward(
        self,
        batch: RowBatch,
        kv: KVStorage,
        *,
        taps: tuple[str, ...] = (),
        loops: range | None = None,
        layers: range | None = None,
        hidden_MD: Tensor | None = None,
        states: bool = True,
    ) -> ForwardResult:
        return super().forward(batch, kv, taps=taps, loops=loops, layers=layers, hidden_MD=hidden_MD)


def engine_of(policy: TinyPolicy, *, compiled: bool, whole: bool, verify: str = "coupled") -> NativeEngine:
    decoder = tiny_decoder(policy, compiled=compiled)
    config = EngineConfig(
        max_batch=6, max_context_tokens=128, dtype="bfloat16", prefill_chunk_tokens=13, verify=verify
    )
    drafters = (
        [ShallowLoopDrafter(DrafterConfig(max_gamma=4), depth=depth) for depth in (1, 2)]
        if policy.spec.loops > 1
        else []
    )
    return tiny_engine(
        policy,
        drafters,
        compiled=compiled,
        config=config,
        decoder=WholeRows(decoder) if whole else decoder,
    )


def memory_of(engine: NativeEngine) -> list[Tensor]:
    storage = engine._state.storage
    if isinstance(storage, CompiledKV):
        return [storage.data]
    assert isinstance(storage, TorchKV)
    return [storage.keys, storage.values]


@pytest.mark.parametrize("compiled", KINDS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_chunked_prompts_and_their_samples_leave_the_texts_and_pages_of_whole_forwards(
    policy: TinyPolicy, compiled: bool
) -> None:
    requests = requests_for(vocab=48, prompts=5, samples=3, params=MIXED_PARAMS, longest_prompt=50)
    engines = [engine_of(policy, compiled=compiled, whole=whole) for whole in (False, True)]
    lean, whole = [texts(run_engine(engine, requests, ar_plan)) for engine in engines]
    assert lean == whole
    assert max(len(r.prompt_ids) for r in requests) > 3 * 13
    mine, other = (memory_of(engine) for engine in engines)
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("verify", ["coupled", "block"])
@pytest.mark.parametrize("compiled", KINDS)
def test_beside_drafts_from_any_depth_prompts_end_early_and_texts_stay(compiled: bool, verify: str) -> None:
    policy = POLICIES["ouro"]
    requests = requests_for(vocab=48, prompts=5, samples=2, params=MIXED_PARAMS, longest_prompt=50)
    lean, whole = [
        texts(
            run_engine(
                engine_of(policy, compiled=compiled, whole=whole, verify=verify),
                requests,
                random_plan(("shallow_loop_1", "shallow_loop_2"), max_gamma=4, seed=3),
            )
        )
        for whole in (False, True)
    ]
    assert lean == whole
