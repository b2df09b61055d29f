"""One local Ray for all tests of this folder, and services of scripted hosts on it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import ray

from rollout.config import ServiceConfig
from rollout.service import cluster
from rollout.service.client import RolloutClient
from rollout.testing_engine import ScriptedSpec

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


@pytest.fixture(scope="module")
def two_hosts(local_ray: None, request: pytest.FixtureRequest) -> Iterator[RolloutClient]:
    """A service of two sound hosts, for the tests of one file that do not break it."""
    config = replace(CONFIG, hosts=2, name=f"two-hosts-{request.module.__name__}")
    with RolloutClient.start(ScriptedSpec(), config) as client:
        yield client


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(what: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end_s, "it never happened"
            time.sleep(0.02)

    return wait
