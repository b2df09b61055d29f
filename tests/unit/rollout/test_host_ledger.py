"""The service's book-keeping without Ray: every sample ends once, and resumes only where it may."""

from dataclasses import replace

import pytest

from rollout.engine.protocol import Emission
from rollout.errors import AbortedError, DuplicateRequestError, EngineCrashError, HostLostError
from rollout.service.ledger import Ledger
from rollout.service.live import failed_completion
from rollout.service.records import Identity
from rollout.service.routing import HostLoad, choose_host
from rollout.testing_engine import scripted_requests
from rollout.tokens import TokenRecord, Tokens

HERE = Identity(policy_version=3, fingerprint="a")


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self, *, streamed=False):
        self.streamed = streamed
        self.emissions = []
        self.endings = []

    def tokens(self, emission):
        self.emissions.append(emission)

    def ended(self, completion):
        self.endings.append(completion)


def record(token, version=3):
    return TokenRecord(
        token_id=token,
        raw_logprob=-1.0,
        scaled_logprob=-1.0,
        target_logprob=-1.0,
        kept_logmass=0.0,
        policy_version=version,
        origin="plain",
        drafter="ar",
    )


def emission(request, first, *tokens):
    return Emission(
        key=request.key,
        attempt=request.attempt,
        first_index=first,
        tokens=Tokens(record(t) for t in tokens),
    )


def completion(request):
    return replace(failed_completion(request, ValueError()), finish_reason="length", error=None)


def opened(*, streamed=False, deadline_s=None):
    ledger, sink = Ledger(), Kept(streamed=streamed)
    request = replace(scripted_requests(1)[0], deadline_s=deadline_s)
    sample = ledger.open(request, sink, now_s=100.0)
    sent = ledger.send(sample, "host-0", HERE, now_s=101.0, allow_other=False)
    return ledger, sink, sample, sent


def test_a_sample_resumes_with_what_was_delivered_and_keeps_its_seed():
    ledger, sink, sample, first = opened(streamed=True)
    ledger.emission("host-0", emission(first, 0, 5, 6))
    assert ledger.lost("host-0", HERE) == [sample]
    second = ledger.send(sample, "host-0.1", HERE, now_s=102.0, allow_other=False)
    assert (second.prefix_ids, second.seed) == ((5, 6), first.seed)
    assert second.attempt > first.attempt, "hosts tell sends apart by it, later ones higher"
    ledger.emission("host-0.1", emission(second, 0, 7))
    ledger.completion("host-0.1", completion(second))
    assert [(e.first_index, e.attempt) for e in sink.emissions] == [(0, 0), (2, 1)]
    assert sink.endings[0].token_ids == (5, 6, 7)
    assert len(ledger) == 0


def test_results_of_an_attempt_that_is_over_are_dropped_and_counted():
    """A34."""
    ledger, sink, sample, first = opened()
    ledger.lost("host-0", HERE)
    second = ledger.send(sample, "host-1", HERE, now_s=102.0, allow_other=False)
    ledger.emission("host-0", emission(first, 0, 9))
    ledger.completion("host-0", completion(first))
    ledger.completion("host-1", completion(second))
    ledger.completion("host-1", completion(second))
    assert ledger.late_results == 3
    assert [c.attempt for c in sink.endings] == [1]


def test_what_a_host_still_tells_of_a_dropped_sample_is_not_taken_for_the_same_sample_asked_again():
    ledger, _, sample, old = opened()
    ledger.emission("host-0", emission(old, 0, 5, 6))
    ledger.abort(sample, AbortedError("nobody waits for it"))
    sink = Kept()
    again = ledger.open(sample.asked, sink, now_s=102.0)
    new = ledger.send(again, "host-0", HERE, now_s=102.0, allow_other=False)
    ledger.emission("host-0", emission(old, 2, 7))
    ledger.completion("host-0", completion(old))
    ledger.emission("host-0", emission(new, 0, 5))
    ledger.completion("host-0", completion(new))
    assert [(c.token_ids, c.attempt) for c in sink.endings] == [((5,), 0)]
    assert [e.attempt for e in sink.emissions] == [0]
    assert ledger.late_results == 2


def test_tokens_out_of_place_are_refused_and_leave_the_sample_as_it_was():
    ledger, sink, sample, sent = opened()
    ledger.emission("host-0", emission(sent, 0, 5))
    with pytest.raises(EngineCrashError, match="at 3 after 1"):
        ledger.emission("host-0", emission(sent, 3, 9))
    ledger.fail(sample, EngineCrashError("out of place"))
    assert [(c.token_ids, c.finish_reason) for c in sink.endings] == [((5,), "failed")]


def test_a_key_in_use_is_refused():
    ledger, _, sample, _ = opened()
    with pytest.raises(DuplicateRequestError):
        ledger.open(sample.asked, Kept(), now_s=0.0)
    assert ledger.get(sample.asked.key) is sample


