"""Hosts die, stall and crash; the caller's samples do not notice, or are told by type."""

import os
import signal
import threading
from dataclasses import replace

import pytest
from ray.exceptions import RayTaskError

from rollout.engine.protocol import Emission
from rollout.errors import ConfigError, FingerprintError
from rollout.testing_engine import Faults, ScriptedSpec, scripted_requests, scripted_weights

pytestmark = pytest.mark.ray

SLOW = Faults(round_s=0.005)


def ids_of(completions):
    return [c.token_ids for c in completions]


def test_a_killed_host_costs_no_sample_and_repeats_no_delivered_token(two_hosts, start):
    requests = scripted_requests(6, n=2, tokens=120, tag="kill")
    expected = two_hosts.generate(requests)
    client = start(ScriptedSpec(faults=SLOW), hosts=2)
    victim = client.health().hosts[0].pid
    tokens = {r.key: [] for r in requests}
    ended = {}
    for item in client.stream(requests):
        if isinstance(item, Emission):
            assert item.first_index == len(tokens[item.key]), "a token came twice, or one is missing"
            tokens[item.key].extend(item.tokens)
            if victim is not None and sum(map(len, tokens.values())) > 150:
                os.kill(victim, signal.SIGKILL)
                victim = None
        else:
            assert (item.prompt_uid, item.sample_index) not in ended
            ended[item.prompt_uid, item.sample_index] = item
    assert victim is None
    for request, want in zip(requests, expected, strict=True):
        got = ended[request.key]
        assert got.finish_reason == "length"
        assert got.token_ids == want.token_ids == tuple(t.token_id for t in tokens[request.key])
    attempts = [ended[r.key].attempt for r in requests]
    assert (min(attempts), max(attempts)) == (0, 1), "the other host's samples were disturbed"


def test_a_restarted_host_gets_no_traffic_before_the_current_weights(two_hosts, start, wait_until):
    """A33: readiness is the right version, not a process that is up."""
    client = start(ScriptedSpec(faults=SLOW))
    assert client.update_weights(scripted_weights(5), 5) == 5
    requests = scripted_requests(4, tokens=100, tag="reload")
    expected = client.generate(requests)
    answer = []
    call = threading.Thread(target=lambda: answer.extend(client.generate(requests)))
    call.start()
    wait_until(lambda: client.stats()["service/live"] == 4)
    os.kill(client.health().hosts[0].pid, signal.SIGKILL)
    call.join(60)
    assert ids_of(answer) == ids_of(expected)
    assert {t.policy_version for c in answer for t in c.tokens} == {5}
    assert {c.provenance.host for c in answer} == {"host-0.1"}
    host = client.health().hosts[0]
    assert (host.state, host.restarts, host.policy_version) == ("ready", 1, 5)


def test_a_crashed_round_fails_its_requests_by_type_and_the_host_is_replaced(two_hosts, start):
    client = start(ScriptedSpec(faults=Faults(raise_at_round=4, only_host="host-0")))
    requests = scripted_requests(1, n=2, tag="crash")
    failed = client.generate(requests)
    assert [c.finish_reason for c in failed] == ["failed", "failed"]
    assert all(c.error.startswith("EngineCrashError: RuntimeError") for c in failed)
    assert all(len(c.tokens) == 3 for c in failed), "what was committed is returned"
    assert ids_of(client.generate(requests)) == ids_of(two_hosts.generate(requests))
    assert client.health().hosts[0].host == "host-0.1"


def test_a_stuck_round_is_noticed_and_its_requests_run_elsewhere(two_hosts, start):
    stuck = Faults(long_round=5, long_round_s=600.0, only_host="host-0")
    client = start(ScriptedSpec(faults=stuck), stall_timeout_s=2.0)
    requests = scripted_requests(3, tag="stuck")
    assert ids_of(client.generate(requests)) == ids_of(two_hosts.generate(requests))
    assert "has been running for" in client.health().hosts[0].last_error


def test_a_request_that_kills_every_host_fails_by_type_and_restarts_end(start, wait_until):
    faults = Faults(exit_at_round=3, round_s=0.05)
    client = start(ScriptedSpec(faults=faults), max_restarts=2, max_attempts=2)
    (lost,) = client.generate(scripted_requests(1, tag="poison"))
    assert lost.error.startswith("HostLostError")
    assert "max_attempts" in lost.error
    assert len(lost.tokens) > 0
    (lost,) = client.generate(scripted_requests(1, tag="again"))
    assert lost.error.startswith("HostLostError")
    assert "restarts are used up" in lost.error
    wait_until(lambda: client.health().hosts[0].state == "retired")
    assert not client.health().ok


def test_hosts_of_different_numerics_do_not_serve_together(start):
    with pytest.raises(FingerprintError, match="hosts differ"):
        start(ScriptedSpec(faults=Faults(other_numerics=True)), hosts=2)


def test_a_retry_supersedes_its_older_attempt_whose_late_result_is_dropped(two_hosts, wait_until):
    """A34: one result per sample, however often it is asked for."""
    request = scripted_requests(1, tokens=200, tag="late")[0]
    (expected,) = two_hosts.generate([request])
    two_hosts.pause()
    first = []
    call = threading.Thread(target=lambda: first.extend(two_hosts.generate([request])))
    call.start()
    wait_until(lambda: two_hosts.stats()["service/live"] == 1)
    second = []
    retry = threading.Thread(target=lambda: second.extend(two_hosts.generate([replace(request, attempt=1)])))
    retry.start()
    call.join(60)
    two_hosts.resume()
    retry.join(60)
    assert first[0].finish_reason == "aborted"
    assert "stands in for it" in first[0].error
    assert (second[0].attempt, second[0].token_ids) == (1, expected.token_ids)
    wait_until(lambda: two_hosts.stats()["service/late_results"] >= 1)


def test_a_stream_dropped_half_way_can_be_asked_for_again_at_once(two_hosts, start):
    requests = scripted_requests(4, n=2, tokens=120, tag="again")
    expected = ids_of(two_hosts.generate(requests))
    client = start(ScriptedSpec(faults=SLOW))
    for taken in (1, 4, 9, 20):
        stream = client.stream(requests)
        for _ in range(taken):
            next(stream)
        stream.close()
        assert ids_of(client.generate(requests)) == expected
    health = client.health()
    assert [(h.host, h.restarts, h.last_error) for h in health.hosts] == [("host-0", 0, None)]


def test_an_abort_right_after_the_request_ends_what_it_says_it_ends(slow_host, wait_until):
    for trial in range(10):
        requests = scripted_requests(4, tokens=3000, tag=f"soon{trial}-")
        answer = []
        call = threading.Thread(target=lambda a=answer, r=requests: a.extend(slow_host.generate(r)))
        call.start()
        wait_until(lambda: slow_host.stats()["service/live"] == 4)
        assert slow_host.abort([r.key for r in requests]) == 4
        call.join(60)
        assert [c.finish_reason for c in answer] == ["aborted"] * 4


def test_a_host_that_cannot_start_or_be_placed_is_an_error_with_its_reason(start):
    with pytest.raises(RayTaskError, match="told not to start"):
        start(ScriptedSpec(faults=Faults(fail_build=True)))
    with pytest.raises(ConfigError, match="wants 64 CPU"):
        start(ScriptedSpec(), host_cpus=64.0, start_timeout_s=1.0)
