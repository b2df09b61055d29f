"""The panels of a report: each reads one journal and returns a drawing, or says why there is none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from controller.types import AR
from rollout.report.journal import Journal, Round
from rollout.report.statistics import quantile, wilson
from rollout.report.svg import Axis, Plot, axis_over, colour
from rollout.tracking.reduce import AcceptanceCounts

MAX_POINTS = 400
"""Points a curve is thinned to: more than a screen can show, and the page stays small."""

TAIL_FRAC = 0.25
"""The tail begins when at most this share of a step's samples still runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One picture with its title and what it shows."""

    title: str
    body: str
    """HTML."""

    note: str
    empty: bool = False
    """True when the run holds nothing for it; ``note`` says what is missing."""


def no_data(title: str, missing: str) -> Panel:
    """Return the panel that says what is missing."""
    return Panel(title=title, body="", note=f"No data: {missing}", empty=True)


def acceptance_by_position(journal: Journal) -> Panel:
    """How often a draft survived up to each position, by drafter, with 95% Wilson intervals."""
    title = "Acceptance by position"
    counts = _counts_by_drafter(journal.rounds)
    if not counts:
        return no_data(title, "no round drafted a token.")
    longest = max(max(c.decided_by_position, default=0) for c in counts.values()) + 1
    plot = Plot(
        x=Axis(label="draft position", low=0.5, high=longest + 0.5),
        y=Axis(label="accepted share", low=0, high=1),
    )
    for i, (name, found) in enumerate(sorted(counts.items())):
        tint, shift = colour(i), (i - (len(counts) - 1) / 2) * 0.08
        shares = [
            (p + 1, wilson(found.accepted_by_position[p], n))
            for p, n in sorted(found.decided_by_position.items())
        ]
        plot.name(f"{name} ({found.accepted} of {found.drafted} drafts)", tint)
        plot.line([(p + shift, s.value) for p, s in shares], tint)
        for p, s in shares:
            plot.whisker(p + shift, s.low, s.high, tint)
            plot.dot(p + shift, s.value, tint, title=f"{name}, position {p}: {s.hits} of {s.trials}")
    note = (
        "Share of verified blocks whose drafts were kept up to and including the position, over the blocks "
        "that drafted it; a block cut by a stop or a limit counts only up to the cut."
    )
    return Panel(title=title, body=plot.svg(), note=note)


def acceptance_over_steps(journal: Journal) -> Panel:
    """Acceptance rate by policy version, each rebuilt drafter marked."""
    title = "Acceptance over trainer steps"
    versions = sorted({r.policy_version for r in journal.rounds})
    by_version = {
        v: _counts_by_drafter([r for r in journal.rounds if r.policy_version == v]) for v in versions
    }
    if not any(by_version.values()):
        return no_data(title, "no round drafted a token.")
    plot = Plot(
        x=axis_over("policy version (trainer step of its rollouts)", versions),
        y=Axis(label="accepted share", low=0, high=1),
    )
    rebuilds = [e for e in journal.events if e.get("event") == "weight_update"]
    for event in rebuilds:
        plot.upright(event["version"], "#9aa1ab", title=f"drafters rebuilt from version {event['version']}")
    names = sorted({name for found in by_version.values() for name in found})
    for i, name in enumerate(names):
        points = []
        for version in versions:
            found = by_version[version].get(name)
            if found is None:
                continue
            share = wilson(found.accepted, found.drafted)
            points.append((version, share.value))
            plot.whisker(version, share.low, share.high, colour(i))
            plot.dot(version, share.value, colour(i), title=f"{name}, version {version}: {share.value:.3f}")
        plot.line(points, colour(i))
        plot.name(name, colour(i))
    plot.name(f"weight update, drafters rebuilt ({len(rebuilds)})", "#9aa1ab")
    note = "Accepted over drafted tokens, pooled per version, 95% Wilson intervals."
    return Panel(title=title, body=plot.svg(), note=note)


