"""Known-wrong engines: each replaces one piece of the production round while its ``with`` block runs.

All are mistakes that leave every shape, count and type right. A suite that passes with one of them in place
proves nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollout.engine.native import committer, engine, judging, pages
from rollout.engine.native.commit import commit_token
from rollout.engine.native.drafts import view
from rollout.engine.native.drafts.draft_states import DraftStates
from rollout.engine.native.drafts.drafting import Drafted, Drafting
from rollout.engine.native.pages import pages_for
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch, RowMemory
from rollout.engine.native.sequence import LiveSequence
from rollout.engine.native.work import Work
from rollout.engine.target import Choice, TargetRow
from rollout.engine.verify import Decisions, SampledVerdict, Verdict
from rollout.seeds import round_seed
from rollout.types import FinishReason

Plant = Callable[[], AbstractContextManager[None]]
Rule = Callable[[Sequence[int], Tensor, Tensor | None, Decisions], SampledVerdict]


@contextmanager
def swapped(owner: Any, name: str, wrong: Callable[[Any], Any]) -> Iterator[None]:
    """Replace ``owner.name`` by ``wrong(original)`` for a while."""
    original = getattr(owner, name)
    setattr(owner, name, wrong(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


# ---- verification rules ---------------------------------------------------------------------------


@contextmanager
def _both_rules(wrong: Callable[[Rule], Rule]) -> Iterator[None]:
    with swapped(judging, "verify_token", wrong), swapped(judging, "verify_block", wrong):
        yield


class _FromTarget:
    """Decisions that sample every token from the target's own row."""

    def __init__(self, decisions: Decisions, target: Tensor) -> None:
        self._decisions, self._target = decisions, target

    def accept(self, probability: float, *, slot: int) -> bool:
        """Implements ``Decisions.accept``."""
        return self._decisions.accept(probability, slot=slot)

    def sample(self, weights_V: Tensor, *, slot: int) -> int:
        """Implements ``Decisions.sample`` on the wrong weights."""
        return self._decisions.sample(self._target[slot], slot=slot)


def resume_from_target() -> AbstractContextManager[None]:
    """After a rejection, sample from the target instead of the residual."""

    def wrong(rule: Rule) -> Rule:
        return lambda drafts, target, rows, decisions: rule(
            drafts, target, rows, _FromTarget(decisions, target)
        )

    return _both_rules(wrong)


def bonus_after_rejection() -> AbstractContextManager[None]:
    """Emit the row after a rejected draft too, as if the draft had been kept."""

    def wrong(rule: Rule) -> Rule:
        def verify(
            drafts: Sequence[int], target: Tensor, rows: Tensor | None, decisions: Decisions
        ) -> SampledVerdict:
            found = rule(drafts, target, rows, decisions)
            if found.accepted == len(drafts):
                return found
            slot = found.accepted + 1
            bonus = decisions.sample(target[slot], slot=slot)
            return replace(found, tokens=[*found.tokens, (bonus, "bonus")])

        return verify

    return _both_rules(wrong)


def coupled_bonus_after_rejection() -> AbstractContextManager[None]:
    """The same under coupled noise."""

    def wrong(rule: Callable[[Sequence[int], Sequence[Choice]], Verdict]) -> Any:
        def verify(drafts: Sequence[int], choices: Sequence[Choice]) -> Verdict:
            found = rule(drafts, choices)
            if found.accepted == len(drafts):
                return found
            return found._replace(tokens=[*found.tokens, (choices[found.accepted + 1], "bonus")])

        return verify

    return swapped(judging, "verify_coupled", wrong)


# ---- drafts ---------------------------------------------------------------------------------------


def _every_proposal(change: Callable[[Drafted], Drafted]) -> AbstractContextManager[None]:
    def wrong(propose: Any) -> Any:
        def proposing(self: Drafting, name: str, requests: Any) -> Any:
            drafted, cost = propose(self, name, requests)
            return {key: change(d) if d.probs is not None else d for key, d in drafted.items()}, cost

        return proposing

    return swapped(Drafting, "propose", wrong)


