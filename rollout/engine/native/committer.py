"""Turns verdicts into committed tokens, emissions and completions; ends sequences."""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from controller.types import AR, PlainOutcomes, SequenceOutcome
from rollout.engine.native.commit import Detokenizer, commit_token, final_text
from rollout.engine.native.drafts.drafting import Drafting
from rollout.engine.native.plain_round import PlainWork
from rollout.engine.native.scheduler import PromptChunk, Scheduler
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
    sequences: Sequence[SequenceOutcome] = ()
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
        emit_s: float,
    ) -> None:
        """Tokens of plain rounds are emitted once in ``emit_s``."""
        self._scheduler = scheduler
        self._drafting = drafting
        self._detokenizer = detokenizer
        self._host = host
        self._fingerprint = fingerprint
        self._emit_s = emit_s
        self._emitted_s = 0.0

    def commit(self, work: Work, verdicts: list[Verdict], *, policy_version: int) -> Committed:
        """Hand every verified token to ``commit_token``, one by one, and move the frontiers.

        ``verdicts`` are those of ``work.choosing``, then those of ``work.in_lanes``.
        Raises ``NoProgressError`` when sequences decoded and nothing came of it.
        """
        out = Committed()
        self._prompts_computed(work.chunks, policy_version)
        completing = [c.sequence for c in work.chunks if c.completes]
        decoded_at, lanes_at = len(completing), len(verdicts) - len(work.in_lanes)
        for sequence, verdict in zip(completing, verdicts[:decoded_at], strict=True):
            self._scheduler.begin_decoding(sequence, time.monotonic())
            out.prefill_tokens += self._commit_tokens(sequence, verdict, AR, out, policy_version)
        decoded = zip(work.decoding, verdicts[decoded_at:lanes_at], strict=True)
        in_lanes = zip(work.in_lanes, verdicts[lanes_at:], strict=True)
        out.sequences = (
            *[self._commit_decoded(s, v, work, out, policy_version, in_lanes=False) for s, v in decoded],
            *[self._commit_decoded(s, v, work, out, policy_version, in_lanes=True) for s, v in in_lanes],
        )
        if work.batch and not (out.emissions or out.completions):
            raise NoProgressError(f"a round of {work.batch} decoding sequences committed nothing")
        self._announce_all(out)
        return out

    def _prompts_computed(self, chunks: Sequence[PromptChunk], policy_version: int) -> None:
        for chunk in chunks:
            chunk.sequence.frontier = chunk.end
            self._scheduler.publish(chunk.sequence, policy_version)

    def commit_plain(self, work: PlainWork, *, policy_version: int) -> Committed:
        """Take what a plain round chose. Sequences that begin, may have ended or are watched get their tokens
        now; the others when they must (``PlainBatch``), or once in ``emit_s`` at the latest.

        Raises ``NoProgressError`` as ``commit`` does.
        """
        plain, batch = self._scheduler.plain, work.batch
        committed, finished = array("b", b"\x01" * batch), array("b", bytes(batch))
        out, now_s = Committed(), time.monotonic()
        self._prompts_computed(work.chunks, policy_version)
        begun = range(batch, plain.size)
        rows = plain.advanced(policy_version)
        if begun:
            rows = sorted({*rows, *begun})
        for row, sequence in [(row, plain.sequences[row]) for row in rows]:
            chosen = plain.finite(sequence)
            if row in begun:
                self._scheduler.begin_decoding(sequence, now_s)
                out.prefill_tokens += chosen
            reason = self._give(sequence, out, chosen=chosen, begins=row in begun)
            if row < batch:
                committed[row], finished[row] = chosen, reason is not None
        out.sequences = PlainOutcomes(work.keys, work.lengths, committed, finished)
        if plain.overdue or now_s - self._emitted_s >= self._emit_s:
            self._emitted_s = now_s
            self._announce_all(out)
        if batch and not (any(committed) or out.completions):
            raise NoProgressError(f"a round of {batch} decoding sequences committed nothing")
        return out

    def _give(
        self, sequence: LiveSequence, out: Committed, *, chosen: bool, begins: bool
    ) -> FinishReason | None:
        """Give a sequence of a plain round its tokens and end it if it is over; return why.

        ``chosen``: the round could choose one for it.
        """
        error: Exception | None = None
        reason = self._scheduler.plain.give(sequence, detokenizer=self._detokenizer, prompt_ended=begins)
        if not chosen:
            reason, error = "failed", _not_finite(sequence)
        assert reason or begins or sequence.watched, "what may have ended has, or the screen is wrong"
        self._announce(sequence, out)
        if reason is not None:
            out.completions.append(self._finish(sequence, reason, error))
        return reason

    def _commit_decoded(
        self,
        sequence: LiveSequence,
        verdict: Verdict,
        work: Work,
        out: Committed,
        policy_version: int,
        *,
        in_lanes: bool,
    ) -> SequenceOutcome:
        drafts = len(work.drafts_of(sequence).tokens) if work.drafted else 0
        drafter = work.assignments[sequence.key].drafter if drafts or in_lanes else AR
        context, accepted_before = len(sequence.tokens), sequence.accepted
        sequence.rounds += 1
        sequence.drafted += drafts
        sequence.verified_rows += 1 + drafts
        committed = self._commit_tokens(sequence, verdict, drafter, out, policy_version)
        # In the order of the fields: naming them costs as much again.
        return SequenceOutcome(
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

    def _commit_tokens(
        self, sequence: LiveSequence, verdict: Verdict, drafter: str, out: Committed, policy_version: int
    ) -> int:
        """Commit until something ends the sequence; return how many tokens were committed."""
        first = len(sequence.tokens)
        reason: FinishReason | None = None
        error: Exception | None = None
        for choice, origin in verdict.tokens:
            if not choice.finite:
                reason, error = "failed", _not_finite(sequence)
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
        if committed or reason is not None:  # an end without a token: those of plain rounds may be untold
            self._announce(sequence, out)
        if reason is not None:
            out.completions.append(self._finish(sequence, reason, error))
        return committed

    def untold(self) -> list[Emission]:
        """Return what was committed and not emitted yet; it is now."""
        out = Committed()
        self._announce_all(out)
        return out.emissions

    def _announce_all(self, out: Committed) -> None:
        """Give everybody their tokens and emit what was not, also of who has lost its pages meanwhile."""
        for sequence in self._scheduler.under_way:
            self._announce(sequence, out)

    def _announce(self, sequence: LiveSequence, out: Committed) -> None:
        """Emit what was not emitted yet."""
        request, records, first = sequence.request, sequence.records, sequence.told
        if first < len(records):
            out.emissions.append(Emission(request.key, request.attempt, first, records[first:]))
            sequence.told = len(records)

    def _finish(self, sequence: LiveSequence, reason: FinishReason, error: Exception | None) -> Completion:
        """End a sequence by what a round came to."""
        if reason in ("stop", "length"):
            self._drafting.finished(draft_request(sequence, 0))
        return self.end(sequence, reason, error)

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


def _not_finite(sequence: LiveSequence) -> NumericError:
    return NumericError(f"the policy's logits at position {len(sequence.tokens)} are not finite")