def decisions(journal: Journal) -> Panel:
    """Batch, gamma and drafters, round by round."""
    title = "Gamma, drafter and batch over time"
    rounds = [r for r in journal.rounds if r.outcomes]
    if not rounds:
        return no_data(title, "no round with decode sequences was recorded.")
    x = axis_over("round", [rounds[0].index, rounds[-1].index])
    groups = _thin(rounds)
    upper = Plot(x=x, y=axis_over("sequences", [0, *(float(r.batch) for r in rounds)]), height=190)
    upper.line([(_middle(g), _mean(g, lambda r: r.batch)) for g in groups], colour(0))
    upper.name("batch", colour(0))
    middle = Plot(x=x, y=axis_over("gamma", [0, 1, *(r.gamma_mean for r in rounds)]), height=190)
    middle.line([(_middle(g), _mean(g, lambda r: r.gamma_mean)) for g in groups], colour(1))
    middle.name("gamma, mean over the batch (0: AR)", colour(1))
    lower = Plot(x=x, y=Axis(label="share of batch", low=0, high=1), height=190)
    names = [AR, *sorted({n for r in rounds for n in r.sequences_by_drafter} - {AR})]
    tints = {name: "#c9ced6" if name == AR else colour(i) for i, name in enumerate(names)}
    edges = [g[0].index for g in groups] + [rounds[-1].index + 1]
    for group, (start, end) in zip(groups, pairwise(edges), strict=True):
        total = sum(len(r.outcomes) for r in group)
        base = 0.0
        for name in names:
            share = sum(r.sequences_by_drafter.get(name, 0) for r in group) / total
            if share:
                lower.box(start, end, base, base + share, tints[name], title=f"{name}: {share:.0%}")
            base += share
    for name in names:
        lower.name("plain (AR)" if name == AR else name, tints[name])
    reasons: dict[str, int] = {}
    for r in rounds:
        reasons[r.reason] = reasons.get(r.reason, 0) + 1
    top = sorted(reasons.items(), key=lambda item: -item[1])[:5]
    note = "Reasons given most often: " + "; ".join(f"{name} ({n})" for name, n in top) + "."
    return Panel(title=title, body=upper.svg() + middle.svg() + lower.svg(), note=note)


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
    plot.line([(axis.low, axis.low), (axis.high, axis.high)], "#9aa1ab", dashed=True)
    for r in shown:
        drafted = any(o.gamma for o in r.outcomes)
        where = f"round {r.index}, batch {r.batch}, gamma {r.gamma_mean:.1f}"
        plot.dot(1000 * r.predicted_s, 1000 * r.total_s, colour(int(drafted)), title=where, radius=2.2)
    plot.name("AR round", colour(0))
    plot.name("SD round", colour(1))
    ratios = [r.total_s / r.predicted_s for r in rounds]
    low, middle, high = (quantile(ratios, f) for f in (0.1, 0.5, 0.9))
    note = (
        f"Measured over predicted: median {middle:.2f}, 10% under {low:.2f}, 10% over {high:.2f}, "
        f"in {len(rounds)} rounds."
    )
    return Panel(title=title, body=plot.svg(), note=note)


