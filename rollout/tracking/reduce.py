"""Turns rounds and completions into the numbers of one rollout step. Pure: no clock, no files.

Rates are pooled: sums of accepted over sums of drafted, never means of per-request ratios, so a short
request does not count like a long one. Names are those trainers already chart.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controller.types import AR, RoundFacts, RoundPlan, SequenceOutcome
from rollout.tracking.time_parts import time_parts
from rollout.types import Completion


@dataclass(kw_only=True, slots=True)
class AcceptanceCounts:
    """What verification said about draft tokens."""

    drafts: int = 0
    """Verified blocks: one per sequence and round with draft tokens."""

    drafted: int = 0
    accepted: int = 0
    decided_by_position: Counter[int] = field(default_factory=Counter)
    """How often a position was drafted and the round was not cut before it could be judged."""

    accepted_by_position: Counter[int] = field(default_factory=Counter)

    def add(self, outcome: SequenceOutcome) -> None:
        """Count one sequence of one round; a plain one changes nothing."""
        if outcome.gamma == 0:
            return
        self.drafted += outcome.gamma
        self.accepted += outcome.accepted
        if outcome.judged_singly:
            # A wrong draft token ends a block, and all tokens of a block stand first.
            self.drafts += max(1, outcome.gamma - outcome.accepted)
            self.decided_by_position[0] += outcome.accepted if outcome.censored else outcome.gamma
            self.accepted_by_position[0] += outcome.accepted
            return
        self.drafts += 1
        # A stop or a limit says nothing about the draft tokens it cut off.
        decided = outcome.accepted if outcome.censored else outcome.gamma
        self.decided_by_position.update(range(decided))
        self.accepted_by_position.update(range(outcome.accepted))

    def add_all(self, others: "AcceptanceCounts") -> None:
        """Count what ``others`` has counted."""
        self.drafts += others.drafts
        self.drafted += others.drafted
        self.accepted += others.accepted
        self.decided_by_position.update(others.decided_by_position)
        self.accepted_by_position.update(others.accepted_by_position)

    @property
    def rate(self) -> float:
        """Accepted share of all draft tokens; 0 when there were none."""
        return self.accepted / max(1, self.drafted)

    @property
    def length(self) -> float:
        """Mean tokens per verified block, its bonus or corrected token included; 0 when there were none."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    def by_position(self) -> dict[int, float]:
        """Share of blocks whose draft survived up to and including a position, over those that got there.

        The denominator of position i counts only blocks that drafted it, so it differs by position.
        """
        return {i: self.accepted_by_position[i] / n for i, n in sorted(self.decided_by_position.items())}