def value_dependent_trim() -> AbstractContextManager[None]:
    """Drop drafts from the first that its own row found unlikely: a look at the draft, not at the prefix."""

    def trim(drafted: Drafted) -> Drafted:
        assert drafted.probs is not None
        pairs = zip(drafted.tokens, drafted.probs, strict=True)
        kept = next((i for i, (t, row_V) in enumerate(pairs) if row_V[t] < 0.4), len(drafted.tokens))
        return Drafted(tokens=drafted.tokens[:kept], probs=drafted.probs[:kept] if kept else None)

    return _every_proposal(trim)


def reported_not_sampled() -> AbstractContextManager[None]:
    """Report rows that are not the ones the drafts were drawn from."""

    def soften(drafted: Drafted) -> Drafted:
        assert drafted.probs is not None
        return Drafted(tokens=drafted.tokens, probs=0.5 * drafted.probs + 0.5 / drafted.probs.shape[-1])

    return _every_proposal(soften)


# ---- the target distribution ----------------------------------------------------------------------


def filters_on_drafts_only() -> AbstractContextManager[None]:
    """Hold drafts against the unfiltered target."""

    def wrong(spans_of: Any) -> Any:
        def spans(self: Any, work: Work) -> Any:
            return [
                span._replace(rows=[_unfiltered(row) for row in span.rows]) if span.drafts else span
                for span in spans_of(self, work)
            ]

        return spans

    return swapped(judging.Judge, "_spans", wrong)


def _unfiltered(row: TargetRow) -> TargetRow:
    return row._replace(params=replace(row.params, top_k=0, top_p=1.0, min_p=0.0))


def _every_row(change: Callable[[LiveSequence, TargetRow], TargetRow]) -> AbstractContextManager[None]:
    def wrong(target_row: Any) -> Any:
        def row(self: LiveSequence, drafts: list[int], **named: Any) -> TargetRow:
            return change(self, target_row(self, drafts, **named))

        return row

    return swapped(LiveSequence, "target_row", wrong)


def penalties_per_block() -> AbstractContextManager[None]:
    """Count tokens for penalties once per round, so that drafts of the same round do not count."""
    return _every_row(lambda sequence, row: row._replace(output_counts=Counter(sequence.output_counts)))


def min_tokens_per_block() -> AbstractContextManager[None]:
    """Decide once per round whether stop ids are still forbidden."""

    def change(sequence: LiveSequence, row: TargetRow) -> TargetRow:
        short = sequence.new_tokens < sequence.params.min_tokens
        return row._replace(banned=tuple(sorted(sequence.stop_ids | sequence.eos_ids)) if short else ())

    return _every_row(change)


def noise_by_round() -> AbstractContextManager[None]:
    """Key the coupled noise by the round instead of the position."""

    def wrong(_original: Any) -> Any:
        return lambda sequence, verify: round_seed(sequence.request.seed, sequence.rounds)

    @contextmanager
    def plant() -> Iterator[None]:
        with swapped(judging, "noise_seed", wrong), swapped(view, "noise_seed", wrong):
            yield

    return plant()


# ---- keys and values ------------------------------------------------------------------------------


def keys_one_off() -> AbstractContextManager[None]:
    """Verify drafts one position further on than they stand."""

    def wrong(row_batch: Any) -> Any:
        def batch_of(work: Work, memory: RowMemory) -> RowBatch:
            batch: RowBatch = row_batch(work, memory)
            shift_M = torch.zeros_like(batch.positions_M)
            at = work.prefill_rows
            for sequence in work.decoding:
                count = len(work.drafts_of(sequence).tokens)
                shift_M[at + 1 : at + 1 + count] = 1
                at += 1 + count
            return replace(batch, positions_M=batch.positions_M + shift_M)

        return batch_of

    return swapped(engine, "row_batch", wrong)


