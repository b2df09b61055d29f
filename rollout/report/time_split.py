"""The panel that says where rounds spend their time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.report.journal import Journal, Round
from rollout.report.panel import Panel, counted, no_data
from rollout.report.svg import QUIET, Axis, Plot, colour
from rollout.tracking.time_parts import CHOICE, DRAFTING, FORWARD, OTHER, PARTS, time_parts

LABELS: Mapping[str, str] = {
    "linears": "linears",
    "attention": "attention",
    "head": "head",
    "norms": "norms, rotation, KV writes",
    FORWARD: "forward, not split",
    CHOICE: "token choice",
    DRAFTING: "drafting",
    OTHER: "Python and other",
}

TINTS: Mapping[str, str] = {
    "linears": colour(0),
    "attention": colour(1),
    "head": colour(2),
    "norms": colour(3),
    FORWARD: colour(0),
    CHOICE: colour(4),
    DRAFTING: colour(6),
    OTHER: QUIET,
}

BAR = {False: (0.76, 0.98), True: (1.02, 1.32)}
"""From where to where the bar of plain and of drafting rounds reaches, in multiples of the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Rounds of a like batch that did the same kind of thing."""

    drafting: bool
    largest_batch: int
    rounds: Sequence[Round]
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def time_split(journal: Journal) -> Panel:
    """Shares of a round's time by what was done, by batch, plain rounds beside drafting ones."""
    title = "Where a round's time goes"
    rounds = [r for r in journal.rounds if r.outcomes and r.policy_pass is not None]
    if not rounds:
        return no_data(title, "no round told what its time went on.")
    groups = _groups([r for r in rounds if not r.prefill_rows])
    if not groups:
        return no_data(title, "every round also computed prompt rows.")
    largest = max(g.largest_batch for g in groups)
    plot = Plot(
        x=Axis(
            label="batch: plain rounds left, drafting ones right",
            low=0.7,
            high=1.4 * largest,
            scale="log",
            marks=tuple(sorted({float(g.largest_batch) for g in groups})),
        ),
        y=Axis(label="share of the time", low=0, high=1),
    )
    for group in groups:
        _bar(plot, group)
    for part in PARTS:
        if any(part in g.seconds for g in groups):
            plot.name(LABELS[part], TINTS[part])
    return Panel(title=title, body=plot.svg(), note=_note(groups))


def _groups(rounds: Sequence[Round]) -> list[_Group]:
    found: dict[tuple[bool, int], list[Round]] = {}
    for r in rounds:
        found.setdefault((any(o.gamma for o in r.outcomes), (r.batch - 1).bit_length()), []).append(r)
    groups = []
    for (drafting, power), some in sorted(found.items()):
        seconds: dict[str, float] = {}
        for parts in map(time_parts, some):
            for part, spent_s in parts.items():
                seconds[part] = seconds.get(part, 0.0) + spent_s
        groups.append(_Group(drafting=drafting, largest_batch=2**power, rounds=some, seconds=seconds))
    return groups


def _bar(plot: Plot, group: _Group) -> None:
    start, end = (group.largest_batch * times for times in BAR[group.drafting])
    kind = "drafting" if group.drafting else "plain"
    base = 0.0
    for part in PARTS:
        # A clock's grain can make what is left over a hair negative; a bar cannot be.
        share = max(0.0, group.seconds.get(part, 0.0)) / group.total_s
        if share:
            mean_ms = 1000 * group.seconds[part] / len(group.rounds)
            what = f"{kind}, batch to {group.largest_batch}: {LABELS[part]} {share:.1%}, {mean_ms:.2f} ms"
            plot.box(start, end, base, base + share, TINTS[part], title=what)
        base += share


def _note(groups: Sequence[_Group]) -> str:
    rounds = [r for g in groups for r in g.rounds]
    total_s = sum(g.total_s for g in groups)
    choices_s = sum(g.seconds[CHOICE] for g in groups)
    choices_s += sum(r.draft_pass.choose_s for r in rounds if r.draft_pass is not None)
    note = (
        f"{counted(len(rounds), 'round')} without prompt rows; a bar stands at the largest batch it counts. "
        f"Token choice, that of drafts included: {choices_s / total_s:.1%} of the time. Drafting holds the "
        "drafters' own forwards and choices. "
    )
    if any(FORWARD in g.seconds for g in groups):
        note += "Not split: the torch decoder does not say what its forward spends its time on. "
    return note + "Inside a forward the times are those of its first thread, waits for the others included."
