"""The panel that says where rounds spend their time: by who drafted, and how many sequences decoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from controller.types import AR
from rollout.report.journal import Journal, Round
from rollout.report.panel import Panel, counted, no_data
from rollout.report.svg import QUIET, colour
from rollout.report.table import Drawing, table
from rollout.tracking.time_parts import CHOICE, DRAFTING, FORWARD, OTHER, drafting_parts, time_parts

LABELS: Mapping[str, str] = {
    "linears": "linears",
    "attention": "attention",
    "head": "head",
    "norms": "norms, rotation, KV writes",
    FORWARD: "forward, not split",
    CHOICE: "token choice",
    OTHER: "Python and other",
}
"""In the order of a bar. Of the policy and of drafters alike."""

TINTS: Mapping[str, str] = {
    "linears": colour(0),
    "attention": colour(1),
    "head": colour(2),
    "norms": colour(3),
    FORWARD: colour(0),
    CHOICE: colour(4),
    OTHER: QUIET,
}

PALE = 0.5
"""Opacity of what drafters do: the same colours, so that both shares of a kind of work are seen together."""

PLAIN = "none (AR)"
PROMPTS = ", prompts"
"""Of rounds that also computed prompt rows."""

COLUMNS = ("drafters", "batch", "rounds", "of all time", "round ms", "of it")

MOST_ROWS = 24
"""Groups shown; beyond them those that took least are left out, and counted."""

BAR_WIDTH, BAR_HEIGHT = 400, 14


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Rounds of a like batch with the same drafters at work."""

    drafters: str
    batch: str
    rounds: Sequence[Round]
    policy_s: Mapping[str, float]
    drafting_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.policy_s.values()) + sum(self.drafting_s.values())

    def share(self, part: str) -> float:
        """Of the group's time, by the policy and its drafters together."""
        return (self.policy_s.get(part, 0.0) + self.drafting_s.get(part, 0.0)) / self.total_s


def time_split(journal: Journal) -> Panel:
    """Shares of a round's time by what was done, for every mix of drafters and every batch."""
    title = "Where a round's time goes"
    rounds = [r for r in journal.rounds if r.policy_pass is not None and r.total_s > 0]
    if not rounds:
        return no_data(title, "no round told what its time went on.")
    groups = _groups(rounds)
    whole_s = sum(g.total_s for g in groups)
    largest = sorted(groups, key=lambda g: -g.total_s)[:MOST_ROWS]
    shown = [g for g in groups if g in largest]
    parts = [part for part in LABELS if any(g.share(part) > 0 for g in groups)]
    columns = (*COLUMNS, *(LABELS[part] for part in parts), "by drafters")
    body = _legend(parts) + table(columns, [_row(group, parts, whole_s=whole_s) for group in shown])
    return Panel(title=title, body=body, note=_note(groups, left_out=len(groups) - len(shown)), wide=True)


def _groups(rounds: Sequence[Round]) -> list[_Group]:
    """Return the groups: plain rounds first, then by drafters, each by batch."""
    found: dict[tuple[bool, str, int], list[Round]] = {}
    for r in rounds:
        names = sorted(set(r.sequences_by_drafter) - {AR})
        kind = (" + ".join(names) or PLAIN) + (PROMPTS if r.prefill_rows else "")
        found.setdefault((bool(names), kind, r.batch and 1 << (r.batch - 1).bit_length()), []).append(r)
    return [_group(kind, largest, some) for (_, kind, largest), some in sorted(found.items())]


def _group(drafters: str, largest: int, rounds: Sequence[Round]) -> _Group:
    """``largest``: the batch up to which the group counts, a power of two, or 0."""
    policy_s: dict[str, float] = {}
    drafting_s: dict[str, float] = {}
    for r in rounds:
        parts = time_parts(r)
        spent_s = parts.pop(DRAFTING)
        if any(o.gamma for o in r.outcomes):
            _add(drafting_s, drafting_parts(r))
        else:
            parts[OTHER] += spent_s  # nobody drafted: what passed until then was Python's
        _add(policy_s, parts)
    low = largest // 2 + 1
    batch = str(largest) if low >= largest else f"{low}-{largest}"
    return _Group(drafters=drafters, batch=batch, rounds=rounds, policy_s=policy_s, drafting_s=drafting_s)


def _add(sums: dict[str, float], parts: Mapping[str, float]) -> None:
    for part, seconds in parts.items():
        # A clock's grain can make what is left over a hair negative; a share cannot be.
        sums[part] = sums.get(part, 0.0) + max(0.0, seconds)


def _row(group: _Group, parts: Sequence[str], *, whole_s: float) -> list[object]:
    return [
        group.drafters,
        group.batch,
        str(len(group.rounds)),
        f"{group.total_s / whole_s:.1%}",
        f"{1000 * group.total_s / len(group.rounds):.2f}",
        _bar(group, parts),
        *(f"{group.share(part):.1%}" for part in parts),
        f"{sum(group.drafting_s.values()) / group.total_s:.1%}",
    ]


def _bar(group: _Group, parts: Sequence[str]) -> Drawing:
    """Return a round as a bar: the policy's parts, then those of drafting."""
    boxes, at = [], 0.0
    for seconds, opacity, whose in ((group.policy_s, 1.0, ""), (group.drafting_s, PALE, "drafts: ")):
        for part in parts:
            width = BAR_WIDTH * seconds.get(part, 0.0) / group.total_s
            if not width:
                continue
            mean_ms = 1000 * seconds[part] / len(group.rounds)
            what = f"{group.drafters}, batch {group.batch}: {whose}{LABELS[part]} {width / BAR_WIDTH:.1%}, "
            boxes.append(
                f'<rect x="{at:.1f}" y="0" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{TINTS[part]}" '
                f'fill-opacity="{opacity}"><title>{escape(what)}{mean_ms:.2f} ms</title></rect>'
            )
            at += width
    return Drawing(
        f'<svg class="bar" viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" preserveAspectRatio="none" role="img">'
        f"{''.join(boxes)}</svg>"
    )


def _legend(parts: Sequence[str]) -> str:
    keys = "".join(
        f'<span class="key"><span style="background:{TINTS[part]}"></span>{escape(LABELS[part])}</span>'
        for part in parts
    )
    return f'<div class="legend">{keys}<span class="key">pale: what drafters did, lanes among it</span></div>'


def _note(groups: Sequence[_Group], *, left_out: int) -> str:
    rounds = sum(len(g.rounds) for g in groups)
    total_s = sum(g.total_s for g in groups)
    choices = sum(g.share(CHOICE) * g.total_s for g in groups) / total_s
    note = (
        f"{counted(rounds, 'round')}, {total_s:.1f} s; batch is how many sequences decoded. Shares are of "
        f"the mean round, the policy's and the drafters' together; token choice is {choices:.1%} of all. By "
        "drafters: all of a round until its drafts are there; verification of drafts is the policy's. "
    )
    if left_out:
        note += f"{counted(left_out, 'group')} that took least not shown. "
    if any(FORWARD in {*g.policy_s, *g.drafting_s} for g in groups):
        note += "Not split: the torch decoder does not say what its forward spends its time on. "
    return note + (
        "Inside a forward the times are those of its first thread, waits for the others included; deciding "
        "and the host's own work between rounds are no part of a round."
    )
