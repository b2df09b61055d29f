"""Panels about drafters and the policy they come from: do drafts stay as good while it is trained?"""

from collections.abc import Iterable

from rollout.report.journal import Journal, Round
from rollout.report.panel import Panel, no_data, tints
from rollout.report.statistics import Share, wilson
from rollout.report.svg import Axis, Plot, axis_over, colour
from rollout.tracking.reduce import AcceptanceCounts

LOOP_OVERLAP = "trainer/loop_overlap_"
"""What a trainer charts of a looped policy's depths, followed by the depth."""

SHARES = Axis(label="accepted share", low=0, high=1)


def first_drafts(journal: Journal) -> Panel:
    """How often the first draft of a block was kept, by policy version and drafter."""
    title = "First drafts kept over trainer steps"
    kept = _first_by_drafter(journal.rounds)
    if not kept:
        return no_data(title, "no round drafted a token.")
    versions = [version for shares in kept.values() for version in shares]
    plot = Plot(x=axis_over("policy version", versions, whole=True), y=SHARES)
    for name, shares in sorted(kept.items()):
        tint = tints(journal)[name]
        plot.line([(version, share.value) for version, share in shares.items()], tint)
        for version, share in shares.items():
            plot.whisker(version, share.low, share.high, tint, opacity=0.3)
            what = f"{name}, version {version}: {share.hits} of {share.trials}"
            plot.dot(version, share.value, tint, title=what)
        hits, trials = (sum(getattr(s, field) for s in shares.values()) for field in ("hits", "trials"))
        plot.name(f"{name} ({hits} of {trials})", tint)
    note = (
        "Share of blocks whose first draft was kept, over those where verification judged it. Unlike the "
        "share of all draft tokens it does not move with how far the controller drafts. 95% Wilson intervals."
    )
    return Panel(title=title, body=plot.svg(), note=note)


def loop_overlap(journal: Journal) -> Panel:
    """How much of the looped policy's law each shallower depth shares, by trainer step."""
    title = "Agreement of loops over trainer steps"
    found = {step: v for step, v in sorted(journal.step_metrics.items()) if _depths(v)}
    if not found:
        return no_data(title, "no trainer step compared the loops of a looped policy.")
    plot = Plot(
        x=axis_over("trainer step", list(found), whole=True),
        y=Axis(label="sum of min(p, q)", low=0, high=1),
    )
    notes = []
    for i, depth in enumerate(sorted({d for values in found.values() for d in _depths(values)})):
        name = f"{LOOP_OVERLAP}{depth}"
        points = [(step, values[name]) for step, values in found.items() if name in values]
        plot.line(points, colour(i))
        for step, value in points:
            plot.dot(step, value, colour(i), title=f"step {step}: depth {depth}, {value:.3f}")
        plot.name(f"after {depth} loop{'s' if depth > 1 else ''}", colour(i))
        ends = [sum(v for _, v in part) / len(part) for part in _quarters(points)]
        notes.append(f"depth {depth}: {ends[0]:.3f} -> {ends[1]:.3f}")
    note = (
        "Mean over tokens the policy sampled of what its law after a depth shares with its law after all "
        "loops: what rejection sampling accepts of a first draft, whoever is drafted for. "
        f"First to last quarter of the steps: {'; '.join(notes)}."
    )
    return Panel(title=title, body=plot.svg(), note=note)


def _first_by_drafter(rounds: Iterable[Round]) -> dict[str, dict[int, Share]]:
    """Return by drafter and policy version how many of the first drafts that were judged were kept."""
    counts: dict[tuple[str, int], AcceptanceCounts] = {}
    for r in rounds:
        for outcome in r.outcomes:
            if outcome.gamma:
                place = (outcome.drafter, r.policy_version)
                counts.setdefault(place, AcceptanceCounts()).add(outcome)
    shares: dict[str, dict[int, Share]] = {}
    for (name, version), c in sorted(counts.items()):
        if c.decided_by_position[0]:
            share = wilson(c.accepted_by_position[0], c.decided_by_position[0])
            shares.setdefault(name, {})[version] = share
    return shares


def _depths(values: Iterable[str]) -> list[int]:
    return [int(n.removeprefix(LOOP_OVERLAP)) for n in values if n.startswith(LOOP_OVERLAP)]


def _quarters(points: list[tuple[int, float]]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return the first and the last quarter, one point at least."""
    size = max(1, len(points) // 4)
    return points[:size], points[-size:]
