"""The same requests through the service: actors, routing and streams must not change a text either."""

import os
from collections.abc import Mapping
from dataclasses import replace

from controller.types import PartShape
from rollout.config import PolicyConfig, ServiceConfig
from rollout.proof.equality import EqualityProof
from rollout.proof.finding import Finding
from rollout.proof.steering import nominal_calibration
from rollout.service.client import RolloutClient
from rollout.service.factory import EngineSpec


def host_finding(
    proof: EqualityProof,
    policy: PolicyConfig,
    service: ServiceConfig,
    shapes: Mapping[str, PartShape],
    hosts: int,
) -> Finding:
    """Serve the proof's requests from ``hosts`` hosts, controllers on, and compare with the reference."""
    spec = EngineSpec(
        policy=policy,
        engine=proof.serving_config(),
        drafter=replace(proof.drafter_config, names=proof.scope.drafters),
        controller=replace(proof.controller, kind="auto" if proof.scope.drafters else "ar"),
        calibration=nominal_calibration(shapes).to_json(),
    )
    config = replace(service, hosts=hosts, name=f"verify-{os.getpid()}-{hosts}")
    name = f"through the service, {hosts} host{'s' * (hosts > 1)}"
    proof.note(f"starting {hosts} host(s)")
    with RolloutClient.start(spec, config) as client:
        proof.note(name)
        completions = client.generate(proof.requests)
        prints = {h.fingerprint for h in client.health().hosts}
    served = {c.provenance.host for c in completions if c.provenance is not None}
    found = proof.judged(
        name, {r.key: c for r, c in zip(proof.requests, completions, strict=True)}, None, None
    )
    if found.passed and len(served) < hosts:
        return replace(found, passed=False, detail=f"only {len(served)} of {hosts} hosts served anything")
    same = "the reference's" if prints == {proof.fingerprint} else "another than the reference's"
    return replace(found, detail=f"{found.detail}; numerics fingerprint {same}") if found.passed else found
