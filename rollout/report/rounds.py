"""Panels about rounds: what was decided, what was accepted, how long it took."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from controller.types import AR
from rollout.report.journal import Journal, Round
from rollout.report.panel import MAX_POINTS, Panel, counted, no_data, tints
from rollout.report.statistics import quantile, wilson
from rollout.report.svg import QUIET, Axis, Plot, axis_over, colour
from rollout.report.table import table
from rollout.tracking.reduce import AcceptanceCounts

ROUND_COLUMNS = (
    "drafters",
    "batch",
    "rounds",
    "draft ms",
    "verify ms",
    "commit ms",
    "round ms",
    "tokens / round",
    "tokens/s",
)


def acceptance_by_position(journal: Journal) -> Panel:
    """How often a draft survived up to each position, by drafter, with 95% Wilson intervals."""
    title = "Acceptance by position"
    counts = _counts_by_drafter(journal.rounds)
    if not counts:
        return no_data(title, "no round drafted a token.")
    longest = max(max(c.decided_by_position, default=0) for c in counts.values()) + 1
    plot = Plot(
        x=Axis(label="draft position", low=0.5, high=longest + 0.5, whole=True),
        y=Axis(label="accepted share", low=0, high=1),
    )
    for i, (name, found) in enumerate(sorted(counts.items())):
        tint, shift = tints(journal)[name], (i - (len(counts) - 1) / 2) * 0.08
        shares = [
            (p + 1, wilson(found.accepted_by_position[p], n))
            for p, n in sorted(found.decided_by_position.items())
        ]
        plot.name(f"{name} ({found.accepted} of {found.drafted} draft tokens)", tint)
        plot.line([(p + shift, s.value) for p, s in shares], tint)
        for p, s in shares:
            plot.whisker(p + shift, s.low, s.high, tint)
            plot.dot(p + shift, s.value, tint, title=f"{name}, position {p}: {s.hits} of {s.trials}")
    note = (
        "Share of verified blocks whose drafts were kept up to and including the position, over the blocks "
        "that drafted it; a block cut by a stop or a limit counts only up to the cut. 95% Wilson intervals. "
        "Long drafts go to sequences that are easy to guess, so a curve may rise."
    )
    return Panel(title=title, body=plot.svg(), note=note)


def decisions(journal: Journal) -> Panel:
    """Batch, gamma and drafters, round by round."""
    title = "Gamma, drafter and batch over time"
    rounds = [r for r in journal.rounds if r.outcomes]
    if not rounds:
        return no_data(title, "no round with decode sequences was recorded.")
    x = axis_over("round", [rounds[0].index, rounds[-1].index], whole=True)
    groups = _thin(rounds)
    batches = axis_over("sequences", [0, *(float(r.batch) for r in rounds)], headroom=True, whole=True)
    upper = Plot(x=x, y=batches, height=190)
    upper.line([(_middle(g), _mean(g, lambda r: r.batch)) for g in groups], colour(0))
    upper.name("batch", colour(0))
    gammas = [_mean(g, lambda r: r.gamma_mean) for g in groups]
    middle = Plot(x=x, y=axis_over("draft tokens", [0, 1, *gammas], headroom=True), height=190)
    middle.line([(_middle(g), gamma) for g, gamma in zip(groups, gammas, strict=True)], colour(4))
    middle.name("gamma, mean over the batch (0: AR)", colour(4))
    lower = Plot(x=x, y=Axis(label="share of batch", low=0, high=1), height=190)
    names = tints(journal)
    drafters = [name for name in names if name != AR]
    edges = [g[0].index for g in groups] + [rounds[-1].index + 1]
    lower.box(edges[0], edges[-1], 0, 1, names[AR], title="plain (AR)")
    for group, (start, end) in zip(groups, pairwise(edges), strict=True):
        total = sum(len(r.outcomes) for r in group)
        base = 0.0
        for name in drafters:
            share = sum(r.sequences_by_drafter.get(name, 0) for r in group) / total
            if share:
                lower.box(start, end, base, base + share, names[name], title=f"{name}: {share:.0%}")
            base += share
    for name, tint in names.items():
        lower.name("plain (AR)" if name == AR else name, tint)
    note = f"{counted(len(rounds), 'round')} with decode sequences"
    note += f", {len(groups[0])} to a point" if len(groups[0]) > 1 else ""
    hosts = len({r.host for r in rounds})
    note += f", of {hosts} hosts in the order they were told" if hosts > 1 else ""
    body = upper.svg() + middle.svg() + lower.svg()
    return Panel(title=title, body=body, note=f"{note}. Reasons given: {_reasons(rounds)}.")


def _reasons(rounds: Sequence[Round]) -> str:
    """Name the commonest reasons; those that differ in their numbers only are one."""
    counts = Counter(re.sub(r"(?<!\w)[-+]?\d+(\.\d+)?", "N", r.reason) for r in rounds)
    return "; ".join(f"{name} ({n / len(rounds):.0%})" for name, n in counts.most_common(5))


def predicted_against_measured(journal: Journal) -> Panel:
    """The cost model's round times beside the real ones."""
    title = "Predicted against measured round time"
    rounds = [r for r in journal.rounds if r.predicted_s > 0 and r.total_s > 0]
    if not rounds:
        return no_data(title, "no round had a prediction.")
    shown = rounds[:: max(1, len(rounds) // MAX_POINTS)]
    times_ms = [1000 * t for r in shown for t in (r.predicted_s, r.total_s)]
    axis = axis_over("", times_ms, scale="log")
    plot = Plot(
        x=Axis(label="predicted, ms", low=axis.low, high=axis.high, scale="log"),
        y=Axis(label="measured, ms", low=axis.low, high=axis.high, scale="log"),
    )
    tint = {False: colour(0), True: colour(4)}
    plot.line([(axis.low, axis.low), (axis.high, axis.high)], QUIET, dashed=True)
    for r in shown:
        drafted = any(o.gamma for o in r.outcomes)
        where = f"round {r.index}, batch {r.batch}, gamma {r.gamma_mean:.1f}"
        plot.dot(1000 * r.predicted_s, 1000 * r.total_s, tint[drafted], title=where, radius=2.2)
    for drafted in sorted({any(o.gamma for o in r.outcomes) for r in shown}):
        plot.name("SD round" if drafted else "AR round", tint[drafted])
    plot.name("as predicted", QUIET)
    ratios = [r.total_s / r.predicted_s for r in rounds]
    low, middle, high = (quantile(ratios, f) for f in (0.1, 0.5, 0.9))
    note = (
        f"Measured over predicted: median {middle:.2f}, 10% under {low:.2f}, 10% over {high:.2f}, "
        f"in {counted(len(rounds), 'round')}."
    )
    return Panel(title=title, body=plot.svg(), note=note)


def round_parts(journal: Journal) -> Panel:
    """What rounds spent on drafting, verifying and committing, by batch."""
    title = "Round time by batch"
    rounds = [r for r in journal.rounds if r.outcomes]
    if not rounds:
        return no_data(title, "no round with decode sequences was recorded.")
    groups: dict[tuple[str, int], list[Round]] = {}
    for r in rounds:
        drafters = sorted(set(r.sequences_by_drafter) - {AR})
        groups.setdefault(("+".join(drafters) or "AR", (r.batch - 1).bit_length()), []).append(r)
    order = sorted(groups, key=lambda key: (key[0] != "AR", key))
    rows = [_round_row(mode, power, groups[mode, power]) for mode, power in order]
    note = (
        "Times are medians, tokens a mean and tokens/s a quotient of sums; rounds that also computed prompt "
        "rows are included. A round that drafts for some sequences and not for others counts by its drafters."
    )
    return Panel(title=title, body=table(ROUND_COLUMNS, rows), note=note, wide=True)


def _counts_by_drafter(rounds: Sequence[Round]) -> dict[str, AcceptanceCounts]:
    counts: dict[str, AcceptanceCounts] = {}
    for r in rounds:
        for outcome in r.outcomes:
            if outcome.gamma:
                counts.setdefault(outcome.drafter, AcceptanceCounts()).add(outcome)
    return counts


def _thin(rounds: Sequence[Round]) -> list[Sequence[Round]]:
    size = max(1, -(-len(rounds) // MAX_POINTS))
    return [rounds[i : i + size] for i in range(0, len(rounds), size)]


def _middle(group: Sequence[Round]) -> float:
    return (group[0].index + group[-1].index) / 2


def _mean(group: Sequence[Round], value: Callable[[Round], float]) -> float:
    return sum(map(value, group)) / len(group)


def _round_row(mode: str, power: int, rounds: Sequence[Round]) -> list[str]:
    def median_ms(value: Callable[[Round], float]) -> str:
        return f"{1000 * quantile([value(r) for r in rounds], 0.5):.2f}"

    low, high = 2**power // 2 + 1, 2**power
    tokens = sum(o.committed for r in rounds for o in r.outcomes)
    return [
        mode,
        str(high) if low >= high else f"{low}-{high}",
        str(len(rounds)),
        median_ms(lambda r: r.draft_s),
        median_ms(lambda r: r.verify_s),
        median_ms(lambda r: r.commit_s),
        median_ms(lambda r: r.total_s),
        f"{tokens / len(rounds):.2f}",
        f"{tokens / max(1e-9, sum(r.total_s for r in rounds)):.0f}",
    ]
