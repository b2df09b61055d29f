"""All that a looped policy can draft with in one engine: priced together, mixed in a round, exact."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.decide import Controller, build_controller
from controller.types import AR, POLICY, PartShape, RoundLoad, RoundPlan
from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.calibration.measure import calibrate
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.proof.steering import Steering, drive, nominal_calibration
from rollout.testing import TinyPolicy, tiny_looped_policy
from rollout.testing_native import ar_plan, random_plan, requests_for, run_engine, texts, tiny_engine
from rollout.types import SamplingParams

pytestmark = pytest.mark.lossless

NAMES = ("shallow_loop_1", "shallow_loop_2", "wavefront", "history")
# Greedy texts of a tiny policy soon repeat themselves, so there is something to copy.
PARAMS = (
    SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=70, ignore_eos=True),
)


def engine_of(policy: TinyPolicy, *, compiled: bool = True) -> NativeEngine:
    config = EngineConfig(max_batch=6, max_context_tokens=128, prefill_chunk_tokens=16)
    return tiny_engine(policy, [build(n, DrafterConfig()) for n in NAMES], compiled=compiled, config=config)


def test_every_sequence_of_a_round_may_have_another_drafter() -> None:
    policy = tiny_looped_policy(seed=1)
    requests = requests_for(vocab=48, prompts=10, params=PARAMS, seed=1)
    expected = texts(run_engine(engine_of(policy), requests, ar_plan))
    plan, together = random_plan(NAMES, max_gamma=4, seed=3), Counter[frozenset[str]]()

    def counted(load: RoundLoad) -> RoundPlan:
        made = plan(load)
        together[frozenset(a.drafter for a in made.assignments.values())] += 1
        return made

    done = run_engine(engine_of(policy), requests, counted)
    assert texts(done) == expected
    assert together[frozenset(NAMES)] > 5
    assert {t.drafter for c in done.values() for t in c.tokens} == {*NAMES, AR}


def test_auto_plans_from_a_calibration_taken_here_and_the_text_stays() -> None:
    """Taken here, as a host takes it. What is worth pricing follows the clock, so only what holds of any
    calibration is asserted; what may be priced, the next test shows with fixed costs."""
    policy = tiny_looped_policy(seed=2)
    requests = requests_for(vocab=48, prompts=8, params=PARAMS, seed=2, longest_prompt=20)
    expected = texts(run_engine(engine_of(policy), requests, ar_plan))
    engine = engine_of(policy)
    # Plans are made every few rounds, so that a short run sees every option.
    config = ControllerConfig(probe_interval_rounds=4, explore_budget_frac=0.5, think_budget_frac=0.9)
    calibration = calibrate(engine, config, key="tiny", budget_s=1.0)
    assert set(calibration.parts) == {POLICY, *NAMES} - {"history"}
    controller = controller_of(engine, config, engine.part_shapes(), calibration)
    priced = set[str]()

    def plan(load: RoundLoad) -> RoundPlan:
        made = controller.decide(load, now_s=time.monotonic())
        if load.sequences:
            priced.update(priced_options(controller))
        return made

    run = drive(engine, requests, Steering(plan=plan, observe=controller.observe), batch=6)
    assert texts(run.completions) == expected
    assert AR in priced


def test_auto_gives_sequences_of_one_round_different_drafters_and_the_text_stays() -> None:
    """As on a machine where moving this policy's weights is all that costs. It hears of no round, so its
    plans follow from loads alone: who has something to copy copies, and the others draft with loops."""
    policy = tiny_looped_policy(seed=3)
    requests = requests_for(vocab=48, prompts=10, params=PARAMS, seed=4, longest_prompt=20)
    expected = texts(run_engine(engine_of(policy), requests, ar_plan))
    engine = engine_of(policy)
    shapes = {
        name: replace(shape, weight_bytes=10_000 * shape.weight_bytes)
        for name, shape in engine.part_shapes().items()
    }
    config = ControllerConfig(prior_acceptance=0.6, prior_acceptance_copied=0.8)
    controller = controller_of(engine, config, shapes, nominal_calibration(shapes))
    together, priced = Counter[frozenset[str]](), set[str]()

    def plan(load: RoundLoad) -> RoundPlan:
        made = controller.decide(load, now_s=0.0)
        if load.sequences:
            priced.update(priced_options(controller))
        together[frozenset(a.drafter for a in made.assignments.values())] += 1
        return made

    run = drive(engine, requests, Steering(plan=plan), batch=6)
    assert texts(run.completions) == expected
    mixed = {names: count for names, count in together.items() if "history" in names and len(names) > 1}
    assert sum(mixed.values()) > 5, together
    assert run.accepted > 0
    assert priced >= {AR, *NAMES}, "all side by side"
    assert {"shallow_loop_1+history", "shallow_loop_2+history"} <= priced, "a model with copies is one option"


def priced_options(controller: Controller) -> list[str]:
    """Return the options the last plan was chosen from."""
    options = controller.decision_record()["alternatives"]
    assert all(option["predicted_s"] > 0 and option["speed_per_s"] > 0 for option in options)
    return [option["label"] for option in options]


def controller_of(
    engine: NativeEngine,
    config: ControllerConfig,
    shapes: Mapping[str, PartShape],
    calibration: Calibration,
) -> Controller:
    controller = build_controller(config, engine.traits, shapes, calibration)
    for name in NAMES:
        controller.drafter_built(name, engine.policy_version)
    return controller
