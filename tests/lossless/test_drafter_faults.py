"""A drafter that misbehaves in any of its calls costs time only: texts stay the plain ones."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from controller.types import VerifyMode
from drafters.testing import ScriptedDrafter
from drafters.types import PolicyView, Proposal
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.policy.weights import manifest
from rollout.testing import tiny_policy
from rollout.testing_native import ar_plan, fixed_plan, requests_for, run_engine, texts, tiny_engine
from rollout.types import SamplingParams

pytestmark = pytest.mark.lossless

VOCAB = 48
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, ignore_eos=True)


def _raises(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("planted")


def _answers(tokens: Any, probs: Any = None, **more: Any) -> Callable[[Any], Any]:
    """Return a ``propose`` that gives every request ``tokens``, and ``probs`` where there are any."""

    def propose(requests: Any) -> Any:
        said: dict[str, Any] = {"passes": 0, "rows": 0, "context_tokens": 0, **more}
        rows = None if probs is None else [probs] * len(requests)
        return Proposal(tokens=[tokens] * len(requests), probs=rows, **said)

    return propose


def _too_few(what: str) -> Callable[[Any], Any]:
    def propose(requests: Any) -> Any:
        answer = {
            "tokens": [[5]] * len(requests),
            "probs": [torch.full((1, VOCAB), 1 / VOCAB)] * len(requests),
        }
        answer[what] = answer[what][1:]  # type: ignore[assignment]
        return Proposal(passes=0, rows=0, context_tokens=0, **answer)  # type: ignore[arg-type]

    return propose


FAULTS: dict[str, dict[str, Any]] = {
    "propose raises": {"propose": _raises},
    "propose returns None": {"propose": lambda _requests: None},
    "too few lists": {"propose": _too_few("tokens")},
    "too few distributions": {"propose": _too_few("probs")},
    "no list": {"propose": _answers(None)},
    "text for ids": {"propose": _answers(["a"])},
    "float ids": {"propose": _answers([5.0, 6.5])},
    "a float after a sound id": {"propose": _answers([5, 6.5])},
    "negative ids": {"propose": _answers([5, -1])},
    "huge ids": {"propose": _answers([2**70])},
    "float tensor ids": {"propose": _answers(torch.tensor([5.0, 6.0]))},
    "wrong vocabulary": {"propose": _answers([5, 6], torch.full((2, VOCAB + 2), 1 / (VOCAB + 2)))},
    "one row too few": {"propose": _answers([5, 6], torch.full((1, VOCAB), 1 / VOCAB))},
    "NaN rows": {"propose": _answers([5, 6], torch.full((2, VOCAB), float("nan")))},
    "rows of a list": {"propose": _answers([5, 6], [[1 / VOCAB] * VOCAB] * 2)},
    "costs of None": {"propose": _answers([5], passes=None)},
    "negative costs": {"propose": _answers([5], rows=-3)},
    "finished raises": {"finished": _raises},
    "ready raises": {"ready": _raises},
    "ready is negative": {"ready": lambda requests: [-5] * len(requests)},
    "ready is text": {"ready": lambda requests: ["many"] * len(requests)},
    "ready is a number": {"ready": lambda _requests: 3},
    "ready tells of too few": {"ready": lambda _requests: []},
    "rebuild raises": {"rebuild": _raises},
    "no version": {"rebuild": lambda _view: None, "drafter_version": None},
}


def _engine(fault: dict[str, Any], verify: VerifyMode) -> NativeEngine:
    drafter = ScriptedDrafter(lambda _request: [5, 6, 7], name="odd")
    for name, value in fault.items():
        setattr(drafter, name, value)
    config = EngineConfig(max_batch=8, max_context_tokens=128, dtype="bfloat16", verify=verify)
    return tiny_engine(tiny_policy(), [drafter], compiled=True, config=config)


@pytest.mark.parametrize("verify", ["coupled", "block"])
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_of_a_drafter_changes_no_text_and_switches_it_off(
    name: str, verify: VerifyMode, caplog: pytest.LogCaptureFixture
) -> None:
    # Under block verification only greedy text is the same whatever was drafted.
    params = (GREEDY, SAMPLED) if verify == "coupled" else (GREEDY,)
    requests = requests_for(vocab=VOCAB, prompts=3, params=params)
    plain = texts(run_engine(_engine({}, verify), requests, ar_plan))
    with caplog.at_level(logging.WARNING):
        engine = _engine(FAULTS[name], verify)
        done = run_engine(engine, requests, fixed_plan("odd", 4))
    assert texts(done) == plain
    gauges = engine.gauges()
    assert gauges["drafter/odd_failures"] >= 1
    assert gauges["drafter/odd_enabled"] == 0
    assert engine.traits.drafters == ()
    assert "ALARM drafter odd" in caplog.text
    assert sum("failed, what it" in r.message for r in caplog.records) <= 1, "a cause is told once"


@pytest.mark.parametrize("verify", ["coupled", "block"])
def test_ids_of_numpy_and_torch_and_too_many_of_them_are_no_fault(verify: VerifyMode) -> None:
    requests = requests_for(vocab=VOCAB, prompts=2, params=(GREEDY,))
    plain = texts(run_engine(_engine({}, verify), requests, ar_plan))
    for tokens in (torch.tensor([5, 6]), torch.tensor([5, 6]).numpy(), [5] * 50):
        engine = _engine({"propose": _answers(tokens)}, verify)
        assert texts(run_engine(engine, requests, fixed_plan("odd", 4))) == plain
        assert engine.gauges()["drafter/odd_failures"] == 0


def test_every_failing_forget_is_counted_and_every_request_ends() -> None:
    requests = requests_for(vocab=VOCAB, prompts=3, params=(GREEDY,))
    engine = _engine({"forget": _raises}, "coupled")
    done = run_engine(engine, requests, fixed_plan("odd", 4))
    assert texts(done) == texts(run_engine(_engine({}, "coupled"), requests, ar_plan))
    assert engine.gauges()["drafter/odd_failures"] == len(requests)


def test_an_update_is_live_whole_though_a_rebuild_raises_and_the_next_version_drafts_again() -> None:
    drafter = ScriptedDrafter(lambda _request: [5, 6, 7], name="odd")
    engine = tiny_engine(tiny_policy(), [drafter], compiled=True)
    whole = drafter.rebuild

    def rebuild(view: PolicyView) -> None:
        if view.policy_version == 1:
            raise RuntimeError("planted")
        whole(view)

    drafter.rebuild = rebuild  # type: ignore[method-assign]
    requests = requests_for(vocab=VOCAB, prompts=2, params=(SAMPLED,))
    for version, working in ((1, False), (2, True)):
        policy = tiny_policy(seed=version)
        engine.begin_update(manifest(policy.state, version), in_flight="drain")
        engine.stage(policy.state.items())
        assert engine.commit_update() == version
        assert engine.drafter_versions() == ({"odd": version} if working else {})
        assert engine.gauges()["drafter/odd_enabled"] == working
        if not working:
            engine.use_drafters(["odd"])
            assert engine.traits.drafters == (), "what could not be built cannot be switched on"
        done = run_engine(engine, requests, fixed_plan("odd", 3))
        assert texts(done) == texts(run_engine(tiny_engine(policy, compiled=True), requests, ar_plan))
        drafted = sum(c.provenance.drafted for c in done.values() if c.provenance is not None)
        assert (drafted > 0) == working
