"""The engine loop alone: no Ray, no thread but the test's own, a clock the test moves."""

import threading
from dataclasses import replace

import pytest

from controller.types import RoundLoad, SequenceLoad
from controller.watchdog import WatchdogAction
from rollout.errors import EngineCrashError, UnsupportedError, WeightUpdateError
from rollout.policy.weights import manifest
from rollout.service.loop import EngineLoop, next_turn
from rollout.service.records import Identity
from rollout.testing_engine import (
    ECHO,
    Faults,
    FixedController,
    ScriptedEngine,
    ScriptedSpec,
    scripted_requests,
    scripted_weights,
)


class Driven:
    """A loop that is turned by hand."""

    def __init__(self, spec=None, **settings):
        self.now_s = 0.0
        self.events = []
        self.engine, self.controller = (spec or ScriptedSpec()).build()
        self.loop = EngineLoop(
            self.engine,
            self.controller,
            host="local",
            deliver=self.events.append,
            clock=lambda: self.now_s,
            **settings,
        )

    def do(self, future):
        """Turn once and return what a posted command gave."""
        self.loop.turn()
        return future.result(timeout=0)

    def turns(self, count):
        return [self.loop.turn() for _ in range(count)]

    @property
    def completions(self):
        return [c for e in self.events for c in e.completions]

    def tokens_of(self, key):
        return [t for e in self.events for m in e.emissions if m.key == key for t in m.tokens]


def load(*, sequences=0, prefill=0, waiting=0):
    running = tuple(
        SequenceLoad(key=i, context_tokens=3, generated_tokens=0, remaining_tokens=5)
        for i in range(sequences)
    )
    return RoundLoad(
        round_index=0, policy_version=0, sequences=running, prefill_tokens=prefill, waiting=waiting
    )


def test_a_turn_is_decided_from_the_load_alone():
    def decide(*, admitting=True, **what):
        return next_turn(load(**what), admitting=admitting)

    assert decide(sequences=1) == "round"
    assert decide(prefill=4) == "round"
    assert decide(waiting=2, admitting=False) == "wait"
    assert decide(waiting=2) == "stuck"
    assert decide() == "wait"


def test_emissions_are_the_completions_tokens_in_order():
    driven = Driven(ScriptedSpec(gamma=2))
    requests = scripted_requests(3, tokens=11)
    driven.loop.add(requests)
    driven.turns(8)
    assert [c.finish_reason for c in driven.completions] == ["length"] * 3
    for completion in driven.completions:
        key = (completion.prompt_uid, completion.sample_index)
        assert tuple(driven.tokens_of(key)) == completion.tokens
    assert driven.controller.observed == driven.loop.status().rounds


def test_a_bad_request_is_refused_alone():
    driven = Driven()
    good, bad = scripted_requests(2, tokens=2)
    bad = type(bad)(prompt_uid="bad", sample_index=0, prompt_ids=(999,), params=bad.params, seed=1)
    driven.loop.add([bad, good])
    driven.turns(4)
    by_uid = {c.prompt_uid: c for c in driven.completions}
    assert by_uid["bad"].error.startswith("TokenRangeError")
    assert by_uid["p0"].finish_reason == "length"


def test_a_round_without_progress_fails_its_requests_and_ends_all_rounds():
    driven = Driven(ScriptedSpec(faults=Faults(stall_at_round=3)))
    driven.loop.add(scripted_requests(2))
    driven.turns(6)
    assert [c.error.split(":")[0] for c in driven.completions] == ["NoProgressError"] * 2
    assert all(len(c.tokens) == 2 for c in driven.completions)
    status = driven.loop.status()
    assert (status.state, status.live, status.rounds) == ("crashed", 0, 4)


def test_a_crash_is_told_once_and_later_requests_are_not_taken():
    driven = Driven(ScriptedSpec(faults=Faults(raise_at_round=1)))
    driven.loop.add(scripted_requests(1))
    driven.turns(4)
    assert [e.crashed for e in driven.events if e.crashed] == [
        "RuntimeError: the scripted engine was told to fail in round 1"
    ]
    late = driven.loop.add(scripted_requests(1, tag="late"))
    with pytest.raises(EngineCrashError, match="told to fail"):
        driven.do(late)
    assert len(driven.completions) == 1


