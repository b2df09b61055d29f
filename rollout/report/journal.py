"""One run's journal, read once: rounds, completions, steps and events as the panels want them.

Kinds and fields are those of ``rollout.tracking.recorder`` and of the trainer bridge's ``steps``. A kind the
run never wrote is an empty list; a line that lacks a field the panels read is an error that names it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from controller.log import pass_from_dict
from controller.types import AR, PassSeconds, SequenceOutcome
from rollout.errors import RolloutError
from rollout.run_folder import CONFIG_FILE
from rollout.tracking.jsonl import METRICS, read_jsonl
from rollout.tracking.recorder import COMPLETIONS, EVENTS, ROUNDS

STEPS = "steps"
SUMMARY_FILE = "summary.json"


class JournalError(RolloutError):
    """A run's files cannot be read as a journal; the message names the file and the line's fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round, with what was decided and what came of it."""

    index: int
    host: str
    policy_version: int
    batch: int
    prefill_rows: int
    predicted_s: float
    total_s: float
    draft_s: float
    verify_s: float
    commit_s: float
    reason: str
    outcomes: tuple[SequenceOutcome, ...]
    policy_pass: PassSeconds | None = None
    """None where the engine did not say, and in journals from before it did."""

    draft_pass: PassSeconds | None = None

    @property
    def gamma_mean(self) -> float:
        """Draft tokens per decode sequence; 0 for an AR round."""
        return sum(o.gamma for o in self.outcomes) / max(1, len(self.outcomes))

    @property
    def sequences_by_drafter(self) -> dict[str, int]:
        """How many sequences each drafter drafted for; ``ar`` counts the plain ones."""
        counts: dict[str, int] = {}
        for outcome in self.outcomes:
            name = outcome.drafter if outcome.gamma else AR
            counts[name] = counts.get(name, 0) + 1
        return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """What one run wrote."""

    folder: Path
    rounds: tuple[Round, ...]
    completions: tuple[Mapping[str, Any], ...]
    steps: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]
    step_metrics: Mapping[int, Mapping[str, float]]
    """What was charted at each trainer step."""

    summary: Mapping[str, Any] | None
    settings: Mapping[str, Any]
    """As the run was started with; empty when its folder has none."""

    @property
    def ended(self) -> bool:
        """Whether the run came to its end; else it still goes on or was interrupted."""
        return any(e.get("event") == "run_ended" for e in self.events)


def read_journal(folder: Path) -> Journal:
    """Return the run in ``folder``. Raises ``JournalError`` when its files are not a journal."""
    if not folder.is_dir():
        raise JournalError(f"{folder}: no such run folder")
    summary, settings = folder / SUMMARY_FILE, folder / CONFIG_FILE
    return Journal(
        folder=folder,
        rounds=tuple(_rounds(folder)),
        completions=tuple(_lines(folder, COMPLETIONS)),
        # A step after the checkpoint a run was resumed from stands there twice; the later one counts.
        steps=tuple({line["step"]: line for line in _lines(folder, STEPS)}.values()),
        events=tuple(_lines(folder, EVENTS)),
        step_metrics={
            line["at"]: line["values"] for line in _lines(folder, METRICS) if line["clock"] == "trainer/step"
        },
        summary=_whole(summary, json.loads),
        settings=_whole(settings, yaml.safe_load) or {},
    )


def _whole(file: Path, read: Callable[[str], Any]) -> Any:
    """Return what is in a file that is one value; None where there is none."""
    try:
        return read(file.read_text()) if file.exists() else None
    except (ValueError, yaml.YAMLError) as error:
        raise JournalError(f"{file}: {' '.join(str(error).split())}") from error


def _lines(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    try:
        yield from read_jsonl(folder, kind)
    except ValueError as error:
        raise JournalError(f"{folder / kind}.jsonl: {error}") from error


def _rounds(folder: Path) -> Iterator[Round]:
    for line in _lines(folder, ROUNDS):
        try:
            yield _round(line)
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(f"{folder / ROUNDS}.jsonl: round {line.get('round')}: {error!r}") from error


def _round(line: Mapping[str, Any]) -> Round:
    facts, plan = line["facts"], line["plan"]
    columns = facts["outcomes"]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return Round(
        index=line["round"],
        host=line["host"],
        policy_version=facts["policy_version"],
        batch=facts["batch"],
        prefill_rows=facts["prefill_rows"],
        predicted_s=plan["predicted_s"],
        total_s=facts["total_s"],
        draft_s=facts["draft_s"],
        verify_s=facts["verify_s"],
        commit_s=facts["commit_s"],
        reason=plan["reason"],
        outcomes=tuple(SequenceOutcome(**row) for row in rows),
        policy_pass=pass_from_dict(facts.get("policy_pass")),
        draft_pass=pass_from_dict(facts.get("draft_pass")),
    )
