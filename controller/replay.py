"""Runs a log through a controller again: same settings, same decisions; other settings, what they would say.

``python -m controller.replay LOG [--kind KIND]`` prints a summary and exits with 1 when a replay under the
log's own settings decides otherwise than the log says.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from controller.calibration import Calibration
from controller.config import KINDS, ControllerConfig
from controller.decide import Controller, build_controller
from controller.log import Record, facts_from_dict, load_from_dict, plan_from_dict, traits_from_dict
from controller.types import PartShape, RoundFacts, RoundLoad, RoundPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """One decision, as logged and as made again."""

    load: RoundLoad
    logged: RoundPlan
    replayed: RoundPlan
    facts: RoundFacts | None
    """What the round did under the logged plan; None when the log ends before it."""

    @property
    def same(self) -> bool:
        """Whether both plans are equal in every field."""
        return self.logged == self.replayed


def controller_of(record: Record, *, config: ControllerConfig | None = None) -> Controller:
    """Return a fresh controller from a log's first line, with its own config unless another is given."""
    if record.get("event") != "controller":
        raise ValueError(f"a log starts with event controller, found {record.get('event')!r}")
    calibration = record["calibration"]
    return build_controller(
        config if config is not None else ControllerConfig(**record["config"]),
        traits_from_dict(record["traits"]),
        {name: PartShape(**shape) for name, shape in record["shapes"].items()},
        Calibration.from_json(calibration) if calibration is not None else None,
    )


def replay(records: Iterable[Record], *, config: ControllerConfig | None = None) -> list[Replayed]:
    """Return every decision of a log, made again in order.

    With another ``config`` the loads and facts stay the log's own: it answers what would have been decided
    in the same situations, not how the rollout would have gone. Raises ``ValueError`` on an unknown event.
    """
    stream = iter(records)
    try:
        controller = controller_of(next(stream), config=config)
    except StopIteration:
        raise ValueError("the log is empty") from None
    out: list[Replayed] = []
    for record in stream:
        event = record.get("event")
        if event == "decision":
            load = load_from_dict(record["load"])
            plan = controller.decide(load, now_s=record["now_s"])
            logged = plan_from_dict(record["plan"])
            out.append(Replayed(load=load, logged=logged, replayed=plan, facts=None))
        elif event == "facts":
            facts = facts_from_dict(record["facts"])
            controller.observe(facts)
            if out and out[-1].load.round_index == facts.round_index:
                out[-1] = replace(out[-1], facts=facts)
        elif event == "controller":
            controller = controller_of(record, config=config)
        elif event == "policy_changed":
            controller.policy_changed(record["version"])
        elif event == "drafter_built":
            controller.drafter_built(record["drafter"], record["version"])
        else:
            raise ValueError(f"unknown event {event!r} in a control log")
    return out


def read_log(path: Path) -> Iterator[Record]:
    """Yield the records of a JSON-lines log."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    record: Record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
                yield record


def summary(decisions: list[Replayed]) -> list[str]:
    """Return lines for people: what was chosen, what changed, how well rounds were predicted."""
    if not decisions:
        return ["no decisions"]
    choices = Counter(_choice(d.replayed) for d in decisions)
    differ = [d for d in decisions if not d.same]
    lines = [f"{len(decisions)} decisions, {len(differ)} differ from the log"]
    lines += [f"  {count:7d}  {choice}" for choice, count in choices.most_common()]
    if differ:
        first = differ[0]
        lines.append(
            f"first difference in round {first.load.round_index}: "
            f"logged {_choice(first.logged)!r} ({first.logged.reason}), "
            f"now {_choice(first.replayed)!r} ({first.replayed.reason})"
        )
    errors = sorted(
        abs(d.logged.predicted_s / d.facts.total_s - 1.0)
        for d in decisions
        if d.facts is not None and d.facts.total_s > 0 and d.logged.predicted_s > 0
    )
    if errors:
        lines.append(f"predicted round time: median error {errors[len(errors) // 2]:.1%}")
    return lines


def _choice(plan: RoundPlan) -> str:
    kinds = sorted({(a.drafter, a.gamma) for a in plan.assignments.values()})
    name = ", ".join(f"{drafter} gamma {gamma}" for drafter, gamma in kinds) or "ar"
    return f"{name} (probe)" if plan.probe else name


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="controller.replay", description="Decide a control log again.")
    parser.add_argument("log", type=Path)
    parser.add_argument("--kind", choices=KINDS, help="decide as another controller would have")
    options = parser.parse_args(arguments)
    records = list(read_log(options.log))
    config = None
    if options.kind is not None and records:
        config = replace(ControllerConfig(**records[0]["config"]), kind=options.kind)
    decisions = replay(records, config=config)
    sys.stdout.write("\n".join(summary(decisions)) + "\n")
    return int(config is None and any(not d.same for d in decisions))


if __name__ == "__main__":
    raise SystemExit(main())
