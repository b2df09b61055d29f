"""One local Ray for all tests of this folder, and services of scripted hosts on it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import ray

from rollout.config import ServiceConfig
from rollout.service import cluster
from rollout.service.client import RolloutClient
from rollout.testing_engine import Faults, ScriptedSpec

CONFIG = ServiceConfig(
    host_cpus=0.1,
    threads_per_host=1,
    object_store_bytes=150 << 20,
    health_every_s=0.2,
    flush_s=0.01,
)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    cluster.connect(CONFIG, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def start(local_ray: None, request: pytest.FixtureRequest) -> Iterator[Callable[..., RolloutClient]]:
    """Start services that end with the test."""
    clients: list[RolloutClient] = []

    def begin(spec: ScriptedSpec | None = None, **settings: object) -> RolloutClient:
        config = replace(CONFIG, name=f"{request.node.name}-{len(clients)}", **settings)
        client = RolloutClient.start(spec or ScriptedSpec(), config)
        clients.append(client)
        return client

    yield begin
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def two_hosts(local_ray: None) -> Iterator[RolloutClient]:
    """A service of two sound hosts, for tests that leave it as they found it: idle and at version 0."""
    config = replace(CONFIG, hosts=2, name="two-hosts")
    with RolloutClient.start(ScriptedSpec(), config) as client:
        yield client


@pytest.fixture(scope="session")
def odd_host(local_ray: None) -> Iterator[RolloutClient]:
    """One host that drafts, can sleep, and gets NaN for one prompt."""
    spec = ScriptedSpec(gamma=3, can_sleep=True, faults=Faults(nan_uid="nan2"))
    with RolloutClient.start(spec, replace(CONFIG, name="odd-host")) as client:
        yield client


@pytest.fixture(scope="session")
def slow_host(local_ray: None) -> Iterator[RolloutClient]:
    """One host with endless contexts, small batches, slow rounds, and few places for callers."""
    spec = ScriptedSpec(faults=Faults(round_s=0.01), max_batch=4, max_context_tokens=100_000)
    config = replace(CONFIG, name="slow-host", generate_slots=8)
    with RolloutClient.start(spec, config) as client:
        yield client


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(what: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end_s, "it never happened"
            time.sleep(0.02)

    return wait
