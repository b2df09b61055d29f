"""Panels about trainer steps, their rollouts and weight updates."""

from collections.abc import Sequence
from typing import Any

from rollout.report.journal import Journal
from rollout.report.panel import Panel, counted, no_data
from rollout.report.statistics import quantile
from rollout.report.svg import QUIET, Axis, Plot, axis_over, colour

TAIL_FRAC = 0.25
"""The tail begins when at most this share of a step's samples still runs."""

STEP_PARTS = (
    ("generate_s", "rollouts"),
    ("weight_sync_s", "weight pushes"),
    ("mismatch_s", "mismatch check"),
    ("optimize_s", "trainer"),
)


def reward_curve(journal: Journal) -> Panel:
    """Reward per trainer step, and what the summary made of it."""
    title = "Reward"
    if not journal.steps:
        return no_data(title, "no trainer step was recorded.")
    points = [(s["step"], s["reward"]) for s in journal.steps]
    plot = Plot(
        x=axis_over("trainer step", [p[0] for p in points], whole=True),
        y=axis_over("mean reward", [p[1] for p in points], zero=True, headroom=True),
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


def wall_clock(journal: Journal) -> Panel:
    """Where each trainer step's time went."""
    title = "Wall-clock split"
    if not journal.steps:
        return no_data(title, "no trainer step was recorded.")
    highest = max(sum(s[name] for name, _ in STEP_PARTS) for s in journal.steps)
    indices = [s["step"] for s in journal.steps]
    plot = Plot(
        x=Axis(label="trainer step", low=min(indices) - 0.6, high=max(indices) + 0.6, whole=True),
        y=axis_over("seconds", [0.0, highest], headroom=True),
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
    return Panel(
        title=title, body=plot.svg(), note=f"{counted(len(journal.steps), 'step')}, {whole:.1f} s in all."
    )


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
        x=Axis(label="new tokens", low=0, high=(max(bins) + 1) * width, whole=True),
        y=axis_over("completions", [0, *map(float, bins.values())], headroom=True, whole=True),
    )
    for b, count in bins.items():
        plot.box(b * width, (b + 0.92) * width, 0, count, colour(0), title=f"from {b * width}: {count}")
    at_limit = sum(c["finish_reason"] == "length" for c in journal.completions) / len(tokens)
    note = (
        f"{counted(len(tokens), 'completion')}: median {quantile(tokens, 0.5):.0f}, 90% within "
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
    running_at_tail, tail_s = _tail(ends_s)
    height = min(900, 110 + 11 * len(shown))
    plot = Plot(
        x=axis_over("seconds since submitted", [0.0, ends_s[-1]]),
        y=Axis(label="samples, by end", low=0, high=len(shown), whole=True),
        height=height,
    )
    plot.box(tail_s, ends_s[-1], 0, len(shown), "rgba(200,98,43,0.13)", title="tail")
    for row, c in enumerate(shown):
        at_s = 0.0
        for part, tint in (("queued_s", QUIET), ("prefill_s", colour(2)), ("decode_s", colour(0))):
            what = f"{c['prompt_uid']}/{c['sample_index']}: {part[:-2]} {c[part]:.2f} s, {c['tokens']} tokens"
            plot.box(at_s, at_s + c[part], row + 0.12, row + 0.88, tint, title=what)
            at_s += c[part]
    for part, tint in (("queued", QUIET), ("prefill", colour(2)), ("decode", colour(0))):
        plot.name(part, tint)
    plot.name("tail", "rgba(200,98,43,0.4)")
    tail_frac = 1 - tail_s / ends_s[-1] if ends_s[-1] > 0 else 0.0
    note = (
        f"Rollout step {step}, the longest of the run: {len(shown)} samples in {ends_s[-1]:.2f} s. The tail, "
        f"with {running_at_tail} samples or fewer left, is {tail_frac:.0%} of it."
    )
    return Panel(title=title, body=plot.svg(), note=note)


def makespan_by_step(journal: Journal) -> Panel:
    """How long every step's rollouts took, and how much of it was tail."""
    title = "Makespan by rollout step"
    ends_by_step: dict[int, list[float]] = {}
    for c in journal.completions:
        if "decode_s" in c:
            ends_by_step.setdefault(c["rollout_step"], []).append(_end_s(c))
    if not ends_by_step:
        return no_data(title, "no completion with timings was recorded.")
    steps = sorted(ends_by_step)
    plot = Plot(
        x=Axis(label="rollout step", low=steps[0] - 0.6, high=steps[-1] + 0.6, whole=True),
        y=axis_over("seconds", [0.0, *(max(e) for e in ends_by_step.values())], headroom=True),
    )
    spans_s, tail_fracs = [], []
    for step in steps:
        ends_s = sorted(ends_by_step[step])
        tail_s, span_s = _tail(ends_s)[1], ends_s[-1]
        spans_s.append(span_s)
        tail_fracs.append(1 - tail_s / span_s if span_s > 0 else 0.0)
        what = f"step {step}: {span_s:.2f} s, tail {tail_fracs[-1]:.0%}"
        plot.box(step - 0.42, step + 0.42, 0, tail_s, colour(0), title=what)
        plot.box(step - 0.42, step + 0.42, tail_s, span_s, colour(1), title=what)
    plot.name("until the tail", colour(0))
    plot.name(f"tail: at most {TAIL_FRAC:.0%} of the samples still running", colour(1))
    note = (
        f"{counted(len(steps), 'step')}: median {quantile(spans_s, 0.5):.2f} s from submission to the last "
        f"sample's end; the tail takes {quantile(tail_fracs, 0.5):.0%} of a median step."
    )
    return Panel(title=title, body=plot.svg(), note=note)


def updates(journal: Journal) -> Panel:
    """How long weight updates took, and the drafters' share of it."""
    title = "Weight updates and drafter builds"
    found = [e for e in journal.events if e.get("event") == "weight_update"]
    if not found:
        return no_data(title, "no weight update was recorded.")
    plot = Plot(
        x=axis_over("policy version", [e["version"] for e in found], whole=True),
        y=axis_over("seconds", [e["update_s"] for e in found], zero=True, headroom=True),
    )
    notes = []
    for i, (name, label) in enumerate((("update_s", "whole update"), ("drafter_build_s", "drafters built"))):
        points = [(e["version"], e[name]) for e in found if e.get(name) is not None]
        if not points:
            notes.append("no host told its drafters' build time")
            continue
        plot.line(points, colour(i))
        for version, seconds in points:
            plot.dot(version, seconds, colour(i), title=f"version {version}: {label}, {seconds:.3f} s")
        plot.name(label, colour(i))
        notes.append(f"{label}: median {quantile([p[1] for p in points], 0.5):.3f} s")
    return Panel(title=title, body=plot.svg(), note=f"{'; '.join(notes)}; {counted(len(found), 'update')}.")


MISMATCH = "trainer/mismatch_"
ABS_MEAN, ABS_MAX, KL = MISMATCH + "logprob_abs_mean", MISMATCH + "logprob_abs_max", MISMATCH + "kl"


def mismatch(journal: Journal) -> Panel:
    """How far the trainer's logprobs of sampled tokens are from the rollouts'."""
    title = "Train/rollout mismatch"
    found = {step: v for step, v in sorted(journal.step_metrics.items()) if ABS_MEAN in v}
    if not found:
        return no_data(title, "no trainer step compared its logprobs with the rollouts'.")
    shown = [v[name] for v in found.values() for name in (ABS_MEAN, ABS_MAX) if v.get(name, 0) > 0]
    plot = Plot(
        x=axis_over("trainer step", list(found), whole=True),
        y=axis_over("nats per token", shown or [1e-6, 1.0], scale="log"),
    )
    for i, (name, label) in enumerate(((ABS_MEAN, "mean"), (ABS_MAX, "largest"))):
        points = [(step, v[name]) for step, v in found.items() if v.get(name, 0) > 0]
        plot.line(points, colour(i))
        for step, value in points:
            plot.dot(step, value, colour(i), title=f"step {step}: {label} {value:.2e}")
        plot.name(f"{label} difference of logprobs", colour(i))
    divergences = [v[KL] for v in found.values() if KL in v]
    tokens = sum(v.get(MISMATCH + "tokens", 0) for v in found.values())
    note = f"Absolute differences between trainer and rollout, {tokens:.0f} tokens compared"
    note += f"; KL estimate: median {quantile(divergences, 0.5):.1e} nats per token." if divergences else "."
    return Panel(title=title, body=plot.svg(), note=note)


def _tail(ends_s: Sequence[float]) -> tuple[int, float]:
    """Return how many of the samples, sorted by end, run in the tail, and when it begins."""
    running = max(1, int(len(ends_s) * TAIL_FRAC))
    return running, ends_s[-running - 1] if len(ends_s) > running else 0.0


def _end_s(completion: Any) -> float:
    return float(completion["queued_s"] + completion["prefill_s"] + completion["decode_s"])


def _span_s(completions: Sequence[Any]) -> float:
    return max(map(_end_s, completions))
