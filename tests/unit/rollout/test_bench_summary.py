"""Reducing rounds: what counts as plain, how near its bound it was, where the time went."""

import pytest

from controller.types import AR, POLICY, PartShape, RoundFacts, SequenceOutcome
from rollout.bench.bound import Peaks, saturation, tail_shares
from rollout.bench.summary import RoundSummary, choice_of

SHAPE = PartShape(
    name=POLICY,
    weight_bytes=1000,
    flops_per_row=100.0,
    kv_bytes_per_token=10,
    flops_per_context_token=1.0,
)


def outcome(drafter: str = AR, gamma: int = 0, accepted: int = 0) -> SequenceOutcome:
    return SequenceOutcome(
        key=0,
        drafter=drafter,
        gamma=gamma,
        accepted=accepted,
        committed=accepted + 1,
        context_tokens=20,
        censored=False,
        finished=False,
    )


def facts(*outcomes: SequenceOutcome, total_s: float = 1.0, prefill_rows: int = 0) -> RoundFacts:
    rows = len(outcomes) + sum(o.gamma for o in outcomes)
    return RoundFacts(
        round_index=0,
        policy_version=0,
        batch=len(outcomes),
        prefill_rows=prefill_rows,
        verify_rows=rows,
        context_tokens=20 * rows,
        draft_s=0.25 * total_s,
        verify_s=0.5 * total_s,
        commit_s=0.25 * total_s,
        total_s=total_s,
        outcomes=outcomes,
    )


def test_a_round_is_named_by_what_it_did() -> None:
    assert choice_of(facts(outcome(), outcome())) == "ar"
    assert choice_of(facts(outcome(), prefill_rows=9)) == "prefill"
    assert choice_of(facts()) == "prefill"
    assert choice_of(facts(outcome("w4", 3), outcome("history", 5), outcome())) == "history+w4/5"


def test_only_plain_rounds_without_prompt_rows_count_as_plain() -> None:
    rounds = [
        facts(outcome(), outcome()),
        facts(outcome(), outcome("w4", 1)),
        facts(outcome(), prefill_rows=1),
    ]
    summary = RoundSummary.of(rounds)
    assert summary.plain_work() == {(2, 1): (1, 1.0)}
    assert summary.rounds_s == 3.0


def test_acceptance_is_pooled_by_drafter_and_position() -> None:
    one = RoundSummary.of([facts(outcome("w4", 2, 2), outcome("w4", 2, 1))])
    both = RoundSummary.merged([one, RoundSummary.of([facts(outcome("w4", 1, 0), outcome("history", 1, 1))])])
    w4 = both.acceptance["w4"]
    assert (w4.drafted, w4.accepted, w4.by_position()) == (5, 3, {0: 2 / 3, 1: 1 / 2})
    assert both.acceptance["history"].rate == 1.0


def test_the_bound_is_the_slower_of_bytes_and_flops() -> None:
    """Batch 2 at context 20: 1000 + 10 * 40 bytes and 100 * 2 + 40 operations."""
    plain = RoundSummary.of([facts(outcome(), outcome(), total_s=0.5)] * 4).plain_by_batch
    (point,) = saturation(plain, SHAPE, Peaks(read_bytes_per_s=14_000.0, flops_per_s=1e9))
    assert (point.batch, point.rounds, point.bound_by) == (2, 4, "bytes")
    assert point.bound_frac == pytest.approx(0.1 / 0.5)
    assert point.tokens_per_s == pytest.approx(4.0)
    (point,) = saturation(plain, SHAPE, Peaks(read_bytes_per_s=1e9, flops_per_s=960.0))
    assert (point.bound_by, point.bound_frac) == ("flops", pytest.approx(0.25 / 0.5))


def test_the_share_of_the_tail_is_of_all_round_time() -> None:
    rounds = [facts(*[outcome()] * batch, total_s=batch) for batch in (1, 2, 3, 8, 16)]
    summary = RoundSummary.of(rounds)
    shares = tail_shares(summary.plain_by_batch, rounds_s=summary.rounds_s)
    assert shares == {2: 3 / 30, 4: 6 / 30, 8: 14 / 30}