@dataclass(kw_only=True, slots=True)
class RolloutPool:
    """Gathers what happened in one rollout step."""

    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    acceptance_by_drafter: dict[str, AcceptanceCounts] = field(default_factory=dict)
    rounds: int = 0
    ar_rounds: int = 0
    probe_rounds: int = 0
    sequences: int = 0
    """Sequence-rounds: decode sequences summed over rounds."""

    max_batch: int = 0
    committed: int = 0
    """Tokens of all rounds heard of: work. What a dead host did unheard is missing, and what another did
    again in its place is in it; tokens delivered are counted by ``lengths``."""

    draft_failures: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    part_seconds: dict[str, float] = field(default_factory=dict)
    """By ``time_parts``, over the rounds that told."""

    predicted_s: float = 0.0
    measured_s: float = 0.0
    error_s: float = 0.0
    lengths: list[int] = field(default_factory=list)
    """Tokens of every request that ended, each delivered once whatever happened to its hosts."""

    finish_reasons: Counter[str] = field(default_factory=Counter)
    update_s: float = 0.0
    drafter_build_s: float | None = None
    """None as long as nobody said."""

    updates: int = 0
    policy_version: int = -1

    def add_round(self, facts: RoundFacts, plan: RoundPlan | None = None) -> None:
        """Count one round, and how well it was predicted when its plan says what was expected."""
        speculative = False
        for outcome in facts.telling:
            self.acceptance.add(outcome)
            if outcome.gamma:
                speculative = True
                self.acceptance_by_drafter.setdefault(outcome.drafter, AcceptanceCounts()).add(outcome)
        self.rounds += 1
        self.ar_rounds += not speculative
        self.sequences += facts.batch
        self.max_batch = max(self.max_batch, facts.batch)
        self.committed += facts.committed
        self.draft_failures += sum(d.failures for d in facts.drafts)
        self.policy_version = max(self.policy_version, facts.policy_version)
        parts_s = {"draft": facts.draft_s, "verify": facts.verify_s, "commit": facts.commit_s}
        for part, seconds in {**parts_s, "round": facts.total_s}.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        for part, seconds in time_parts(facts).items():
            self.part_seconds[part] = self.part_seconds.get(part, 0.0) + seconds
        if plan is not None:
            self.probe_rounds += plan.probe
            if plan.predicted_s > 0:
                self.predicted_s += plan.predicted_s
                self.measured_s += facts.total_s
                self.error_s += abs(plan.predicted_s - facts.total_s)

    def add_completions(self, completions: Iterable[Completion]) -> None:
        """Count how requests ended."""
        for completion in completions:
            self.finish_reasons[completion.finish_reason] += 1
            self.lengths.append(len(completion.tokens))

    def add_update(self, *, version: int, update_s: float, drafter_build_s: float | None) -> None:
        """Count one weight update: its whole time, and the share that rebuilt drafters where known."""
        self.updates += 1
        self.update_s += update_s
        if drafter_build_s is not None:
            self.drafter_build_s = (self.drafter_build_s or 0.0) + drafter_build_s
        self.policy_version = max(self.policy_version, version)

    def metrics(self, *, wall_s: float) -> dict[str, float]:
        """Return the numbers of the step, which took ``wall_s``.

        Speculation's own numbers are always there, 0 without speculation; a position that was never
        drafted has none.
        """
        return {
            **self._spec_metrics(),
            **self._time_metrics(wall_s),
            **self._ending_metrics(),
            "rollout/policy_version": float(self.policy_version),
        }

    def _spec_metrics(self) -> dict[str, float]:
        total = self.acceptance
        metrics = {
            "rollout/spec_accept_rate": total.rate,
            "rollout/spec_accept_length": total.length,
            "rollout/spec_drafted_tokens": float(total.drafted),
            "rollout/spec_accepted_tokens": float(total.accepted),
            "rollout/spec_draft_failures": float(self.draft_failures),
            "rollout/gamma_mean": total.drafted / max(1, self.sequences),
        }
        metrics |= {f"rollout/spec_accept_rate_pos_{i}": r for i, r in total.by_position().items()}
        for name, counts in sorted(self.acceptance_by_drafter.items()):
            metrics[f"rollout/spec_accept_rate_{name}"] = counts.rate
            metrics[f"rollout/spec_accept_length_{name}"] = counts.length
            metrics[f"rollout/drafter_frac_{name}"] = counts.drafts / max(1, self.sequences)
        return metrics

    def _time_metrics(self, wall_s: float) -> dict[str, float]:
        delivered = sum(self.lengths)
        metrics = {
            "rollout/wall_s": wall_s,
            "rollout/tokens": float(delivered),
            "rollout/tokens_per_s": delivered / wall_s if wall_s > 0 else 0.0,
            "rollout/committed_tokens": float(self.committed),
            "rollout/rounds": float(self.rounds),
            "rollout/ar_rounds_frac": self.ar_rounds / max(1, self.rounds),
            "rollout/probe_rounds_frac": self.probe_rounds / max(1, self.rounds),
            "rollout/batch_mean": self.sequences / max(1, self.rounds),
            "rollout/batch_max": float(self.max_batch),
            "rollout/weight_updates": float(self.updates),
            "rollout/weight_sync_s": self.update_s,
        }
        if self.drafter_build_s is not None:
            metrics["rollout/drafter_build_s"] = self.drafter_build_s
        metrics |= {
            f"rollout/{part}_s": self.seconds.get(part, 0.0) for part in ("draft", "verify", "commit")
        }
        metrics["rollout/round_s"] = self.seconds.get("round", 0.0)
        told_s = sum(self.part_seconds.values())
        if told_s > 0:
            metrics |= {f"rollout/time_frac_{part}": s / told_s for part, s in self.part_seconds.items()}
        if self.measured_s > 0:
            metrics["rollout/predicted_over_measured"] = self.predicted_s / self.measured_s
            metrics["rollout/prediction_error_frac"] = self.error_s / self.measured_s
        return metrics

    def _ending_metrics(self) -> dict[str, float]:
        count = len(self.lengths)
        metrics = {
            "rollout/completions": float(count),
            "rollout/length_mean_tokens": sum(self.lengths) / max(1, count),
            "rollout/length_max_tokens": float(max(self.lengths, default=0)),
        }
        for reason in ("stop", "length", "aborted", "failed"):
            metrics[f"rollout/finish_{reason}_frac"] = self.finish_reasons[reason] / max(1, count)
        return metrics


