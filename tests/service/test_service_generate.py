"""N in, N out, in order, once: through the real service and real host processes."""

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import ray

from rollout.engine.protocol import Emission
from rollout.errors import ConfigError, ServiceGoneError, UnsupportedError
from rollout.service.client import RolloutClient
from rollout.testing_engine import scripted_requests, scripted_weights
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.ray


def ids_of(completions):
    return [c.token_ids for c in completions]


def test_every_request_is_answered_once_and_in_order(two_hosts):
    requests = scripted_requests(9, n=3, tag="order")
    completions = two_hosts.generate(requests)
    assert [(c.prompt_uid, c.sample_index) for c in completions] == [r.key for r in requests]
    assert {c.finish_reason for c in completions} == {"length"}
    assert {len(c.tokens) for c in completions} == {24}
    assert len(set(ids_of(completions))) == 27, "two samples shared their noise"


def test_both_hosts_work_and_a_group_stays_together(two_hosts):
    completions = two_hosts.generate(scripted_requests(8, n=4, tag="group"))
    hosts_of_prompt = {}
    for c in completions:
        hosts_of_prompt.setdefault(c.prompt_uid, set()).add(c.provenance.host)
    assert all(len(hosts) == 1 for hosts in hosts_of_prompt.values())
    assert set().union(*hosts_of_prompt.values()) == {"host-0", "host-1"}


def test_one_host_gives_the_text_of_two_whatever_is_drafted(two_hosts, odd_host):
    requests = scripted_requests(6, n=2, tag="same")
    drafted = odd_host.generate(requests)
    assert ids_of(drafted) == ids_of(two_hosts.generate(requests))
    assert all(c.provenance.accepted > 0 for c in drafted)


def test_a_stream_says_what_the_batch_says(two_hosts):
    """A2: through the service."""
    requests = scripted_requests(4, n=2, tag="stream")
    batch = two_hosts.generate(requests)
    tokens = {r.key: [] for r in requests}
    ended = {}
    for item in two_hosts.stream(requests):
        if isinstance(item, Emission):
            assert item.key not in ended
            assert item.first_index == len(tokens[item.key])
            tokens[item.key].extend(item.tokens)
        else:
            assert isinstance(item, Completion)
            key = (item.prompt_uid, item.sample_index)
            assert key not in ended
            ended[key] = item
    for request, expected in zip(requests, batch, strict=True):
        assert tuple(tokens[request.key]) == expected.tokens == ended[request.key].tokens


TYPED = Request(prompt_uid="bad", sample_index=0, prompt_ids=(1,), params=SamplingParams(), seed=1)
BAD_ITEMS = {
    "EmptyPromptError": {"prompt_uid": "bad", "prompt_ids": []},
    "PromptTooLongError": {"prompt_uid": "bad", "prompt_ids": [1] * 256},
    "TokenRangeError: ids": {"prompt_uid": "bad", "prompt_ids": [5, 211]},
    "TokenRangeError: prompt_ids holds": {"prompt_uid": "bad", "prompt_ids": [5, -1]},
    "TokenRangeError: prompt_ids[1] must be a whole": {"prompt_uid": "bad", "prompt_ids": [5, 1.5]},
    "SamplingParamsError: temperature": {"prompt_ids": [1], "params": {"temperature": float("nan")}},
    "SamplingParamsError: top_p": {"prompt_ids": [1], "params": {"top_p": 0.0}},
    "SamplingParamsError: max_tokens": {"prompt_ids": [1], "params": {"max_tokens": 0}},
    "SamplingParamsError: unknown": {"prompt_ids": [1], "params": {"temprature": 1.0}},
    "SamplingParamsError: temperature must be a number": {
        "prompt_ids": [1],
        "params": {"temperature": "hot"},
    },
    "SamplingParamsError: params must be SamplingParams": replace(TYPED, params=None),
    "SamplingParamsError: stop[0]": {"prompt_ids": [1], "params": {"stop": [1]}},
    "RequestError: prompt_uid must be a string": replace(TYPED, prompt_uid=["a"]),
    "RequestError: prompt_uid must be valid": {"prompt_uid": "\ud800", "prompt_ids": [1]},
    "RequestError: seed must be a whole number": replace(TYPED, seed=None),
    "RequestError: unknown field": {"prompt_ids": [1], "promt_uid": "x"},
    "RequestError: expected a Request": [1, 2, 3],
    "RequestError: deadline_s": {"prompt_ids": [1], "deadline_s": -1},
}


