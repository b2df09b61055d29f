"""Panels about drafters and the policy they come from: do drafts stay as good while it is trained?"""

from collections.abc import Callable, Iterable, Mapping

from rollout.report.journal import Journal, Round
from rollout.report.panel import Panel, no_data, tints
from rollout.report.statistics import Share, wilson, wilson_of_blocks
from rollout.report.stretches import ENOUGH_TRIALS, Blocks, Stretch, quarters, stretches
from rollout.report.svg import QUIET, Axis, Plot, axis_over, colour
from rollout.tracking.reduce import AcceptanceCounts

LOOP_OVERLAP = "trainer/loop_overlap_"
"""What a trainer charts of a looped policy's depths, followed by the depth."""

SHARES = Axis(label="accepted share", low=0, high=1)


POOLED = (
    f"A point of a drafter that was used little takes versions together until it has {ENOUGH_TRIALS} draft "
    "tokens."
)


def acceptance_over_steps(journal: Journal) -> Panel:
    """Acceptance rate by policy version, each rebuilt drafter marked."""
    title = "Acceptance over trainer steps"
    found = _blocks(journal.rounds)
    if not found:
        return no_data(title, "no round drafted a token.")
    plot = Plot(x=_versions(journal), y=SHARES)
    rebuilds = [e for e in journal.events if e.get("event") == "weight_update"]
    for event in rebuilds:
        plot.notch(event["version"], QUIET, title=f"drafters rebuilt from version {event['version']}")
    _draw(plot, journal, found, share_of=lambda stretch: wilson_of_blocks(stretch.blocks))
    plot.name(f"weight update, drafters rebuilt ({len(rebuilds)})", QUIET)
    note = (
        f"Accepted over drafted tokens, by policy version. {POOLED} 95% Wilson intervals from the scatter of "
        "verified blocks: draft tokens of one block are kept or lost together. Blocks of one sequence are "
        "taken as independent."
    )
    return Panel(title=title, body=plot.svg() + quarters(found), note=note)


def first_drafts(journal: Journal) -> Panel:
    """How often the first draft of a block was kept, by policy version and drafter."""
    title = "First drafts kept over trainer steps"
    found = _first_drafts(journal.rounds)
    if not found:
        return no_data(title, "no round drafted a token.")
    plot = Plot(x=_versions(journal), y=SHARES)
    _draw(plot, journal, found, share_of=lambda stretch: wilson(stretch.kept, stretch.tried))
    note = (
        "Share of blocks whose first draft was kept, over those where verification judged it. Unlike the "
        f"share of all draft tokens it does not move with how far the controller drafts. {POOLED} 95% Wilson "
        "intervals."
    )
    return Panel(title=title, body=plot.svg() + quarters(found), note=note)


def _versions(journal: Journal) -> Axis:
    return axis_over("policy version", [r.policy_version for r in journal.rounds], whole=True)


def _draw(
    plot: Plot, journal: Journal, found: Mapping[str, Blocks], *, share_of: Callable[[Stretch], Share]
) -> None:
    """Draw a curve per drafter, with the interval of every point; those at one version stand side by side."""
    step = 0.01 * max(1.0, plot.x.high - plot.x.low)
    for i, (name, by_version) in enumerate(sorted(found.items())):
        tint, shift = tints(journal)[name], (i - (len(found) - 1) / 2) * step
        points = []
        for stretch in stretches(by_version):
            share, x = share_of(stretch), stretch.middle + shift
            points.append((x, share.value))
            plot.whisker(x, share.low, share.high, tint, opacity=0.3)
            plot.dot(x, share.value, tint, title=f"{name}, {stretch.name}: {share.hits} of {share.trials}")
        plot.line(points, tint)
        plot.name(name, tint)


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


def _blocks(rounds: Iterable[Round]) -> dict[str, dict[int, list[tuple[int, int]]]]:
    """Return by drafter and policy version the accepted and drafted tokens of every verified block."""
    blocks: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for r in rounds:
        for o in r.outcomes:
            if o.gamma:
                by_version = blocks.setdefault(o.drafter, {})
                by_version.setdefault(r.policy_version, []).append((o.accepted, o.gamma))
    return blocks


def _first_drafts(rounds: Iterable[Round]) -> dict[str, dict[int, list[tuple[int, int]]]]:
    """Return by drafter and policy version how many of the first drafts that were judged were kept."""
    counts: dict[tuple[str, int], AcceptanceCounts] = {}
    for r in rounds:
        for outcome in r.outcomes:
            if outcome.gamma:
                place = (outcome.drafter, r.policy_version)
                counts.setdefault(place, AcceptanceCounts()).add(outcome)
    found: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for (name, version), c in sorted(counts.items()):
        if c.decided_by_position[0]:
            judged = (c.accepted_by_position[0], c.decided_by_position[0])
            found.setdefault(name, {})[version] = [judged]
    return found


def _depths(values: Iterable[str]) -> list[int]:
    return [int(n.removeprefix(LOOP_OVERLAP)) for n in values if n.startswith(LOOP_OVERLAP)]


def _quarters(points: list[tuple[int, float]]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return the first and the last quarter, one point at least."""
    size = max(1, len(points) // 4)
    return points[:size], points[-size:]
