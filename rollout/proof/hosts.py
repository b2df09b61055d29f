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

GAMMA = 4
"""Draft tokens of every round there."""


def host_finding(
    proof: EqualityProof,
    policy: PolicyConfig,
    service: ServiceConfig,
    shapes: Mapping[str, PartShape],
    hosts: int,
) -> Finding:
    """Serve the proof's requests from ``hosts`` hosts and compare with the reference.

    All draft as told, with the first drafter in scope: what a controller would choose on hosts this small
    is mostly to decode plainly, which would show nothing of drafting there.
    """
    drafter = next(iter(proof.scope.drafters), None)
    controller = replace(proof.controller, kind="ar")
    if drafter is not None:
        gamma = min(GAMMA, proof.drafter_config.max_gamma)
        controller = replace(controller, kind="fixed", drafter=drafter, gamma=gamma)
    spec = EngineSpec(
        policy=policy,
        engine=proof.serving_config(),
        drafter=replace(proof.drafter_config, names=proof.scope.drafters),
        controller=controller,
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
    drafted = sum(c.provenance.drafted for c in completions if c.provenance is not None)
    if found.passed and drafter is not None and not drafted:
        return replace(found, passed=False, detail=f"{drafter} drafted nothing there, so this shows little")
    same = "the reference's" if prints == {proof.fingerprint} else "another than the reference's"
    seen = f"{found.detail}; {drafted} tokens drafted; numerics fingerprint {same}"
    return replace(found, detail=seen) if found.passed else found