def test_a_bad_item_fails_alone_and_says_why(two_hosts):
    """A4: at the door of the service."""
    good = scripted_requests(1, n=len(BAD_ITEMS), tag="good")
    mixed = [item for pair in zip(good, BAD_ITEMS.values(), strict=True) for item in pair]
    completions = two_hosts.generate(mixed)
    assert ids_of(completions[::2]) == ids_of(two_hosts.generate(good))
    for error, completion in zip(BAD_ITEMS, completions[1::2], strict=True):
        assert completion.finish_reason == "failed"
        assert completion.error.startswith(error), completion.error
        assert completion.tokens == ()


def test_a_prompt_that_is_none_fails_alone(two_hosts):
    first, *bad, last = two_hosts.sample([[5], "567", None, [5.9], [6]], {"max_tokens": 3})
    assert [c.error.partition(":")[0] for c in bad] == ["TokenRangeError"] * 3
    assert [c.error for c in (first, last)] == [None, None]


def test_a_duplicate_is_refused_and_the_first_is_answered(two_hosts):
    """A19: at the door of the service."""
    request = scripted_requests(1, tag="twice")[0]
    first, second = two_hosts.generate([request, request])
    assert (first.finish_reason, len(first.tokens)) == ("length", 24)
    assert second.error.startswith("DuplicateRequestError")


