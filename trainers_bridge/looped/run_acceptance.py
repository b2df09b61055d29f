"""How a run's drafts fared, drafter by drafter: over its trainer steps, and over the policy's versions.

Steps are what the trainer counted, and a resumed run's count once. Versions are what hosts' rounds say, so
they also hold rounds of steps that a resumed run did again. Counts, not rates: a reader pools them as needed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rollout.report.journal import Journal, Round
from rollout.tracking.reduce import AcceptanceCounts

COUNTS = ("drafted", "accepted", "first_decided", "first_kept")
"""Draft tokens offered and kept; first tokens of a block that were judged, and those of them kept. Only the
latter does not move with how far the controller drafts."""


def acceptance(journal: Journal) -> dict[str, dict[str, dict[str, list[int]]]]:
    """Return ``by_step`` and ``by_policy_version``: by drafter, columns of whole numbers of one length.

    A step or version in which a drafter offered nothing is not in its columns.
    """
    return {"by_step": by_step(journal.steps), "by_policy_version": by_policy_version(journal.rounds)}


def by_step(steps: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Return by drafter what the trainer's steps counted; each step with the version it sampled from."""
    columns: dict[str, dict[str, list[int]]] = {}
    for line in sorted(steps, key=lambda step: step["step"]):
        for name, tally in sorted(line["by_drafter"].items()):
            row = {"step": line["step"], "policy_version": line["policy_version"]}
            _append(columns.setdefault(name, {}), row | {count: tally[count] for count in COUNTS})
    return columns


def by_policy_version(rounds: Iterable[Round]) -> dict[str, dict[str, list[int]]]:
    """Return by drafter what verification said under each version of the policy."""
    found: dict[tuple[str, int], AcceptanceCounts] = {}
    for each in rounds:
        for outcome in each.outcomes:
            if outcome.gamma:
                key = (outcome.drafter, each.policy_version)
                found.setdefault(key, AcceptanceCounts()).add(outcome)
    columns: dict[str, dict[str, list[int]]] = {}
    for (name, version), counts in sorted(found.items()):
        row = {
            "policy_version": version,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "first_decided": counts.decided_by_position[0],
            "first_kept": counts.accepted_by_position[0],
        }
        _append(columns.setdefault(name, {}), row)
    return columns


def _append(columns: dict[str, list[int]], row: Mapping[str, int]) -> None:
    for name, value in row.items():
        columns.setdefault(name, []).append(value)