def test_a_deadline_is_kept_at_the_next_boundary_also_while_paused():
    driven = Driven()
    request = scripted_requests(1, tokens=100)[0]
    hurried = type(request)(
        prompt_uid="h",
        sample_index=0,
        prompt_ids=request.prompt_ids,
        params=request.params,
        seed=1,
        deadline_s=5.0,
    )
    driven.loop.add([request, hurried])
    driven.turns(4)
    driven.do(driven.loop.pause())
    driven.now_s = 4.9
    driven.turns(1)
    assert driven.completions == []
    driven.now_s = 5.0
    driven.turns(1)
    (ended,) = driven.completions
    assert (ended.prompt_uid, ended.finish_reason, len(ended.tokens)) == ("h", "aborted", 3)
    assert ended.error == "DeadlineError: 5.0 s passed"


def test_one_sample_that_never_ends_costs_its_group_nothing_but_itself():
    """A31: seven finished and one marked with what it has; other groups end when they would have."""

    def rounds_until_others_end(*, stuck: bool):
        driven = Driven(ScriptedSpec(max_batch=12, max_context_tokens=100_000))
        group = scripted_requests(1, n=8, tokens=6, tag="group")
        endless = replace(group[7].params, max_tokens=None)
        group[7] = replace(group[7], params=endless, deadline_s=5.0)
        others = scripted_requests(1, n=4, tokens=9, tag="other")
        driven.loop.add([*(group if stuck else group[:7]), *others])
        rounds = 0
        while sum(c.prompt_uid == others[0].prompt_uid for c in driven.completions) < 4:
            driven.turns(1)
            rounds += 1
        return driven, group, rounds

    driven, group, rounds = rounds_until_others_end(stuck=True)
    assert rounds == rounds_until_others_end(stuck=False)[2]
    driven.now_s = 5.0
    driven.turns(1)
    ended = {c.sample_index: c for c in driven.completions if c.prompt_uid == group[0].prompt_uid}
    assert [ended[i].finish_reason for i in range(8)] == ["length"] * 7 + ["aborted"]
    assert ended[7].error.startswith("DeadlineError")
    assert len(ended[7].tokens) >= 8
    assert {t.policy_version for t in ended[7].tokens} == {0}
    assert not driven.engine.busy
    driven.loop.add(scripted_requests(1, tokens=3, tag="next"))
    driven.turns(5)
    assert driven.completions[-1].finish_reason == "length"


def test_a_paused_loop_runs_no_round_and_still_aborts():
    driven = Driven()
    requests = scripted_requests(2)
    driven.loop.add(requests)
    driven.turns(3)
    driven.do(driven.loop.pause())
    assert driven.turns(3) == [False] * 3
    assert driven.do(driven.loop.abort({requests[0].key: 0}, "enough")) == 1
    assert driven.do(driven.loop.abort({requests[0].key: 0}, "enough")) == 0
    driven.do(driven.loop.resume())
    driven.turns(30)
    assert [c.finish_reason for c in driven.completions] == ["aborted", "length"]


def test_an_abort_meant_for_an_older_attempt_leaves_the_later_one_alone():
    driven = Driven()
    first = scripted_requests(1)[0]
    again = type(first)(
        prompt_uid=first.prompt_uid,
        sample_index=0,
        prompt_ids=first.prompt_ids,
        params=first.params,
        seed=first.seed,
        attempt=1,
    )
    driven.do(driven.loop.add([first]))
    driven.do(driven.loop.add([again]))
    assert driven.do(driven.loop.abort({first.key: 0}, "late word")) == 0
    driven.turns(30)
    assert [(c.attempt, c.finish_reason) for c in driven.completions] == [(0, "aborted"), (1, "length")]


def begin(driven, state, version, mode="drain"):
    driven.do(driven.loop.begin_update(manifest(state, version), mode))
    driven.do(driven.loop.stage(list(state.items())))
    driven.do(driven.loop.check_update())


def test_a_drain_waits_for_what_runs_and_holds_what_waits():
    driven = Driven(ScriptedSpec(max_batch=2))
    driven.do(driven.loop.add(scripted_requests(3, tokens=12)))
    driven.turns(1)
    begin(driven, scripted_weights(1), 1)
    drained = driven.loop.drained()
    driven.turns(5)
    assert not drained.done()
    driven.turns(10)
    assert drained.done()
    assert len(driven.completions) == 2
    assert driven.turns(3) == [False] * 3
    assert driven.do(driven.loop.commit_update()) == 1
    assert (driven.controller.versions, driven.controller.built[-1]) == ([1], (ECHO, 1))
    driven.turns(20)
    assert [{t.policy_version for t in c.tokens} for c in driven.completions] == [{0}, {0}, {1}]


