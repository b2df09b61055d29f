"""A folder as Ouro-1.4B is published, at its full depth of 24 layers run 4 times, but narrow. Random weights.

``test_ouro_width.py`` has the width. Together they are all of its shape but the vocabulary's effect on time.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafters.config import DrafterConfig
from drafters.registry import shallow_loops
from drafters.wavefront import WAVEFRONT
from rollout.config import EngineConfig, PolicyConfig
from rollout.engine.native.build import build_engine
from rollout.engine.native.engine import NativeEngine
from rollout.policy.families import load_spec
from rollout.policy.place import INDEX
from rollout.policy.source import load_policy, read_config
from rollout.testing import random_policy
from rollout.testing_looped import PUBLISHED_OURO, dense_ouro
from rollout.testing_native import ar_plan, fixed_plan, requests_for, run_engine, texts
from rollout.testing_planes import planes_of
from rollout.types import Request, SamplingParams

pytestmark = pytest.mark.slow

NARROW = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LOOPED = (*shallow_loops(4), WAVEFRONT)
SHARDS = 3
LOGIT_TOLERANCE = 3e-2
"""Keys and values are rounded to bf16 on 96 planes; small policies of 8 planes are held to 6e-3."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the published ``config.json`` but for widths, and weights in shards behind an index."""
    path = tmp_path_factory.mktemp("ouro")
    (path / "config.json").write_text(json.dumps(PUBLISHED_OURO | NARROW))
    state = random_policy(load_spec(read_config(path)), seed=3).state
    names = list(state)
    where = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = names[shard::SHARDS]
        save_file({name: state[name] for name in part}, path / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[NativeEngine]:
    built = build_engine(
        PolicyConfig(source=str(folder)),
        EngineConfig(threads=2, max_batch=4, max_context_tokens=64, prefix_cache=False, numerics="exact"),
        DrafterConfig(names=LOOPED, wavefront_depth=1, wavefront_passes=1),
    )
    yield built
    built.close()


def requests_of() -> list[Request]:
    params = (SamplingParams(max_tokens=9, ignore_eos=True), SamplingParams(max_tokens=9, temperature=0.0))
    return requests_for(
        vocab=PUBLISHED_OURO["vocab_size"], prompts=3, params=params, seed=4, longest_prompt=20
    )


def test_every_looped_draft_leaves_the_text_of_plain_decoding(engine: NativeEngine) -> None:
    native = texts(run_engine(engine, requests_of(), ar_plan))
    for drafter in LOOPED:
        done = run_engine(engine, requests_of(), fixed_plan(drafter, 3))
        assert texts(done) == native, drafter
        assert {t.origin for c in done.values() for t in c.tokens} >= {"accepted", "corrected"}, drafter


def test_all_96_planes_and_the_logits_are_those_of_the_forward_written_out(
    folder: Path, engine: NativeEngine
) -> None:
    policy = load_policy(PolicyConfig(source=str(folder)))
    request = replace(requests_of()[0], prompt_ids=tuple(range(100, 117)))
    engine.add(request)
    for _ in range(4):
        engine.run_round(ar_plan(engine.load()))
    (sequence,) = engine._scheduler.running.values()
    known = sequence.tokens[: sequence.frontier]
    held = planes_of(engine, sequence.key, sequence.frontier).double()
    engine.abort(request.key)
    wanted = dense_ouro(
        policy.spec, policy.state, known, theta=PUBLISHED_OURO["rope_theta"], kv_dtype=torch.bfloat16
    )
    assert held.shape[1] == 4 * 24
    for mine, own in zip(held, (wanted.keys_PTJH, wanted.values_PTJH), strict=True):
        error_P = (mine - own).abs().amax(dim=(1, 2, 3))
        assert error_P[0] <= 2**-7 * own[0].abs().max()
        assert ((mine - own).abs() <= 2**-7 * own.abs() + LOGIT_TOLERANCE).all(), error_P.tolist()
    logits_V = engine.logits_after(known).double()
    assert (logits_V - wanted.logits[-1][-1]).abs().max() < LOGIT_TOLERANCE
