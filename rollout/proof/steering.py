"""Runs requests through an engine under any plan, with a bound on how many are in it at once."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from controller.calibration import Calibration, PartFit
from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.types import PartShape, RoundFacts, RoundLoad, RoundPlan
from rollout.engine.protocol import Engine
from rollout.types import Completion, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Steering:
    """Who decides a run's rounds, and who hears what came of them."""

    plan: Callable[[RoundLoad], RoundPlan]
    observe: Callable[[RoundFacts], None] = lambda facts: None


@dataclass(kw_only=True, slots=True)
class Drive:
    """What a run did."""

    completions: dict[tuple[str, int], Completion]
    rounds: int = 0
    drafted_rounds: int = 0
    drafted: int = 0
    accepted: int = 0


def drive(engine: Engine, requests: Sequence[Request], steering: Steering, *, batch: int) -> Drive:
    """Run all requests to their end, at most ``batch`` in the engine at once."""
    waiting = list(reversed(requests))
    inside = 0
    out = Drive(completions={})
    while waiting or engine.busy:
        while waiting and inside < batch:
            engine.add(waiting.pop())
            inside += 1
        outcome = engine.run_round(steering.plan(engine.load()))
        steering.observe(outcome.facts)
        for completion in outcome.completions:
            out.completions[completion.prompt_uid, completion.sample_index] = completion
        inside -= len(outcome.completions)
        out.rounds += 1
        drafted = sum(o.gamma for o in outcome.facts.outcomes)
        out.drafted_rounds += drafted > 0
        out.drafted += drafted
        out.accepted += sum(o.accepted for o in outcome.facts.outcomes)
    return out


def controlled(engine: Engine, config: ControllerConfig) -> Steering:
    """Return a fresh controller's steering. Its prices are nominal: no plan may change a text."""
    shapes = engine.part_shapes()
    controller = build_controller(config, engine.traits, shapes, nominal_calibration(shapes))
    for drafter in engine.traits.drafters:
        controller.drafter_built(drafter.name, engine.policy_version)
    return Steering(
        plan=lambda load: controller.decide(load, now_s=time.monotonic()), observe=controller.observe
    )


def nominal_calibration(shapes: Mapping[str, PartShape]) -> Calibration:
    """Return round numbers of a small machine, under which speculation pays at small batches."""
    fit = PartFit(
        bandwidth_bytes_per_s=2e10,
        flops_per_s=1e11,
        context_factor=1.0,
        overhead_s=1e-4,
        overhead_s_per_row=1e-5,
        samples=1,
        mape_frac=0.0,
        worst_frac=0.0,
    )
    return Calibration(key="nominal", parts=dict.fromkeys(shapes, fit))