def test_gauges_are_fresh_once_an_update_is_committed():
    driven = Driven()  # its clock stands still, so nothing else refreshes them
    driven.do(driven.loop.add(scripted_requests(1, tokens=4)))
    driven.turns(8)
    assert driven.loop.status().gauges["controller/rounds"] == 0
    begin(driven, scripted_weights(1), 1)
    driven.do(driven.loop.commit_update())
    assert driven.loop.status().gauges["controller/rounds"] == driven.loop.status().rounds > 0


@pytest.mark.parametrize("mode", ["drain", "keep"])
def test_who_waits_for_a_commit_sees_the_new_weights_named_the_moment_it_is_told(mode):
    """Two hosts are told apart by what this says: an old fingerprint under a new version is a third one."""
    driven = Driven()
    begin(driven, scripted_weights(1), 1, mode)
    told = []
    committed = driven.loop.commit_update()
    committed.add_done_callback(lambda _: told.append(driven.loop.status()))
    driven.turns(2)
    assert committed.result(timeout=0) == 1
    assert (told[0].policy_version, told[0].fingerprint) == (1, driven.loop.engine.fingerprint)


def test_a_discarded_update_changes_nothing_and_frees_who_waits_for_it():
    driven = Driven()
    driven.do(driven.loop.add(scripted_requests(2)))
    begin(driven, scripted_weights(1), 1)
    drained = driven.loop.drained()
    driven.turns(1)
    driven.do(driven.loop.discard_update())
    driven.do(driven.loop.discard_update())
    with pytest.raises(WeightUpdateError, match="discarded"):
        drained.result(timeout=0)
    with pytest.raises(WeightUpdateError, match="no update is open"):
        driven.do(driven.loop.commit_update())
    driven.turns(30)
    assert {t.policy_version for c in driven.completions for t in c.tokens} == {0}


def test_a_drain_of_a_paused_engine_is_refused_instead_of_waited_for():
    driven = Driven()
    driven.do(driven.loop.add(scripted_requests(1)))
    driven.do(driven.loop.pause())
    begin(driven, scripted_weights(1), 1)
    with pytest.raises(WeightUpdateError, match="resume it first"):
        driven.do(driven.loop.drained())


def test_a_commit_that_must_wait_is_refused_while_paused_instead_of_waited_for():
    driven = Driven()
    begin(driven, scripted_weights(1), 1)
    driven.do(driven.loop.drained())
    request, begun = begun_request(driven)
    driven.do(driven.loop.add([request], begun=begun))
    driven.do(driven.loop.pause())
    with pytest.raises(WeightUpdateError, match="resume it first"):
        driven.do(driven.loop.commit_update())


def test_who_gives_up_waiting_for_a_drain_does_the_engine_no_harm():
    driven = Driven()
    driven.do(driven.loop.add(scripted_requests(1, tokens=4)))
    begin(driven, scripted_weights(1), 1)
    driven.loop.drained().cancel()
    driven.turns(8)
    assert driven.loop.status().state == "running"
    assert driven.do(driven.loop.commit_update()) == 1


def test_closing_tells_who_waits_for_an_update():
    driven = Driven()
    driven.do(driven.loop.add(scripted_requests(1)))
    begin(driven, scripted_weights(1), 1)
    drained = driven.loop.drained()
    driven.do(driven.loop.close())
    with pytest.raises(WeightUpdateError, match="discarded"):
        drained.result(timeout=0)


def test_a_crashed_engine_says_of_an_update_that_it_crashed():
    """Not that the weights were refused: they may be good."""
    driven = Driven(ScriptedSpec(faults=Faults(crash_stage=True)))
    state = scripted_weights(1)
    driven.do(driven.loop.begin_update(manifest(state, 1), "drain"))
    with pytest.raises(EngineCrashError, match="told to break"):
        driven.do(driven.loop.stage(list(state.items())))
    with pytest.raises(EngineCrashError, match="told to break"):
        driven.do(driven.loop.begin_update(manifest(state, 1), "drain"))
    with pytest.raises(EngineCrashError, match="told to break"):
        driven.do(driven.loop.commit_update())