def lengths(journal: Journal) -> Panel:
    """How long completions were."""
    title = "Lengths"
    tokens = [int(c["tokens"]) for c in journal.completions]
    if not tokens:
        return no_data(title, "no completion was recorded.")
    width = max(1, -(-max(tokens) // 24))
    bins: dict[int, int] = {}
    for n in tokens:
        bins[n // width] = bins.get(n // width, 0) + 1
    plot = Plot(
        x=Axis(label="new tokens", low=0, high=(max(bins) + 1) * width),
        y=axis_over("completions", [0, *map(float, bins.values())]),
    )
    for b, count in bins.items():
        plot.box(b * width, (b + 0.92) * width, 0, count, colour(0), title=f"from {b * width}: {count}")
    at_limit = sum(c["finish_reason"] == "length" for c in journal.completions) / len(tokens)
    note = (
        f"{len(tokens)} completions: median {quantile(tokens, 0.5):.0f}, 90% within "
        f"{quantile(tokens, 0.9):.0f}, longest {max(tokens)}; {at_limit:.0%} ended by a limit."
    )
    return Panel(title=title, body=plot.svg(), note=note)


def makespan(journal: Journal) -> Panel:
    """Who ran when in one rollout step, with the tail marked."""
    title = "Makespan and tail of one rollout step"
    timed = [c for c in journal.completions if "decode_s" in c]
    if not timed:
        return no_data(title, "no completion with timings was recorded.")
    step = max(
        {c["rollout_step"] for c in timed},
        key=lambda s: _span_s([c for c in timed if c["rollout_step"] == s]),
    )
    shown = sorted((c for c in timed if c["rollout_step"] == step), key=_end_s)
    ends_s = [_end_s(c) for c in shown]
    running_at_tail = max(1, int(len(shown) * TAIL_FRAC))
    tail_s = ends_s[-running_at_tail - 1] if len(shown) > running_at_tail else 0.0
    height = min(900, 110 + 11 * len(shown))
    plot = Plot(
        x=axis_over("seconds since asked for", [0.0, ends_s[-1]]),
        y=Axis(label="sample", low=0, high=len(shown)),
        height=height,
    )
    plot.box(tail_s, ends_s[-1], 0, len(shown), "rgba(200,98,43,0.13)", title="tail")
    for row, c in enumerate(shown):
        at_s = 0.0
        for part, tint in (("queued_s", "#c9ced6"), ("prefill_s", colour(2)), ("decode_s", colour(0))):
            what = f"{c['prompt_uid']}/{c['sample_index']}: {part[:-2]} {c[part]:.2f} s, {c['tokens']} tokens"
            plot.box(at_s, at_s + c[part], row + 0.12, row + 0.88, tint, title=what)
            at_s += c[part]
    for part, tint in (("queued", "#c9ced6"), ("prefill", colour(2)), ("decode", colour(0))):
        plot.name(part, tint)
    plot.name("tail", "rgba(200,98,43,0.4)")
    tail_frac = 1 - tail_s / ends_s[-1] if ends_s[-1] > 0 else 0.0
    note = (
        f"Rollout step {step}, the longest of the run: {len(shown)} samples in {ends_s[-1]:.2f} s. The tail, "
        f"with {running_at_tail} samples or fewer left, is {tail_frac:.0%} of it."
    )
    return Panel(title=title, body=plot.svg(), note=note)


def reward_curve(journal: Journal) -> Panel:
    """Reward per trainer step, and what the summary made of it."""
    title = "Reward"
    if not journal.steps:
        return no_data(title, "no trainer step was recorded.")
    points = [(s["step"], s["reward"]) for s in journal.steps]
    plot = Plot(
        x=axis_over("trainer step", [p[0] for p in points]),
        y=axis_over("mean reward", [p[1] for p in points], zero=True),
    )
    plot.line(points, colour(0))
    for step, reward in points:
        plot.dot(step, reward, colour(0), title=f"step {step}: {reward:.3f}")
    verdict = (journal.summary or {}).get("reward", {})
    if verdict.get("improved") is None:
        return Panel(title=title, body=plot.svg(), note=verdict.get("reason", "The run has no summary yet."))
    for name, tint in (("first_quarter", colour(1)), ("last_quarter", colour(2))):
        found = verdict[name]
        ends = points[: found["steps"]] if name == "first_quarter" else points[-found["steps"] :]
        plot.line([(ends[0][0], found["mean"]), (ends[-1][0], found["mean"])], tint, dashed=True)
        plot.whisker(
            (ends[0][0] + ends[-1][0]) / 2,
            found["mean"] - found["standard_error"],
            found["mean"] + found["standard_error"],
            tint,
        )
        plot.name(f"{name.replace('_', ' ')}: {found['mean']:.3f} +- {found['standard_error']:.3f}", tint)
    rose = "rose" if verdict["improved"] else "did not rise"
    note = (
        f"By the measure of {verdict['needed_standard_errors']:g} standard errors the reward {rose}: "
        f"{verdict['difference']:+.3f} +- {verdict['difference_standard_error']:.3f}."
    )
    return Panel(title=title, body=plot.svg(), note=note)


STEP_PARTS = (
    ("generate_s", "rollouts"),
    ("weight_sync_s", "weight pushes"),
    ("mismatch_s", "rollout against trainer check"),
    ("optimize_s", "trainer"),
)


def wall_clock(journal: Journal) -> Panel:
    """Where each trainer step's time went."""
    title = "Wall-clock split"
    if not journal.steps:
        return no_data(title, "no trainer step was recorded.")
    highest = max(sum(s[name] for name, _ in STEP_PARTS) for s in journal.steps)
    indices = [s["step"] for s in journal.steps]
    plot = Plot(
        x=Axis(label="trainer step", low=min(indices) - 0.6, high=max(indices) + 0.6),
        y=axis_over("seconds", [0.0, highest]),
    )
    totals = dict.fromkeys((label for _, label in STEP_PARTS), 0.0)
    for s in journal.steps:
        base = 0.0
        for i, (name, label) in enumerate(STEP_PARTS):
            plot.box(
                s["step"] - 0.42,
                s["step"] + 0.42,
                base,
                base + s[name],
                colour(i),
                title=f"{label} {s[name]:.2f} s",
            )
            base += s[name]
            totals[label] += s[name]
    whole = sum(totals.values()) or 1.0
    for i, (label, seconds) in enumerate(totals.items()):
        plot.name(f"{label}: {seconds:.1f} s ({seconds / whole:.0%})", colour(i))
    return Panel(title=title, body=plot.svg(), note=f"{len(journal.steps)} steps, {whole:.1f} s in all.")


def round_parts(journal: Journal) -> Panel:
    """What rounds spent on drafting, verifying and committing, by batch."""
    title = "Round time by batch"
    rounds = [r for r in journal.rounds if r.outcomes]
    if not rounds:
        return no_data(title, "no round with decode sequences was recorded.")
    rows = []
    for drafted in (False, True):
        for batch in sorted({r.batch for r in rounds}):
            same = [r for r in rounds if r.batch == batch and any(o.gamma for o in r.outcomes) == drafted]
            if same:
                rows.append(_round_row("SD" if drafted else "AR", batch, same))
    head = "".join(
        f"<th>{h}</th>"
        for h in ("mode", "batch", "rounds", "draft ms", "verify ms", "commit ms", "round ms", "tokens/round")
    )
    note = "Medians; rounds that also computed prompt rows are included."
    return Panel(title=title, body=f"<table><tr>{head}</tr>{''.join(rows)}</table>", note=note)


PANELS: tuple[Callable[[Journal], Panel], ...] = (
    reward_curve,
    wall_clock,
    acceptance_by_position,
    acceptance_over_steps,
    decisions,
    predicted_against_measured,
    lengths,
    makespan,
    round_parts,
)
"""In the order of the page."""


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


def _end_s(completion: Any) -> float:
    return float(completion["queued_s"] + completion["prefill_s"] + completion["decode_s"])


def _span_s(completions: Sequence[Any]) -> float:
    return max(map(_end_s, completions))


def _round_row(mode: str, batch: int, rounds: Sequence[Round]) -> str:
    def median_ms(value: Callable[[Round], float]) -> str:
        return f"{1000 * quantile([value(r) for r in rounds], 0.5):.2f}"

    tokens = sum(o.committed for r in rounds for o in r.outcomes) / len(rounds)
    cells = [
        mode,
        str(batch),
        str(len(rounds)),
        median_ms(lambda r: r.draft_s),
        median_ms(lambda r: r.verify_s),
        median_ms(lambda r: r.commit_s),
        median_ms(lambda r: r.total_s),
        f"{tokens:.2f}",
    ]
    return "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>"
