"""``taildraft run``: hosts, tracker and trainer put together, and taken apart again whatever happens."""

import logging
import time
from pathlib import Path

from rollout.job_config import JobConfig
from rollout.jobs.door import bridge
from rollout.policy.place import resolve
from rollout.progress import Progress
from rollout.settings import to_plain
from rollout.tracking.opening import RunIdentity, open_tracker
from rollout.tracking.recorder import EVENTS

log = logging.getLogger(__name__)


def main(job: JobConfig) -> int:
    """Serve the policy, let the trainer named by ``trainer.kind`` train it, and return its verdict.

    The policy is found first, for it takes the least time to refuse, and the trainer's module before anything
    is started.
    """
    with Progress(f"policy {job.policy.source}"):
        resolve(job.policy)  # once here, so that hosts starting together find it made
    with Progress(f"loading the trainer bridge {job.trainer.get('kind')}"):
        trainer = bridge(job)
    from rollout.service.client import RolloutClient
    from rollout.service.factory import EngineSpec

    spec = EngineSpec(policy=job.policy, engine=job.engine, drafter=job.drafter, controller=job.controller)
    if job.output_dir is None or job.run_id is None:
        raise ValueError("open the run's folder before its jobs")
    run = RunIdentity(folder=Path(job.output_dir), run_id=job.run_id, settings=to_plain(job))
    tracker = open_tracker(job.tracker, run)
    try:
        started_s = time.monotonic()
        with Progress(f"starting {job.service.hosts} host(s)"):
            client = RolloutClient.start(spec, job.service, run_seed=job.seed)
        with client:
            health = to_plain(client.health())
            start_s = time.monotonic() - started_s
            tracker.record(EVENTS, {"event": "service_started", "start_s": start_s, "health": health})
            verdict = int(trainer.run(job, client, tracker))
            tracker.record(EVENTS, {"event": "run_ended", "verdict": verdict, "stats": client.stats()})
    finally:
        tracker.finish()
    return verdict