class SlowEngine(ScriptedEngine):
    """Everything it does takes as long as the test says."""

    take_time = staticmethod(lambda: None)

    def load(self, **how):
        self.take_time()
        return super().load(**how)

    def begin_update(self, update, *, in_flight):
        self.take_time()
        super().begin_update(update, in_flight=in_flight)


class SlowSpec(ScriptedSpec):
    def build(self):
        return SlowEngine(self), FixedController(0)


def test_whatever_the_engine_hangs_in_shows_in_its_status():
    driven = Driven(SlowSpec())
    seen = []

    def take_time():
        driven.now_s += 7.0
        seen.append(driven.loop.status().in_round_s)

    driven.engine.take_time = take_time
    driven.do(driven.loop.add(scripted_requests(1)))
    driven.do(driven.loop.begin_update(manifest(scripted_weights(1), 1), "keep"))
    assert seen == [7.0] * 3, "a load, a command, a load"
    assert driven.loop.status().in_round_s == 0.0


def test_a_halted_engine_admits_nothing_so_an_update_goes_past_what_waits():
    driven = Driven(ScriptedSpec(can_sleep=True))
    for halt, resume in ((driven.loop.pause, driven.loop.resume), (driven.loop.sleep, driven.loop.wake)):
        version = driven.loop.status().policy_version + 1
        driven.do(halt())
        driven.do(driven.loop.add(scripted_requests(1, tokens=5, tag=str(version))))
        driven.turns(2)
        begin(driven, scripted_weights(version), version)
        driven.do(driven.loop.drained())
        assert driven.do(driven.loop.commit_update()) == version
        driven.do(resume())
        driven.turns(8)
        assert {t.policy_version for t in driven.completions[-1].tokens} == {version}


def begun_request(driven, *, version=0):
    """A sample another host began: the request that goes on with it, and what it was begun under."""
    request = replace(scripted_requests(1, tokens=9, tag="begun")[0], prefix_ids=(1, 2, 3), attempt=7)
    assert driven.loop.status().policy_version == version
    fingerprint = driven.loop.status().fingerprint
    return request, {request.key: Identity(policy_version=version, fingerprint=fingerprint)}


def test_a_drain_lets_in_and_waits_for_what_another_host_began_under_the_live_weights():
    driven = Driven(ScriptedSpec(max_batch=1))
    driven.do(driven.loop.add(scripted_requests(2, tokens=6)))
    driven.turns(1)
    request, begun = begun_request(driven)
    begin(driven, scripted_weights(1), 1)
    assert driven.do(driven.loop.add([request], begun=begun)) is None
    drained = driven.loop.drained()
    driven.turns(30)
    assert drained.done()
    assert [c.prompt_uid for c in driven.completions] == ["p0", "begun0"]
    driven.do(driven.loop.commit_update())
    driven.turns(10)
    assert [{t.policy_version for t in c.tokens} for c in driven.completions] == [{0}, {0}, {1}]


def test_a_commit_waits_for_what_came_in_after_the_drain():
    driven = Driven()
    begin(driven, scripted_weights(1), 1)
    driven.do(driven.loop.drained())
    request, begun = begun_request(driven)
    driven.do(driven.loop.add([request], begun=begun))
    committed = driven.loop.commit_update()
    driven.turns(3)
    assert not committed.done()
    driven.turns(10)
    assert committed.result(timeout=0) == 1
    assert {t.policy_version for c in driven.completions for t in c.tokens} == {0}


def test_a_sample_begun_under_other_weights_is_handed_back_and_nothing_else():
    driven = Driven()
    request, begun = begun_request(driven)
    fresh = scripted_requests(1, tokens=3, tag="fresh")[0]
    begin(driven, scripted_weights(1), 1)
    driven.do(driven.loop.commit_update())
    back = driven.do(driven.loop.add([request, fresh], begun=begun))
    assert (back.requests, back.identity.policy_version) == ((request,), 1)
    driven.turns(8)
    assert [c.prompt_uid for c in driven.completions] == ["fresh0"]


def test_an_abort_update_also_ends_a_begun_sample_that_waits():
    driven = Driven(ScriptedSpec(max_batch=1))
    driven.do(driven.loop.add(scripted_requests(1, tokens=50)))
    request, begun = begun_request(driven)
    driven.do(driven.loop.add([request], begun=begun))
    begin(driven, scripted_weights(1), 1, mode="abort")
    driven.do(driven.loop.commit_update())
    assert [c.finish_reason for c in driven.completions] == ["aborted"] * 2


