"""Looped drafts in a host's loop: pauses and weight updates in mid-flight lose nothing and change no text."""

from collections.abc import Sequence

import pytest

from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.types import InFlight
from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.config import EngineConfig
from rollout.policy.weights import manifest
from rollout.service.loop import EngineLoop
from rollout.service.records import HostEvents
from rollout.testing import tiny_looped_policy
from rollout.testing_native import ar_plan, requests_for, run_engine, texts, tiny_engine
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless

DRAFTERS = ("wavefront", "shallow_loop_2")
SETTINGS = EngineConfig(max_batch=4, max_context_tokens=128, prefix_cache=False)
PARAMS = (
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, top_k=9),
)


class Host:
    """A host's loop, turned by hand, under a controller that always drafts."""

    def __init__(self, drafter: str) -> None:
        engine = tiny_engine(
            tiny_looped_policy(), [build(drafter, DrafterConfig())], compiled=True, config=SETTINGS
        )
        config = ControllerConfig(kind="fixed", drafter=drafter, gamma=3)
        controller = build_controller(config, engine.traits, engine.part_shapes(), None)
        self.events: list[HostEvents] = []
        self.engine = engine
        self.loop = EngineLoop(engine, controller, host="host-0", deliver=self.events.append)

    def turns(self, count: int) -> int:
        """Turn and return how often a round ran."""
        return sum(self.loop.turn() for _ in range(count))

    def finish(self) -> dict[tuple[str, int], Completion]:
        """Turn to the end and return every completion, each once."""
        for _ in range(1000):
            self.loop.turn()
            if not self.loop.status().live:
                break
        done = [c for e in self.events for c in e.completions]
        found = {(c.prompt_uid, c.sample_index): c for c in done}
        assert len(found) == len(done)
        gauges = self.engine.gauges()
        assert (gauges["engine/kv_pages_used"], gauges["engine/lanes"]) == (0, 0)
        return found


def requests() -> list[Request]:
    return requests_for(vocab=48, prompts=6, params=PARAMS, seed=5)


def emitted(events: Sequence[HostEvents]) -> dict[tuple[str, int], list[int]]:
    """Return the ids each request's stream was told, in order."""
    told: dict[tuple[str, int], list[int]] = {}
    for emission in (m for e in events for m in e.emissions):
        told.setdefault(emission.key, []).extend(t.token_id for t in emission.tokens)
    return told


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_pauses_between_any_two_rounds_change_no_text_and_repeat_no_token(drafter: str) -> None:
    host = Host(drafter)
    host.loop.add(requests())
    paused_with_lanes = 0
    for _ in range(12):
        host.turns(1)
        host.loop.pause()
        assert host.turns(3) == 0
        paused_with_lanes += host.engine.gauges()["engine/lanes"] > 0
        host.loop.resume()
    done = host.finish()
    plain = tiny_engine(tiny_looped_policy(), [], compiled=True, config=SETTINGS)
    assert texts(done) == texts(run_engine(plain, requests(), ar_plan))
    assert emitted(host.events) == {key: list(c.token_ids) for key, c in done.items()}
    assert (paused_with_lanes > 0) == (drafter == "wavefront")


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
@pytest.mark.parametrize("mode", ["recompute", "keep", "abort"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_update_that_arrives_while_drafts_are_under_way_loses_no_request(
    drafter: str, mode: InFlight, paused: bool
) -> None:
    host, new = Host(drafter), tiny_looped_policy(seed=2)
    host.loop.add(requests())
    host.turns(5)
    if paused:
        host.loop.pause()
    opened = host.loop.begin_update(manifest(new.state, 1), mode)
    staged = [host.loop.stage([item]) for item in new.state.items()]
    committed = host.loop.commit_update()
    host.turns(4)
    opened.result(timeout=0)
    for future in staged:
        future.result(timeout=0)
    assert committed.result(timeout=0) == 1
    host.loop.resume()
    done = host.finish()
    assert set(done) == {r.key for r in requests()}
    for completion in done.values():
        versions = [t.policy_version for t in completion.tokens]
        assert versions == sorted(versions)
        assert len(completion.token_ids) == 40 or completion.finish_reason in ("stop", "aborted")
    if mode == "abort":
        assert {c.finish_reason for c in done.values()} >= {"aborted"}
    else:
        assert {v for c in done.values() for v in (t.policy_version for t in c.tokens)} == {0, 1}
