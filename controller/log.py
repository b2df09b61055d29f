"""Control records as plain JSON data and back, exactly: a log replays a controller.

A log is JSON lines, one event each, named by ``event``:

    controller      config, traits, shapes, calibration: all a replay is built from. The first line; a later
                    one starts a fresh controller, as a resumed run does
    decision        load, now_s and the plan; ``alternatives`` and ``state`` are for people
    facts           what the round did
    policy_changed  version
    drafter_built   drafter, version
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from controller.calibration import Calibration
from controller.config import ControllerConfig
from controller.types import (
    Assignment,
    DraftCost,
    DrafterTraits,
    EngineTraits,
    ForwardSeconds,
    PartShape,
    PassSeconds,
    RoundFacts,
    RoundLoad,
    RoundPlan,
    SequenceLoad,
    SequenceOutcome,
)

Record = dict[str, Any]


def load_to_dict(load: RoundLoad) -> Record:
    """Return a load as plain data."""
    # By hand, not asdict: this runs every round, and asdict copies every scalar.
    return {
        "round_index": load.round_index,
        "policy_version": load.policy_version,
        "prefill_tokens": load.prefill_tokens,
        "waiting": load.waiting,
        "sequences": [
            {
                "key": s.key,
                "context_tokens": s.context_tokens,
                "generated_tokens": s.generated_tokens,
                "remaining_tokens": s.remaining_tokens,
                "history_match_tokens": dict(s.history_match_tokens),
            }
            for s in load.sequences
        ],
    }


def load_from_dict(data: Mapping[str, Any]) -> RoundLoad:
    """Return the load ``load_to_dict`` wrote."""
    sequences = tuple(SequenceLoad(**s) for s in data["sequences"])
    return RoundLoad(**{**data, "sequences": sequences})


def plan_to_dict(plan: RoundPlan) -> Record:
    """Return a plan as plain data; sequences are grouped by what they do."""
    groups: dict[Assignment, list[int]] = {}
    for key, assignment in plan.assignments.items():
        groups.setdefault(assignment, []).append(key)
    return {
        "assignments": [{"drafter": a.drafter, "gamma": a.gamma, "keys": keys} for a, keys in groups.items()],
        "reason": plan.reason,
        "predicted_s": plan.predicted_s,
        "predicted_tokens": plan.predicted_tokens,
        "probe": plan.probe,
    }


def plan_from_dict(data: Mapping[str, Any]) -> RoundPlan:
    """Return the plan ``plan_to_dict`` wrote."""
    assignments = {
        key: Assignment(drafter=group["drafter"], gamma=group["gamma"])
        for group in data["assignments"]
        for key in group["keys"]
    }
    return RoundPlan(**{**data, "assignments": assignments})


def facts_to_dict(facts: RoundFacts) -> Record:
    """Return a round's facts as plain data."""
    outcomes = [outcome._asdict() for outcome in facts.outcomes]
    return {**asdict(replace(facts, outcomes=())), "outcomes": outcomes}


def facts_from_dict(data: Mapping[str, Any]) -> RoundFacts:
    """Return the facts ``facts_to_dict`` wrote."""
    return RoundFacts(
        **{
            **data,
            "drafts": tuple(DraftCost(**d) for d in data["drafts"]),
            "outcomes": tuple(SequenceOutcome(**o) for o in data["outcomes"]),
            "policy_pass": pass_from_dict(data.get("policy_pass")),
            "draft_pass": pass_from_dict(data.get("draft_pass")),
        }
    )


def pass_from_dict(data: Mapping[str, Any] | None) -> PassSeconds | None:
    """Return the pass from its ``asdict``; None for None, and where an older log has none."""
    if data is None:
        return None
    split = data["split"]
    return PassSeconds(**{**data, "split": None if split is None else ForwardSeconds(**split)})


def traits_from_dict(data: Mapping[str, Any]) -> EngineTraits:
    """Return traits from their ``asdict``."""
    return EngineTraits(
        **{
            **data,
            "verify_modes": tuple(data["verify_modes"]),
            "in_flight": tuple(data["in_flight"]),
            "drafters": tuple(DrafterTraits(**d) for d in data["drafters"]),
        }
    )


def controller_record(
    config: ControllerConfig,
    traits: EngineTraits,
    shapes: Mapping[str, PartShape],
    calibration: Calibration | None,
) -> Record:
    """Return the first line of a log: everything a controller is built from."""
    return {
        "event": "controller",
        "config": asdict(config),
        "traits": asdict(traits),
        "shapes": {name: asdict(shape) for name, shape in shapes.items()},
        "calibration": calibration.to_json() if calibration is not None else None,
    }


def decision_record(load: RoundLoad, plan: RoundPlan, *, now_s: float) -> Record:
    """Return the line of a decision, without the alternatives only its controller knows."""
    return {"event": "decision", "now_s": now_s, "load": load_to_dict(load), "plan": plan_to_dict(plan)}


def facts_record(facts: RoundFacts) -> Record:
    """Return the line of a round that was run."""
    return {"event": "facts", "facts": facts_to_dict(facts)}


def policy_changed_record(version: int) -> Record:
    """Return the line of a weight update."""
    return {"event": "policy_changed", "version": version}


def drafter_built_record(drafter: str, version: int) -> Record:
    """Return the line of a drafter rebuild."""
    return {"event": "drafter_built", "drafter": drafter, "version": version}
