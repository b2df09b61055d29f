"""The real engine behind the real service: drafts from the policy's own weights, hosts that die."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from controller.config import ControllerConfig
from drafters.config import DrafterConfig
from rollout.config import EngineConfig, PolicyConfig
from rollout.engine.protocol import Emission
from rollout.errors import WeightUpdateError
from rollout.service.factory import EngineSpec
from rollout.service.loop import EngineLoop
from rollout.testing import save_tiny_folder, tiny_policy
from rollout.tracking.reduce import RolloutPool
from rollout.types import Request, SamplingParams

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder: Path = tmp_path_factory.mktemp("policy") / "tiny"
    save_tiny_folder(folder)
    return EngineSpec(
        policy=PolicyConfig(source=str(folder)),
        engine=EngineConfig(max_batch=8, max_context_tokens=256, threads=1),
        drafter=DrafterConfig(names=("w4", "history")),
        controller=ControllerConfig(kind="fixed", drafter="w4", gamma=3),
    )


@pytest.fixture(scope="module")
def looped_spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder: Path = tmp_path_factory.mktemp("policy") / "looped"
    save_tiny_folder(folder, "ouro")
    return EngineSpec(
        policy=PolicyConfig(source=str(folder)),
        engine=EngineConfig(max_batch=8, max_context_tokens=256, threads=1),
        drafter=DrafterConfig(names=("shallow_loop_2", "wavefront")),
    )


def requests(tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.8, top_p=0.9)
    return [
        Request(
            prompt_uid=f"p{i}", sample_index=j, prompt_ids=(5 + i, 9, 11), params=params, seed=100 * i + j
        )
        for i in range(4)
        for j in range(2)
    ]


def plain_text(spec: EngineSpec, asked: list[Request]) -> list[tuple[tuple[int, float], ...]]:
    """Return ids and logprobs of plain decoding in this process."""
    engine, controller = replace(spec, controller=ControllerConfig(kind="ar")).build()
    told = []
    loop = EngineLoop(engine, controller, host="here", deliver=told.append)
    loop.add(asked)
    while loop.turn():
        pass
    loop.close()
    loop.turn()
    ended = {(c.prompt_uid, c.sample_index): c for events in told for c in events.completions}
    return [exact(ended[r.key]) for r in asked]


def exact(completion) -> tuple[tuple[int, float], ...]:
    return tuple((t.token_id, t.scaled_logprob) for t in completion.tokens)


@pytest.mark.parametrize("drafter", ["w4", "shallow_loop_2", "wavefront"])
def test_a_host_killed_while_drafting_changes_no_token_and_no_logprob(drafter, spec, looped_spec, start):
    if drafter != "w4":
        spec = replace(looped_spec, controller=ControllerConfig(kind="fixed", drafter=drafter, gamma=3))
    asked = requests(220)
    expected = plain_text(spec, asked)
    client = start(spec, hosts=2, flush_s=0.0)
    victim = client.health().hosts[0].pid
    seen = {r.key: [] for r in asked}
    ended = {}
    for item in client.stream(asked):
        if isinstance(item, Emission):
            assert item.first_index == len(seen[item.key])
            seen[item.key].extend(item.tokens)
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
                victim = None
        else:
            ended[item.prompt_uid, item.sample_index] = item
    assert {c.error for c in ended.values()} == {None}
    assert [exact(ended[r.key]) for r in asked] == expected
    assert [tuple(seen[r.key]) for r in asked] == [ended[r.key].tokens for r in asked]
    pool = RolloutPool()
    for record in client.take_records():
        pool.add_round(record.facts, record.plan)
    pool.add_completions(ended.values())
    metrics = pool.metrics(wall_s=1.0)
    assert metrics["rollout/tokens"] == sum(len(tokens) for tokens in seen.values())
    # What was delivered is not for the records to tell: the last rounds of the dead host may be missing.
    assert metrics["rollout/committed_tokens"] > 0
    assert max(c.attempt for c in ended.values()) == 1, "nothing was running on the host that was killed"
    assert sum(c.provenance.accepted for c in ended.values()) > 0


def test_real_weights_are_refused_whole_or_live_on_every_host_and_in_every_drafter(spec, start):
    client = start(spec, hosts=2)
    asked = requests(24)
    before = client.generate(asked)
    told = client.take_records()
    assert {r.host for r in told} == {"host-0", "host-1"}
    assert sum(r.facts.committed for r in told) == sum(len(c.tokens) for c in before)
    broken = tiny_policy(seed=9).state
    broken["model.norm.weight"][3] = float("nan")
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight holds NaN"):
        client.update_weights(broken, 1)
    assert [exact(c) for c in client.generate(asked)] == [exact(c) for c in before]
    state = {name: tensor.to(torch.float32) for name, tensor in tiny_policy(seed=9).state.items()}
    assert client.update_weights(state, 2) == 2
    after = client.generate(asked)
    assert [exact(c) for c in after] != [exact(c) for c in before]
    assert {t.policy_version for c in after for t in c.tokens} == {2}
    assert {c.provenance.drafter_versions["w4"] for c in after} == {2}
    assert len({c.provenance.fingerprint for c in after}) == 1
