"""Turns verdicts into committed tokens, emissions and completions; ends sequences."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from controller.types import AR, SequenceOutcome
from rollout.engine.native.commit import Detokenizer, commit_token, final_text
from rollout.engine.native.drafts.drafting import Drafting
from rollout.engine.native.scheduler import Scheduler
from rollout.engine.native.sequence import LiveSequence, Phase
from rollout.engine.native.work import Work, draft_request
from rollout.engine.protocol import Emission
from rollout.engine.verify import Verdict
from rollout.errors import NoProgressError, NumericError
from rollout.types import Completion, FinishReason


@dataclass(kw_only=True, slots=True)
class Committed:
    """What a round's commits produced."""

    emissions: list[Emission] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    sequences: list[SequenceOutcome] = field(default_factory=list)
    prefill_tokens: int = 0
    """Tokens of sequences whose last prompt row was in the round."""


class Committer:
    """The only writer of sequences' tokens and frontiers."""

    def __init__(
        self,
        scheduler: Scheduler,
        drafting: Drafting,
        *,
        detokenizer: Detokenizer | None,
        host: str,
        fingerprint: Callable[[], str],
    ) -> None:
        self._scheduler = scheduler
        self._drafting = drafting
        self._detokenizer = detokenizer
        self._host = host
        self._fingerprint = fingerprint

    def commit(self, work: Work, verdicts: list[Verdict], *, policy_version: int) -> Committed:
        """Hand every verified token to ``commit_token``, one by one, and move the frontiers.

        ``verdicts`` are those of ``work.choosing``, then those of ``work.in_lanes``.
        Raises ``NoProgressError`` when sequences decoded and nothing came of it.
        """
        out = Committed()
        for chunk in work.chunks:
            chunk.sequence.frontier = chunk.end
            self._scheduler.publish(chunk.sequence, policy_version)
        completing = [c.sequence for c in work.chunks if c.completes]
        decoded_at, lanes_at = len(completing), len(verdicts) - len(work.in_lanes)
        for sequence, verdict in zip(completing, verdicts[:decoded_at], strict=True):
            sequence.phase = Phase.DECODE
            if sequence.first_token_s is None:
                sequence.first_token_s = time.monotonic()
            out.prefill_tokens += self._commit_tokens(sequence, verdict, AR, out, policy_version)
        for sequence, verdict in zip(work.decoding, verdicts[decoded_at:lanes_at], strict=True):
            self._commit_decoded(sequence, verdict, work, out, policy_version, in_lanes=False)
        for sequence, verdict in zip(work.in_lanes, verdicts[lanes_at:], strict=True):
            self._commit_decoded(sequence, verdict, work, out, policy_version, in_lanes=True)
        if work.batch and not (out.emissions or out.completions):
            raise NoProgressError(f"a round of {work.batch} decoding sequences committed nothing")
        return out

    def _commit_decoded(
        self,
        sequence: LiveSequence,
        verdict: Verdict,
        work: Work,
        out: Committed,
        policy_version: int,
        *,
        in_lanes: bool,
    ) -> None:
        drafts = len(work.drafts_of(sequence).tokens) if work.drafted else 0
        drafter = work.assignments[sequence.key].drafter if drafts or in_lanes else AR
        context, accepted_before = len(sequence.tokens), sequence.accepted
        sequence.rounds += 1
        sequence.drafted += drafts
        sequence.verified_rows += 1 + drafts
        committed = self._commit_tokens(sequence, verdict, drafter, out, policy_version)
        out.sequences.append(
            # In the order of the fields, here and below: naming them costs as much again.
            SequenceOutcome(
                sequence.key,
                drafter,
                drafts,
                sequence.accepted - accepted_before,
                committed,
                context,
                committed < len(verdict.tokens),
                sequence.phase is Phase.OVER,
                in_lanes,
            )
        )

    def _commit_tokens(
        self, sequence: LiveSequence, verdict: Verdict, drafter: str, out: Committed, policy_version: int
    ) -> int:
        """Commit until something ends the sequence; return how many tokens were committed."""
        first = len(sequence.tokens)
        reason: FinishReason | None = None
        error: Exception | None = None
        for choice, origin in verdict.tokens:
            if not choice.finite:
                reason = "failed"
                error = NumericError(f"the policy's logits at position {len(sequence.tokens)} are not finite")
                break
            reason = commit_token(
                sequence,
                choice,
                origin=origin,
                drafter=drafter,
                policy_version=policy_version,
                detokenizer=self._detokenizer,
            )
            if reason is not None:
                break
        committed = len(sequence.tokens) - first
        if verdict.accepted:  # before ``end``, whose completion tells the count
            sequence.accepted += [origin for _, origin in verdict.tokens[:committed]].count("accepted")
        if committed:
            sequence.frontier = len(sequence.tokens) - 1
            self._announce(sequence, committed, out, finished=reason in ("stop", "length"))
        if reason is not None:
            out.completions.append(self.end(sequence, reason, error))
        return committed

    def _announce(self, sequence: LiveSequence, committed: int, out: Committed, *, finished: bool) -> None:
        request, records = sequence.request, sequence.records
        first = len(records) - committed
        out.emissions.append(Emission(request.key, request.attempt, first, records[first:]))
        if finished:
            self._drafting.finished(draft_request(sequence, 0))

    def end(self, sequence: LiveSequence, reason: FinishReason, error: Exception | None) -> Completion:
        """Take a sequence out of the engine and return how it ended."""
        self._scheduler.remove(sequence)
        self._drafting.forget(sequence.key)
        return sequence.completion(
            reason=reason,
            error=error,
            text=final_text(sequence, self._detokenizer),
            host=self._host,
            fingerprint=self._fingerprint(),
            drafter_versions=self._drafting.versions(),
            now_s=time.monotonic(),
        )
