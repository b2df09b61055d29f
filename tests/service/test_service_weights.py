"""A weight update is whole on every host, or nowhere; and the store holds no more than it must."""

import os
import signal
import threading
from pathlib import Path

import pytest
import ray
import torch
from ray._private.internal_api import memory_summary

from rollout.errors import UnsupportedError, WeightUpdateError
from rollout.testing_engine import Faults, ScriptedSpec, scripted_requests, scripted_weights

pytestmark = pytest.mark.ray


def store_summary() -> str:
    return memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)


def needed_frac() -> float:
    """Return which share of the object store somebody still holds."""
    line = next(x for x in store_summary().splitlines() if "Plasma memory usage" in x)
    return float(line.split("full,")[1].split("%")[0]) / 100


def own_bytes(pid):
    """Return the memory a process holds alone, the object store's not counted."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def ids_of(completions):
    return [c.token_ids for c in completions]


def versions_of(completions):
    return {t.policy_version for c in completions for t in c.tokens}


def test_an_update_changes_the_text_on_every_host_and_names_its_version(start):
    client = start(hosts=2)
    requests = scripted_requests(6, n=2, tag="update")
    before = client.generate(requests)
    assert client.update_weights(scripted_weights(1), 1) == 1
    after = client.generate(requests)
    assert (versions_of(before), versions_of(after)) == ({0}, {1})
    assert ids_of(before) != ids_of(after)
    assert len({c.provenance.host for c in after}) == 2
    assert len({c.provenance.fingerprint for c in after}) == 1
    assert client.update_weights(scripted_weights(1), 1) == 1, "the live version sent again is answered"
    with pytest.raises(WeightUpdateError, match="not newer"):
        client.update_weights(scripted_weights(2), 1)
    assert client.update_weights(scripted_weights(2, dtype=torch.float32), 2) == 2
    assert versions_of(client.generate(requests)) == {2}


@pytest.mark.parametrize("where", ["refuse_stage", "other_shape", "missing", "extra", "nan"])
def test_an_update_refused_by_one_host_leaves_the_old_version_on_all(where, two_hosts, start):
    """A25: through the service, on two hosts."""
    state = scripted_weights(3)
    client = two_hosts
    if where == "refuse_stage":
        client = start(ScriptedSpec(faults=Faults(refuse_stage=True, only_host="host-1")), hosts=2)
    elif where == "other_shape":
        state["model.weight"] = state["model.weight"][:, :32]
    elif where == "missing":
        del state["model.bias"]
    elif where == "extra":
        state["model.surprise"] = torch.zeros(3)
    else:
        state["model.bias"][7] = float("nan")
    requests = scripted_requests(6, tag=where)
    before = client.generate(requests)
    with pytest.raises(WeightUpdateError):
        client.update_weights(state, 9)
    after = client.generate(requests)
    assert ids_of(after) == ids_of(before)
    assert versions_of(after) == {0}
    assert {h.policy_version for h in client.health().hosts} == {0}
    assert [h.restarts for h in client.health().hosts] == [0, 0]


def test_a_host_that_fails_to_switch_after_all_agreed_is_replaced_by_one_that_has(start, wait_until):
    client = start(ScriptedSpec(faults=Faults(refuse_commit=True, only_host="host-1")), hosts=2)
    assert client.update_weights(scripted_weights(4), 4) == 4
    wait_until(lambda: [h.state for h in client.health().hosts] == ["ready", "ready"])
    assert {h.policy_version for h in client.health().hosts} == {4}
    assert [h.restarts for h in client.health().hosts] == [0, 1]
    assert versions_of(client.generate(scripted_requests(6, tag="switch"))) == {4}


@pytest.mark.parametrize("mode", ["drain", "keep", "abort"])
def test_what_runs_during_an_update_follows_the_mode(mode, slow_host, wait_until):
    client = slow_host
    # The first update a host takes loads torch, which can outlast what runs below.
    old = client.update_weights(scripted_weights(1), client.health().policy_version + 1)
    client.take_records()
    requests = scripted_requests(6, tokens=100, tag="mode")
    answer = []
    call = threading.Thread(target=lambda: answer.extend(client.generate(requests)))
    call.start()
    wait_until(lambda: any(len(r.load.sequences) == 4 for r in client.take_records()))
    assert client.update_weights(scripted_weights(1), old + 1, in_flight=mode) == old + 1
    call.join(60)
    running, waiting = answer[:4], answer[4:]
    assert versions_of(running) == ({old, old + 1} if mode == "keep" else {old})
    assert versions_of(waiting) == {old + 1}, "requests that had not begun run on the new version"
    assert {c.finish_reason for c in running} == {"aborted" if mode == "abort" else "length"}


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_a_host_that_dies_during_an_update_mixes_no_two_versions_in_a_text(mode, start, wait_until):
    client = start(ScriptedSpec(faults=Faults(round_s=0.01), max_batch=4), hosts=2, max_restarts=0)
    requests = scripted_requests(8, tokens=60, tag="mix")
    expected = ids_of(client.generate(requests))
    client.take_records()
    answer = []
    call = threading.Thread(target=lambda: answer.extend(client.generate(requests)))
    call.start()
    wait_until(lambda: {r.host for r in client.take_records() if r.load.sequences} == {"host-0", "host-1"})
    update = threading.Thread(
        target=client.update_weights, args=(scripted_weights(9), 1), kwargs={"in_flight": mode}
    )
    victim = client.health().hosts[0].pid
    update.start()
    os.kill(victim, signal.SIGKILL)
    for thread in (update, call):
        thread.join(60)
    assert {len(versions_of([c])) for c in answer if c.tokens} == {1}
    if mode == "drain":
        kept = [(c.token_ids, e) for c, e in zip(answer, expected, strict=True) if versions_of([c]) == {0}]
        assert all(ids == wanted for ids, wanted in kept)
        assert len(kept) >= 4, "what ran on the living host went on as it was"


def test_a_mode_the_engine_lacks_is_refused_by_name(two_hosts):
    with pytest.raises(UnsupportedError, match="recompute"):
        two_hosts.update_weights(scripted_weights(20), 20, in_flight="recompute")


def test_updates_in_a_loop_keep_no_old_weights_in_the_store(start):
    """A35: nothing of an old version stays, in the store or in a host."""
    ballast = 4 << 20  # 16 MiB in float32: ten versions overflow the store
    client = start(ScriptedSpec(ballast_floats=ballast))
    state = scripted_weights(1, ballast_floats=ballast)
    pid = client.health().hosts[0].pid
    for version in range(1, 25):
        assert client.update_weights(state, version) == version
        assert needed_frac() < 0.35, "more than three versions are held"
        if version == 4:
            early_bytes = own_bytes(pid)
    assert own_bytes(pid) - early_bytes < 3 * 4 * ballast, "a host grows with every version"
    assert "Spilled" not in store_summary()
    assert versions_of(client.generate(scripted_requests(1, tag="last"))) == {24}
