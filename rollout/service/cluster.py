"""How this process gets a Ray cluster: a small local one of its own, or one that exists."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

import rollout
from rollout.config import ServiceConfig
from rollout.errors import ClusterError
from rollout.guard import assert_own_packages
from rollout.service.actors import NAMESPACE

log = logging.getLogger(__name__)


def connect(config: ServiceConfig, *, log_to_driver: bool = True) -> None:
    """Connect this process to Ray; a process that already is stays where it is.

    ``config.ray_address`` None starts a local cluster that ends with this process. An address (or
    ``auto``) joins that cluster and changes nothing about it. Raises ``ClusterError``.
    """
    assert_own_packages()
    if ray.is_initialized():
        log.info("Ray is already connected: %s", ray.get_runtime_context().gcs_address)
        return
    # RAY_ENABLE_ZERO_COPY_TORCH_TENSORS stays off: with it every process of the cluster imports torch for its
    # first message. Weights travel as arrays (payload.py), which are zero-copy without it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if config.ray_address is not None:
        _join(config.ray_address, log_to_driver=log_to_driver)
    else:
        _start(config, log_to_driver=log_to_driver)


def _join(address: str, *, log_to_driver: bool) -> None:
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=log_to_driver)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"service.ray_address={address!r}: no cluster to join: {error}") from error


def _start(config: ServiceConfig, *, log_to_driver: bool) -> None:
    try:
        with _importable():
            ray.init(
                namespace=NAMESPACE,
                num_cpus=_local_cpus(config),
                num_gpus=_whole(config.hosts * config.host_gpus) or None,
                object_store_memory=config.object_store_bytes,
                include_dashboard=False,
                log_to_driver=log_to_driver,
            )
    except Exception as error:  # a node that is too slow is told by a bare Exception
        raise ClusterError(
            f"Ray did not start: {error} On a machine that is busy or short of memory, try again later."
        ) from error


def _local_cpus(config: ServiceConfig) -> int:
    """Return the CPUs a local cluster counts: what the hosts ask for, and never fewer than there are."""
    return max(os.cpu_count() or 1, _whole(config.hosts * config.host_cpus))


def _whole(amount: float) -> int:
    return int(-(-amount // 1))


@contextmanager
def _importable() -> Iterator[None]:
    """Let processes started meanwhile import the packages this one runs, also from a bare checkout."""
    # Not Ray's runtime_env: with one, no process is ready in advance and each start takes twice as long.
    home = str(Path(rollout.__file__).resolve().parent.parent)
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = home if known is None else f"{home}{os.pathsep}{known}"
    try:
        yield
    finally:
        if known is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = known