def test_other_numerics_are_refused_or_labelled():
    other = Identity(policy_version=3, fingerprint="b")
    ledger, _, sample, first = opened()
    ledger.emission("host-0", emission(first, 0, 5))
    ledger.lost("host-0", HERE)
    with pytest.raises(HostLostError, match="version 3"):
        ledger.send(sample, "host-1", other, now_s=102.0, allow_other=False)
    allowed = ledger.send(sample, "host-1", other, now_s=102.0, allow_other=True)
    assert allowed.prefix_ids == (5,)


@pytest.mark.parametrize("streamed", [False, True])
def test_after_an_update_an_unseen_sample_starts_again_and_a_seen_one_fails(streamed):
    newer = Identity(policy_version=4, fingerprint="c")
    ledger, sink, sample, first = opened(streamed=streamed)
    ledger.emission("host-0", emission(first, 0, 5))
    ledger.lost("host-0", HERE)
    if streamed:
        with pytest.raises(HostLostError):
            ledger.send(sample, "host-0.1", newer, now_s=102.0, allow_other=False)
        return
    second = ledger.send(sample, "host-0.1", newer, now_s=102.0, allow_other=False)
    assert second.prefix_ids == ()
    ledger.emission("host-0.1", emission(second, 0, 8))
    ledger.completion("host-0.1", completion(second))
    assert sink.endings[0].token_ids == (8,)


def test_tokens_newer_than_their_host_had_told_are_never_continued_under_older_weights():
    ledger, _, sample, first = opened()
    ledger.emission("host-0", emission(first, 0)._replace(tokens=Tokens([record(5, version=4)])))
    ledger.lost("host-0", HERE)
    second = ledger.send(sample, "host-1", HERE, now_s=102.0, allow_other=False)
    assert (second.prefix_ids, sample.records) == ((), [])


@pytest.mark.parametrize("carried_since", [0, 4])
def test_text_that_an_update_ended_is_not_continued_by_the_weights_its_host_had_just_taken(carried_since):
    newer = Identity(policy_version=4, fingerprint="c")
    ledger, _, sample, first = opened()
    ledger.emission("host-0", emission(first, 0, 5))
    ledger.lost("host-0", newer, carried_since=carried_since)
    second = ledger.send(sample, "host-1", newer, now_s=102.0, allow_other=False)
    assert second.prefix_ids == (() if carried_since == 4 else (5,)), "keep and recompute carry it over"


def test_tokens_made_since_an_update_are_continued_after_it():
    newer = Identity(policy_version=4, fingerprint="c")
    ledger, _, sample, first = opened()
    ledger.emission("host-0", emission(first, 0)._replace(tokens=Tokens([record(5, version=4)])))
    ledger.lost("host-0", newer, carried_since=4)
    assert ledger.send(sample, "host-1", newer, now_s=102.0, allow_other=False).prefix_ids == (5,)


def test_a_send_that_is_handed_back_was_no_attempt_and_a_later_one_is_not_touched_by_it():
    newer = Identity(policy_version=4, fingerprint="c")
    ledger, _, sample, first = opened()
    ledger.emission("host-0", emission(first, 0, 5))
    ledger.lost("host-0", HERE)
    second = ledger.send(sample, "host-1", HERE, now_s=102.0, allow_other=False)
    assert ledger.handed_back([second]) == [sample]
    assert (sample.host, sample.sent) == (None, 1)
    third = ledger.send(sample, "host-1", newer, now_s=102.0, allow_other=False)
    assert third.prefix_ids == ()
    assert ledger.handed_back([second]) == []
    assert sample.host == "host-1"


def test_a_retry_has_only_the_time_that_is_left():
    ledger, _, sample, first = opened(deadline_s=10.0)
    assert first.deadline_s == 9.0
    ledger.lost("host-0", HERE)
    assert ledger.send(sample, "host-1", HERE, now_s=108.0, allow_other=False).deadline_s == 2.0


def test_a_partial_rollout_given_by_the_caller_stays_in_front_of_every_retry():
    ledger = Ledger()
    request = replace(scripted_requests(1)[0], prefix_ids=(1, 2))
    sample = ledger.open(request, Kept(), now_s=0.0)
    first = ledger.send(sample, "host-0", HERE, now_s=0.0, allow_other=False)
    ledger.emission("host-0", emission(first, 0, 3))
    ledger.lost("host-0", HERE)
    assert ledger.send(sample, "host-1", HERE, now_s=0.0, allow_other=False).prefix_ids == (1, 2, 3)
    assert sample.remaining_tokens(256) == 24 - 3


def test_the_host_with_least_left_to_do_is_chosen_unless_it_is_full_or_another_shares_the_prompt():
    def hosts(full=False):
        return [
            HostLoad(host="a", remaining_tokens=500, in_flight=1, cap=8),
            HostLoad(host="b", remaining_tokens=90, in_flight=8 if full else 4, cap=8),
        ]

    def chosen(**how):
        full = how.pop("full", False)
        load = choose_host(hosts(full), **how)
        return None if load is None else load.host

    assert chosen(group=4) == "b"
    assert chosen(group=4, full=True) == "a"
    assert chosen(group=4, prefer="a") == "a"
    assert chosen(group=20) is None
    idle = HostLoad(host="c", remaining_tokens=0, in_flight=0, cap=8)
    assert choose_host([idle], group=20) is idle, "a group above the cap must run somewhere"
