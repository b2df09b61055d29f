"""What a round tells of itself, from its work, what was committed and when each part ended."""

from dataclasses import dataclass

from controller.types import PassSeconds, RoundFacts
from rollout.engine.native.committer import Committed
from rollout.engine.native.plain_round import PlainWork
from rollout.engine.native.work import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTimes:
    """Borders of a round on one clock, in seconds, and what was computed between them."""

    started_s: float
    drafted_s: float
    verified_s: float
    done_s: float
    draft_pass: PassSeconds
    policy_pass: PassSeconds


def round_facts(
    work: Work | PlainWork, committed: Committed, times: RoundTimes, *, round_index: int, policy_version: int
) -> RoundFacts:
    """Return the facts the controller and the journal get."""
    return RoundFacts(
        round_index=round_index,
        policy_version=policy_version,
        batch=work.batch,
        prefill_rows=work.prefill_rows,
        verify_rows=work.verify_rows,
        context_tokens=work.context_tokens,
        draft_s=times.drafted_s - times.started_s,
        verify_s=times.verified_s - times.drafted_s,
        commit_s=times.done_s - times.verified_s,
        total_s=times.done_s - times.started_s,
        drafts=tuple(work.costs),
        outcomes=committed.sequences,
        prefill_committed=committed.prefill_tokens,
        policy_pass=times.policy_pass,
        draft_pass=times.draft_pass if times.draft_pass.forward_s else None,
    )