def drafters_keys_kept() -> AbstractContextManager[None]:
    """Leave the drafter's provisional keys where verification should have written the policy's."""

    def wrong(verdicts: Any) -> Any:
        def judging_with(self: Any, work: Work) -> list[Verdict]:
            touched = sorted({p for s in work.decoding for p in _drafted_pages(s, work)})
            spare = self._scheduler.pool.take(len(touched))
            assert spare is not None, "the pool is large enough for a copy"
            for page, copy in zip(touched, spare, strict=True):
                self._state.storage.copy_page(page, copy)
            found: list[Verdict] = verdicts(self, work)
            for page, copy in zip(touched, spare, strict=True):
                self._state.storage.copy_page(copy, page)
            self._scheduler.pool.release(spare)
            return found

        return judging_with

    return swapped(engine.NativeEngine, "_verdicts", wrong)


def _drafted_pages(sequence: LiveSequence, work: Work) -> list[int]:
    drafts = len(work.drafts_of(sequence).tokens)
    if not drafts:
        return []
    end = len(sequence.tokens) + drafts
    return sequence.pages[(len(sequence.tokens) - 1) // PAGE_TOKENS : pages_for(end)]


def states_of_another_row() -> AbstractContextManager[None]:
    """Go on from the hidden states of a sequence's other drafted rows."""

    def wrong(standing: Any) -> Any:
        def turned(self: DraftStates, *args: Any, **kwargs: Any) -> tuple[int, list[int]]:
            depth, found = standing(self, *args, **kwargs)
            return depth, found[1:] + found[:1]

        return turned

    return swapped(DraftStates, "standing", wrong)


def prefix_across_versions() -> AbstractContextManager[None]:
    """Reuse prompt pages that the weights before an update wrote."""

    @contextmanager
    def plant() -> Iterator[None]:
        with (
            swapped(pages, "_chain", lambda chain: lambda version, *a, **named: chain(0, *a, **named)),
            swapped(pages.PrefixIndex, "clear", lambda _clear: lambda self: None),
        ):
            yield

    return plant()


def stale_policy() -> AbstractContextManager[None]:
    """Go on verifying with the old weights after an update."""

    def wrong(commit_update: Any) -> Any:
        def committing(self: Any) -> int:
            with swapped(type(self._decoder), "load", lambda _load: lambda _self, _state: None):
                return int(commit_update(self))

        return committing

    return swapped(engine.NativeEngine, "commit_update", wrong)


def stale_keys() -> AbstractContextManager[None]:
    """Keep running sequences' keys over an update that promised to compute them again."""
    return swapped(engine.NativeEngine, "settle_running", lambda _settle: lambda self: [])


# ---- committing -----------------------------------------------------------------------------------


def stops_per_block() -> AbstractContextManager[None]:
    """Look for an end once per round, after all its tokens are committed."""

    def wrong(commit_tokens: Any) -> Any:
        def committing(
            self: Any, sequence: LiveSequence, verdict: Verdict, drafter: str, out: Any, policy_version: int
        ) -> int:
            if len(verdict.tokens) == 1 or not all(choice.finite for choice, _ in verdict.tokens):
                return int(commit_tokens(self, sequence, verdict, drafter, out, policy_version))
            reasons: list[FinishReason | None] = [
                commit_token(
                    sequence,
                    choice,
                    origin=origin,
                    drafter=drafter,
                    policy_version=policy_version,
                    detokenizer=self._detokenizer,
                )
                for choice, origin in verdict.tokens
            ]
            sequence.frontier = len(sequence.tokens) - 1
            reason = next((r for r in reasons if r is not None), None)
            self._announce(sequence, out)
            if reason is not None:
                out.completions.append(self._finish(sequence, reason, None))
            return len(reasons)

        return committing

    return swapped(committer.Committer, "_commit_tokens", wrong)