def test_prompts_without_names_get_seeds_of_their_own_and_the_same_ones_again(two_hosts):
    """A11: over replicas too, no two samples share their noise, and a run repeats."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[4, 5], [6], [4, 5]]
    first = two_hosts.sample(prompts, params, n=2)
    assert len(first) == 6
    assert len({c.provenance.seed for c in first}) == 6
    assert len(set(ids_of(first))) == 6
    assert ids_of(two_hosts.sample(prompts, params, n=2)) == ids_of(first)
    assert ids_of(two_hosts.sample(prompts, params, n=2, trainer_step=1)) != ids_of(first)


def test_unnamed_prompts_of_calls_at_once_are_samples_of_their_own_and_repeat_when_asked_again(
    slow_host, wait_until
):
    params = {"max_tokens": 40, "ignore_eos": True}
    batch = [{"prompt_ids": [5 + k, 6], "params": params} for k in (0, 1, 0)]
    alone, again = slow_host.generate(batch), slow_host.generate(batch)
    assert ids_of(again) == ids_of(alone)
    seeds = {c.provenance.seed for c in alone}
    assert len(seeds) == 3, "neither other prompts nor equal ones share noise"
    answers = [[], []]
    calls = [threading.Thread(target=lambda a=a: a.extend(slow_host.generate(batch))) for a in answers]
    for call in calls:
        call.start()
    for call in calls:
        call.join(60)
    both = [c for answer in answers for c in answer]
    assert {c.finish_reason for c in both} == {"length"}
    assert len({(c.prompt_uid, c.sample_index) for c in both}) == 6
    assert ids_of(slow_host.generate(batch)) == ids_of(alone)


def test_calls_at_once_that_sample_one_unnamed_prompt_are_both_served(slow_host):
    params = {"max_tokens": 40, "ignore_eos": True}
    answers = [[], []]
    calls = [
        threading.Thread(target=lambda a=a: a.extend(slow_host.sample([[4, 5]], params, n=2)))
        for a in answers
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join(60)
    both = [c for answer in answers for c in answer]
    assert [c.error for c in both] == [None] * 4
    assert len({c.provenance.seed for c in both}) == 4


class Unreadable(dict):
    """An item that raises something of its own when it is looked at."""

    def __contains__(self, name):
        raise ZeroDivisionError("not today")


def test_an_item_that_cannot_even_be_read_fails_alone_and_leaves_nothing_alive(two_hosts):
    before, after = scripted_requests(2, tokens=5, tag="around")
    completions = two_hosts.generate([before, Unreadable(prompt_ids=[1]), after])
    assert [c.finish_reason for c in completions] == ["length", "failed", "length"]
    assert completions[1].error == "RequestError: ZeroDivisionError: not today"
    assert two_hosts.stats()["service/live"] == 0


def test_a_closed_service_says_so_by_type(start):
    client = start()
    client.close()
    for ask in (client.stats, lambda: client.generate(scripted_requests(1))):
        with pytest.raises(ServiceGoneError, match="closed or its process died"):
            ask()
    with pytest.raises(ServiceGoneError):
        next(client.stream(scripted_requests(1)))
    client.close()


def test_a_numeric_failure_concerns_its_request_alone(two_hosts, odd_host):
    requests = scripted_requests(4, tag="nan")
    sound, ill = two_hosts.generate(requests), odd_host.generate(requests)
    assert ill[2].error.startswith("NumericError")
    assert ill[2].token_ids == sound[2].token_ids[:2]
    for i in (0, 1, 3):
        assert ill[i].token_ids == sound[i].token_ids
    assert odd_host.generate(requests[:1])[0].token_ids == sound[0].token_ids


def test_rounds_are_recorded_with_their_decision(two_hosts):
    two_hosts.take_records()
    two_hosts.generate(scripted_requests(2, tag="log"))
    records = two_hosts.take_records()
    assert sum(r.facts.committed for r in records) == 2 * 24
    assert all(r.plan.reason == "scripted: plain" for r in records)
    assert all(r.load.round_index == r.facts.round_index for r in records)
    assert two_hosts.take_records() == []


def test_stats_count_what_happened(two_hosts):
    before = two_hosts.stats()
    two_hosts.generate([*scripted_requests(3, tag="count"), {"prompt_ids": []}])
    after = two_hosts.stats()
    moved = {name: after[name] - before[name] for name in ("service/admitted", "service/refused")}
    assert moved == {"service/admitted": 3.0, "service/refused": 1.0}
    assert after["service/live"] == 0.0
    assert any(name.startswith("host/host-1/engine/") for name in after)


def test_control_answers_while_every_generate_slot_is_taken(slow_host, wait_until):
    """A32: abort, update and status have their own lane: they come back while no generate call can."""
    client = slow_host
    requests = [scripted_requests(1, tokens=50_000, tag=f"sat{i}-")[0] for i in range(58)]
    calls = [threading.Thread(target=client.generate, args=([r],), daemon=True) for r in requests]
    for call in calls:
        call.start()
    try:
        wait_until(lambda: client.stats()["service/live"] >= 8)
        live = client.health().policy_version
        update = partial(client.update_weights, scripted_weights(1), live + 1, in_flight="keep")
        for ask in (client.health, client.stats, client.take_records, update, client.pause, client.resume):
            ask()
            assert all(call.is_alive() for call in calls), ask
    finally:
        while any(call.is_alive() for call in calls):
            client.abort()
            time.sleep(0.05)


def test_an_abort_ends_requests_with_what_they_have_and_may_be_repeated(slow_host, wait_until):
    client = slow_host
    client.take_records()
    requests = scripted_requests(6, tokens=90_000, tag="abort")
    answer = []
    call = threading.Thread(target=lambda: answer.extend(client.generate(requests)))
    call.start()
    wait_until(lambda: sum(r.facts.committed for r in client.take_records()) > 0)
    assert client.abort([requests[0].key, ("nobody", 0)]) == 1
    assert client.abort([requests[0].key]) == 0
    assert client.abort() == 5
    assert client.abort() == 0
    call.join(60)
    assert [c.finish_reason for c in answer] == ["aborted"] * 6
    assert answer[0].error == "AbortedError: aborted by the caller"
    assert len(answer[0].tokens) > 0
    assert len(answer[5].tokens) == 0


def test_a_pause_stops_rounds_and_a_resume_loses_nothing(two_hosts, wait_until):
    requests = scripted_requests(4, tokens=200, tag="pause")
    expected = ids_of(two_hosts.generate(requests))
    two_hosts.pause()
    answer = []
    call = threading.Thread(target=lambda: answer.extend(two_hosts.generate(requests)))
    call.start()
    wait_until(lambda: two_hosts.stats()["service/live"] == 4)
    rounds = [h.loop.rounds for h in two_hosts.health().hosts]
    time.sleep(0.1)
    health = two_hosts.health()
    assert health.paused
    assert [h.loop.rounds for h in health.hosts] == rounds
    two_hosts.resume()
    call.join(60)
    assert ids_of(answer) == expected


@pytest.mark.parametrize("end", [GeneratorExit, KeyboardInterrupt])
def test_a_stream_that_is_closed_early_or_interrupted_leaves_nothing_running(end, slow_host, wait_until):
    stream = slow_host.stream(scripted_requests(3, tokens=90_000, tag="closed"))
    next(stream)
    assert slow_host.stats()["service/live"] == 3
    with pytest.raises(end):
        stream.throw(end)
    assert slow_host.stats()["service/live"] == 0, "what was asked for can be asked for again at once"
    wait_until(lambda: slow_host.health().hosts[0].loop.live == 0)


def test_a_batch_that_is_interrupted_leaves_nothing_running_and_can_be_asked_for_again(slow_host, wait_until):
    requests = scripted_requests(3, tokens=90_000, tag="interrupted")

    def interrupt_once_alive():
        wait_until(lambda: slow_host.stats()["service/live"] == 3)
        signal.raise_signal(signal.SIGINT)  # Python hands it to the main thread, which waits in generate

    # A shell that starts the tests in the background has them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    other = threading.Thread(target=interrupt_once_alive)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            slow_host.generate(requests)
    finally:
        signal.signal(signal.SIGINT, before)
    assert slow_host.stats()["service/live"] == 0
    other.join()
    short = [replace(r, params=replace(r.params, max_tokens=3)) for r in requests]
    assert [c.finish_reason for c in slow_host.generate(short)] == ["length"] * 3
    wait_until(lambda: slow_host.health().hosts[0].loop.live == 0)


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_a_caller_whose_process_is_killed_leaves_nothing_running(method, slow_host, wait_until):
    code = (
        "import sys; from rollout.service.client import RolloutClient;"
        "from rollout.testing_engine import scripted_requests;"
        "client = RolloutClient.connect(address=sys.argv[1], name='slow-host');"
        "client.generate(scripted_requests(1, tokens=2, tag='before'));"
        "list(getattr(client, sys.argv[2])(scripted_requests(20, tokens=90_000, tag='killed')))"
    )
    address = ray.get_runtime_context().gcs_address
    other = subprocess.Popen([sys.executable, "-c", code, address, method])
    answer = []
    call = threading.Thread(target=lambda: answer.extend(slow_host.generate(scripted_requests(1, tokens=20))))
    try:
        wait_until(lambda: slow_host.stats()["service/live"] == 20)
        call.start()
    finally:
        other.kill()
        other.wait()
    wait_until(lambda: slow_host.stats()["service/live"] <= 1)
    call.join(60)
    assert [c.finish_reason for c in answer] == ["length"], "who lives is not concerned"


def test_a_service_is_found_by_name_also_from_another_process(two_hosts):
    requests = scripted_requests(2, tag="named")
    expected = ids_of(two_hosts.generate(requests))
    assert ids_of(RolloutClient.connect(name="two-hosts").generate(requests)) == expected
    with pytest.raises(ConfigError, match="no service 'nobody'"):
        RolloutClient.connect(name="nobody")
    code = (
        "import sys; from rollout.service.client import RolloutClient;"
        "from rollout.testing_engine import scripted_requests;"
        "client = RolloutClient.connect(address=sys.argv[1], name='two-hosts');"
        "answer = client.generate(scripted_requests(2, tag='named'));"
        "sys.stdout.write(repr([c.token_ids for c in answer]))"
    )
    address = ray.get_runtime_context().gcs_address
    other = subprocess.run(
        [sys.executable, "-c", code, address], check=True, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert other.stdout.splitlines()[-1] == repr(expected)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux shows what a process has loaded")
def test_a_host_loads_torch_only_when_its_engine_does(odd_host):
    assert odd_host.generate(scripted_requests(1, tag="light"))[0].finish_reason == "length"
    own = Path("/proc/self/maps").read_text()
    assert "libtorch" in own, "the sign to look for"
    host = Path(f"/proc/{odd_host.health().hosts[0].pid}/maps").read_text()
    assert "libtorch" not in host


def test_a_deadline_returns_what_there_is_and_delays_nobody(slow_host):
    """A31: through the service, waiting requests included."""
    slow = {"prompt_uid": "slow", "prompt_ids": [1], "params": {"ignore_eos": True}, "deadline_s": 2.0}
    queued = [{**slow, "prompt_uid": f"queued{i}"} for i in range(4)]
    completions = slow_host.generate([slow, *scripted_requests(1, tokens=5, tag="quick"), *queued])
    assert (completions[0].finish_reason, completions[1].finish_reason) == ("aborted", "length")
    assert completions[0].error.startswith("DeadlineError")
    # A round takes 10 ms or more: two seconds' worth at most, where the context would hold 1000 seconds'.
    assert 0 < len(completions[0].tokens) <= 1000
    assert all(c.error.startswith("DeadlineError") for c in completions[2:])


def test_sleep_is_refused_by_name_where_the_engine_cannot(two_hosts, odd_host):
    with pytest.raises(UnsupportedError, match="scripted engine cannot sleep"):
        two_hosts.sleep()
    odd_host.sleep()
    assert odd_host.health().asleep
    odd_host.wake()
    assert len(odd_host.generate(scripted_requests(1, tag="awake"))[0].tokens) == 24
