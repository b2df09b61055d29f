"""Whole rollouts through recorded forwards: the samples of the plain torch path, drafts and sleep included.

float64: forwards of other shapes differ in the last bits, far below what separates two choices.
"""

from collections.abc import Callable

import pytest
import torch

from drafters.config import DrafterConfig
from drafters.shallow_loop import ShallowLoopDrafter
from drafters.types import Drafter
from drafters.w4 import W4Drafter
from rollout.engine.native.drafts.view import NativeDraftModel
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.testing import TinyPolicy, tiny_looped_policy, tiny_policy
from rollout.testing_native import (
    MIXED_PARAMS,
    CountingRecorder,
    ar_plan,
    fixed_plan,
    random_plan,
    requests_for,
    run_engine,
    tiny_decoder,
    tiny_engine,
)

pytestmark = pytest.mark.lossless


def engines(
    policy: TinyPolicy, drafter: Callable[[], Drafter]
) -> tuple[NativeEngine, NativeEngine, CountingRecorder]:
    """Return an engine that computes plainly, one that records, and its recorder."""
    plain = tiny_decoder(policy, dtype=torch.float64, exact=False)
    assert isinstance(plain, TorchDecoder)
    recorder = CountingRecorder()
    graphed = plain.with_fast_paths(plain.attention, recorder)
    made = [tiny_engine(policy, [drafter()], decoder=decoder, exact=False) for decoder in (plain, graphed)]
    return made[0], made[1], recorder


CASES: dict[str, tuple[Callable[[], TinyPolicy], Callable[[], Drafter]]] = {
    "w4": (
        lambda: tiny_policy(family="smollm2"),
        lambda: W4Drafter(DrafterConfig(w4_kernel="torch", w4_group=32)),
    ),
    "shallow_loop_2": (
        lambda: tiny_looped_policy(vocab=48),
        lambda: ShallowLoopDrafter(DrafterConfig(), depth=2),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_samples_are_the_same_plain_drafted_and_mixed(name: str) -> None:
    policy, drafter = CASES[name]
    plain, graphed, recorder = engines(policy(), drafter)
    requests = requests_for(vocab=48, prompts=5, samples=2, params=MIXED_PARAMS)
    expected = {key: c.token_ids for key, c in run_engine(plain, requests, ar_plan).items()}
    assert len(set(expected.values())) > 4
    for plan in (ar_plan, fixed_plan(name, 3), random_plan([name], max_gamma=5, seed=1)):
        done = run_engine(graphed, requests, plan)
        assert {key: c.token_ids for key, c in done.items()} == expected
    # Rounds run what few recordings there are: draft passes and verification among them.
    assert recorder.recorded < recorder.runs / 4
    drafts = graphed._drafting.slots[name].drafter.model
    assert isinstance(drafts, NativeDraftModel)
    assert isinstance(drafts.decoder, TorchDecoder)
    assert drafts.decoder.graphs is not None
    assert drafts.decoder.graphs.recordings > 0


def test_sleep_and_waking_up_lose_the_recordings_and_nothing_else() -> None:
    policy, drafter = CASES["w4"]
    plain, graphed, recorder = engines(policy(), drafter)
    requests = requests_for(vocab=48, prompts=3, samples=2)
    expected = {key: c.token_ids for key, c in run_engine(plain, requests, ar_plan).items()}
    for _ in range(2):
        before = recorder.recorded
        done = run_engine(graphed, requests, fixed_plan("w4", 2))
        assert {key: c.token_ids for key, c in done.items()} == expected
        assert recorder.recorded > before
        graphed.sleep()
        decoder = graphed._decoder
        assert isinstance(decoder, TorchDecoder)
        assert decoder.graphs is not None
        assert decoder.graphs.recordings == 0
        graphed.wake()