def test_a_drain_is_refused_while_asleep_when_a_begun_sample_waits():
    driven = Driven(ScriptedSpec(can_sleep=True))
    driven.do(driven.loop.sleep())
    request, begun = begun_request(driven)
    driven.do(driven.loop.add([request], begun=begun))
    begin(driven, scripted_weights(1), 1)
    with pytest.raises(WeightUpdateError, match="wake it first"):
        driven.do(driven.loop.drained())


def test_a_request_the_engine_stumbles_over_is_refused_alone():
    driven = Driven()
    good, odd = scripted_requests(2, tokens=3)
    odd = replace(odd, params=None)
    late = replace(scripted_requests(1, tokens=3, tag="late")[0], deadline_s="soon")
    driven.do(driven.loop.add([odd, late, good]))
    driven.turns(6)
    by_uid = {c.prompt_uid: c for c in driven.completions}
    assert by_uid["p0"].finish_reason == "length"
    assert by_uid["p1"].error.startswith("RequestError: AttributeError")
    assert by_uid["late0"].error.startswith("RequestError: TypeError")
    assert driven.loop.status().state == "running"


def test_an_update_with_other_bytes_than_announced_is_refused():
    driven = Driven()
    state = scripted_weights(1)
    driven.do(driven.loop.begin_update(manifest(scripted_weights(2), 2), "drain"))
    driven.do(driven.loop.stage(list(state.items())))
    with pytest.raises(WeightUpdateError, match="checksum"):
        driven.do(driven.loop.check_update())
    assert driven.loop.status().policy_version == 0
    begin(driven, state, 3)
    assert driven.do(driven.loop.commit_update()) == 3


def test_a_mode_the_engine_lacks_is_refused_by_name():
    driven = Driven()
    with pytest.raises(UnsupportedError, match="offers drain, abort, keep"):
        driven.do(driven.loop.begin_update(manifest(scripted_weights(1), 1), "recompute"))


def test_a_sleeping_engine_is_refused_while_requests_live():
    driven = Driven(ScriptedSpec(can_sleep=True))
    driven.do(driven.loop.add(scripted_requests(1)))
    with pytest.raises(UnsupportedError, match="1 requests are alive"):
        driven.do(driven.loop.sleep())
    driven.turns(40)
    driven.do(driven.loop.sleep())
    assert driven.loop.status().state == "asleep"
    driven.do(driven.loop.wake())
    assert driven.loop.status().state == "running"


def test_a_drafter_the_watchdog_gave_up_is_rebuilt_and_the_controller_told():
    driven = Driven()
    driven.controller.actions.append(WatchdogAction(drafter=ECHO, action="rebuild", reason="test"))
    driven.do(driven.loop.add(scripted_requests(1)))
    assert driven.engine.rebuilds == 1
    assert driven.controller.built == [(ECHO, 0), (ECHO, 0)]


def test_round_records_are_bounded_and_the_dropped_are_counted():
    driven = Driven(record_limit=5)
    driven.loop.add(scripted_requests(1, tokens=20))
    driven.turns(12)
    records = driven.loop.take_records()
    assert [r.facts.round_index for r in records] == [7, 8, 9, 10, 11]
    assert driven.loop.status().records_dropped == 7
    assert driven.loop.take_records() == []


def test_closing_ends_what_is_alive_as_aborted():
    driven = Driven()
    driven.do(driven.loop.add(scripted_requests(2)))
    driven.turns(2)
    driven.do(driven.loop.close())
    assert [c.error for c in driven.completions] == ["AbortedError: the host was closed"] * 2
    assert driven.loop.status().state == "closed"


def test_who_asks_while_a_loop_ends_or_after_it_is_answered():
    for _ in range(20):
        driven = Driven()
        thread = threading.Thread(target=driven.loop.run)
        thread.start()
        asked = [driven.loop.close() for _ in range(5)]
        while thread.is_alive():
            asked.append(driven.loop.close())
        asked.append(driven.loop.close())
        assert [future.result(timeout=60) for future in asked] == [None] * len(asked)
    with pytest.raises(EngineCrashError, match="the host is closed"):
        driven.loop.add(scripted_requests(1)).result(timeout=60)
    with pytest.raises(EngineCrashError, match="the host is closed"):
        driven.loop.pause().result(timeout=60)