def round_gauges(facts: RoundFacts, plan: RoundPlan | None = None) -> dict[str, float]:
    """Return one point of the gamma, drafter and batch timeline, over the clock ``engine/round``."""
    gammas = [o.gamma for o in facts.outcomes]
    by_drafter = Counter(o.drafter for o in facts.outcomes if o.drafter != AR)
    drafted = sum(gammas)
    gauges = {
        "engine/batch": float(facts.batch),
        "engine/gamma_mean": drafted / max(1, len(gammas)),
        "engine/gamma_max": float(max(gammas, default=0)),
        "engine/committed_tokens": float(facts.committed),
        "engine/prefill_rows": float(facts.prefill_rows),
        "engine/round_s": facts.total_s,
        "engine/draft_s": facts.draft_s,
        "engine/verify_s": facts.verify_s,
        "engine/commit_s": facts.commit_s,
        "engine/policy_version": float(facts.policy_version),
    }
    if drafted:
        gauges["engine/accept_rate"] = sum(o.accepted for o in facts.outcomes) / drafted
    if plan is not None and plan.predicted_s > 0:
        gauges["engine/predicted_s"] = plan.predicted_s
    return gauges | {f"engine/sequences_{name}": float(n) for name, n in sorted(by_drafter.items())}


def slowest_build_s(stats: Mapping[str, float]) -> float | None:
    """Return the seconds the slowest host last took to rebuild its drafters; None when no host says so.

    ``stats`` is ``RolloutClient.stats()``: ``host/NAME/drafter/DRAFTER_build_s``.
    """
    by_host: dict[str, float] = {}
    for name, value in stats.items():
        parts = name.split("/")
        if len(parts) == 4 and parts[0] == "host" and parts[2] == "drafter" and parts[3].endswith("_build_s"):
            by_host[parts[1]] = by_host.get(parts[1], 0.0) + value
    return max(by_host.values(), default=None)


def completion_record(completion: Completion) -> dict[str, object]:
    """Return how a request ended as plain data, without its text: a line of the journal."""
    proof = completion.provenance
    versions = [s.policy_version for s in completion.tokens.sources]
    record: dict[str, object] = {
        "prompt_uid": completion.prompt_uid,
        "sample_index": completion.sample_index,
        "attempt": completion.attempt,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "tokens": len(completion.tokens),
        "policy_version_first": versions[0] if versions else None,
        "policy_version_last": versions[-1] if versions else None,
        "tokens_by_origin": dict(Counter(s.origin for s in completion.tokens.sources)),
    }
    if proof is None:
        return record
    served: dict[str, object] = {
        "seed": proof.seed,
        "host": proof.host,
        "fingerprint": proof.fingerprint,
        "drafter_versions": dict(proof.drafter_versions),
        "num_spec_steps": proof.rounds,
        "num_draft_tokens": proof.drafted,
        "num_accepted_draft_tokens": proof.accepted,
        "verified_rows": proof.verified_rows,
        "queued_s": proof.queued_s,
        "prefill_s": proof.prefill_s,
        "decode_s": proof.decode_s,
        "preemptions": proof.preemptions,
    }
    return {**record, **served}
