"""What is kept of a run's rounds: totals by batch and by choice, and acceptance. Pure.

A run of a thousand rounds is reduced right after it ended, outside the time measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

from controller.types import AR, PassSeconds, RoundFacts
from rollout.bench.pairing import WorkKey
from rollout.tracking.reduce import AcceptanceCounts

_Key = TypeVar("_Key")

PREFILL = "prefill"
"""The choice of rounds with prompt rows."""

CONTEXT_STEP_TOKENS = 16
"""Plain rounds count as the same work when their mean contexts lie in the same step: within it, keys and
values read differ by less than 2% of a forward's bytes."""


@dataclass(kw_only=True, slots=True)
class Totals:
    """Sums over rounds of one kind."""

    rounds: int = 0
    seconds: float = 0.0
    committed: int = 0
    context_tokens: int = 0
    """Context read by all rows of the policy."""

    rows: int = 0
    """Rows of the policy's forwards."""

    sequences: int = 0
    """Decode sequences, each counted in every round it took part in."""

    decoded: int = 0
    """Tokens they committed; a prompt's first token is not among them."""

    drafted: int = 0
    draft_passes: int = 0
    draft_rows: int = 0
    sequence_passes: int = 0
    """Draft passes, each counted once for every decode sequence of its round."""

    forward_s: float = 0.0
    """What forwards of the policy and of drafters computed, within ``seconds``; of those that do not tell it,
    what their calls took."""

    def add(self, facts: RoundFacts) -> None:
        """Count one round."""
        passes = sum(d.passes for d in facts.drafts)
        forwards = (facts.policy_pass, facts.draft_pass)
        self.rounds += 1
        self.seconds += facts.total_s
        self.committed += facts.committed
        self.context_tokens += facts.context_tokens
        self.rows += facts.verify_rows
        self.sequences += facts.batch
        self.decoded += facts.decoded
        self.drafted += sum(o.gamma for o in facts.outcomes)
        self.draft_passes += passes
        self.draft_rows += sum(d.rows for d in facts.drafts)
        self.sequence_passes += passes * facts.batch
        self.forward_s += sum(_computing_s(f) for f in forwards if f is not None)

    def merge(self, other: "Totals") -> None:
        """Add another kind's sums to these."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(kw_only=True, slots=True)
class RoundSummary:
    """The rounds of one run, or of several of the same arm."""

    plain_by_batch: dict[int, Totals] = field(default_factory=dict)
    """Rounds of plain decoding without prompt rows."""

    plain_by_work: dict[WorkKey, Totals] = field(default_factory=dict)
    by_choice: dict[str, Totals] = field(default_factory=dict)
    """By drafters and longest gamma of a round: ``prefill``, ``ar``, ``w4/4``, ``history+w4/5``."""

    acceptance: dict[str, AcceptanceCounts] = field(default_factory=dict)
    """By drafter."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    rounds_s: float = 0.0
    """Of all rounds; the rest of the makespan is deciding and asking for loads."""

    draft_failures: int = 0

    @classmethod
    def of(cls, facts: Sequence[RoundFacts]) -> "RoundSummary":
        """Return the summary of one run."""
        summary = cls()
        for round_facts in facts:
            summary._add(round_facts)
        return summary

    @classmethod
    def merged(cls, summaries: Iterable["RoundSummary"]) -> "RoundSummary":
        """Return the sums over several runs."""
        out = cls()
        for one in summaries:
            _merge_totals(out.plain_by_batch, one.plain_by_batch)
            _merge_totals(out.plain_by_work, one.plain_by_work)
            _merge_totals(out.by_choice, one.by_choice)
            for name, counts in one.acceptance.items():
                _merge_acceptance(out.acceptance.setdefault(name, AcceptanceCounts()), counts)
            out.draft_s += one.draft_s
            out.verify_s += one.verify_s
            out.commit_s += one.commit_s
            out.rounds_s += one.rounds_s
            out.draft_failures += one.draft_failures
        return out

    def decoding(self) -> Totals:
        """Return the sums over all rounds without prompt rows."""
        out = Totals()
        for choice, totals in self.by_choice.items():
            if choice != PREFILL:
                out.merge(totals)
        return out

    def plain_work(self) -> dict[WorkKey, tuple[int, float]]:
        """Return rounds and seconds of plain decoding by what they had to do."""
        return {key: (t.rounds, t.seconds) for key, t in self.plain_by_work.items()}

    def _add(self, facts: RoundFacts) -> None:
        self.draft_s += facts.draft_s
        self.verify_s += facts.verify_s
        self.commit_s += facts.commit_s
        self.rounds_s += facts.total_s
        self.draft_failures += sum(d.failures for d in facts.drafts)
        choice = choice_of(facts)
        self.by_choice.setdefault(choice, Totals()).add(facts)
        if choice == AR:
            self.plain_by_batch.setdefault(facts.batch, Totals()).add(facts)
            step = facts.context_tokens // (facts.batch * CONTEXT_STEP_TOKENS)
            self.plain_by_work.setdefault((facts.batch, step), Totals()).add(facts)
        for outcome in facts.outcomes:
            if outcome.gamma:
                self.acceptance.setdefault(outcome.drafter, AcceptanceCounts()).add(outcome)


def _computing_s(forwards: PassSeconds) -> float:
    return forwards.forward_s if forwards.split is None else forwards.split.total_s


def choice_of(facts: RoundFacts) -> str:
    """Name what a round did: ``prefill`` with prompt rows, ``ar``, or its drafters and longest gamma."""
    if facts.prefill_rows or not facts.batch:
        return PREFILL
    drafters = sorted({o.drafter for o in facts.outcomes if o.drafter != AR})
    if not drafters:
        return AR
    return f"{'+'.join(drafters)}/{max(o.gamma for o in facts.outcomes)}"


def _merge_totals(mine: dict[_Key, Totals], other: Mapping[_Key, Totals]) -> None:
    for key, totals in other.items():
        mine.setdefault(key, Totals()).merge(totals)


def _merge_acceptance(mine: AcceptanceCounts, other: AcceptanceCounts) -> None:
    mine.drafts += other.drafts
    mine.drafted += other.drafted
    mine.accepted += other.accepted
    mine.decided_by_position.update(other.decided_by_position)
    mine.accepted_by_position.update(other.accepted_by_position)
