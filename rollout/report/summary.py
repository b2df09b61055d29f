"""A run in one row: what its headline says and what several runs are compared by."""

from collections.abc import Mapping
from typing import Any

from rollout.report.journal import Journal


def summary_row(journal: Journal) -> dict[str, str]:
    """Return named facts, the same names for every run; what a run does not know is a dash."""
    tokens = sum(int(c["tokens"]) for c in journal.completions)
    # Completions also hold what a resumed run does again; a step stands there once.
    step_tokens, generate_s = (sum(s[name] for s in journal.steps) for name in ("tokens", "generate_s"))
    drafted = sum(o.gamma for r in journal.rounds for o in r.outcomes)
    accepted = sum(o.accepted for r in journal.rounds for o in r.outcomes)
    return {
        "state": "ended" if journal.ended else "not ended",
        "policy": _policy(journal.settings),
        "controller": str(journal.settings.get("controller", {}).get("kind", "-")),
        "drafters": ", ".join(journal.settings.get("drafter", {}).get("names", ())) or "-",
        "hosts": str(journal.settings.get("service", {}).get("hosts", "-")),
        "processor": processor_of((journal.summary or {}).get("conditions", {})),
        "trainer steps": str(len(journal.steps)),
        "rounds": str(len(journal.rounds)),
        "completions": str(len(journal.completions)),
        "new tokens": str(tokens),
        "tokens/s while generating": f"{step_tokens / generate_s:.0f}" if generate_s > 0 else "-",
        "draft tokens accepted": f"{accepted} of {drafted} ({accepted / drafted:.0%})"
        if drafted
        else "none drafted",
        "reward, first -> last quarter": _reward(journal.summary or {}),
    }


def processor_of(conditions: Mapping[str, Any]) -> str:
    """Return in words the processor that a result's conditions name; older ones know its name alone."""
    machine = conditions.get("machine", {})
    return str(machine.get("processor", machine.get("cpu", "-")))


def _policy(settings: Mapping[str, Any]) -> str:
    policy = settings.get("policy", {})
    return str(policy.get("source", "-")) + (" off-grid" if policy.get("offgrid") else "")


def _reward(summary: Mapping[str, Any]) -> str:
    reward = summary.get("reward", {})
    if "first_quarter" not in reward or "last_quarter" not in reward:
        return "-"
    return f"{reward['first_quarter']['mean']:.2f} -> {reward['last_quarter']['mean']:.2f}"
