"""``taildraft verify``: proves on this machine that speculation changes no token of this policy.

Every check prints its verdict as it ends; the first difference of a failed one is shown with the margin of
plain decoding's choice there. The exit code is the verdict.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout.draft_lengths import gammas_to_try
from rollout.job_config import JobConfig, VerifyConfig
from rollout.output_files import output_path, write_result
from rollout.policy.place import resolve
from rollout.progress import Progress, say
from rollout.proof.finding import Finding
from rollout.settings import to_plain

PROVEN, DIFFERENT = 0, 1

USUAL_GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)

HOST_START_S = 45.0
"""What starting one service is allowed in the budget."""


def main(job: JobConfig) -> int:
    """Run the proof's parts and return 0 when every check passed, else 1."""
    settings = _with_gammas(job)
    if settings.cut:
        settings = _cut(settings)
    out = output_path(settings.out, folder=job.output_dir, name="verify.json", setting="verify.out")
    if "equality" in settings.parts:
        with Progress(f"policy {job.policy.source}"):
            resolve(job.policy)  # needed last, refused first
    proof = _Proof(job=job, settings=settings, out=out)
    parts = {
        "law": proof.law,
        "coupled": proof.coupled,
        "faults": proof.faults,
        "equality": proof.equality,
    }
    for part in settings.parts:
        proof.run(part, parts[part]())
    return proof.conclude()


def _with_gammas(job: JobConfig) -> VerifyConfig:
    """Return the settings with draft lengths. Raises ``ConfigError`` for longer ones than drafters draft.

    Only ``equality`` drafts as the policy's drafters are set up.
    """
    if "equality" not in job.verify.parts:
        return job.verify
    return replace(
        job.verify,
        gammas=gammas_to_try(
            job.verify.gammas,
            usual=USUAL_GAMMAS,
            max_gamma=job.drafter.max_gamma,
            setting="verify.gammas",
        ),
    )


def _cut(full: VerifyConfig) -> VerifyConfig:
    """Return the short version: no more than asked for, and no more than a minute's worth."""
    return replace(
        full,
        requests=min(full.requests, 12),
        batches=tuple(sorted({min(b, 4) for b in full.batches})),
        gammas=tuple(g for g in full.gammas if g in (1, 3, 8)) or full.gammas[:1],
        hosts=full.hosts[:1],
        max_tokens=min(full.max_tokens, 12),
        limit_s=min(full.limit_s, 120.0),
    )


@dataclass(kw_only=True, slots=True)
class _Proof:
    """The parts, the findings so far, and who is told."""

    job: JobConfig
    settings: VerifyConfig
    out: Path
    findings: list[Finding] = field(default_factory=list)
    exact_cost: Mapping[str, float | str] | None = None
    _progress: Progress | None = None
    _started_s: float = field(default_factory=time.monotonic)

    def run(self, part: str, findings: Iterator[Finding]) -> None:
        """Take one finding after the other and say each."""
        while True:
            started_s = time.monotonic()
            with Progress(f"verify, {part}") as progress:
                self._progress = progress
                finding = next(findings, None)
                progress.hush()
            if finding is None:
                return
            finding = replace(finding, seconds=finding.seconds or time.monotonic() - started_s)
            self.findings.append(finding)
            say(finding.line())

    def note(self, text: str) -> None:
        """Show what is being done now."""
        if self._progress is not None:
            self._progress.note(text)

    # ---- the parts --------------------------------------------------------------------------------

    def law(self) -> Iterator[Finding]:
        """Enumerate the verification functions alone, then the production round around them."""
        from rollout.proof.law import function_findings, round_findings

        yield from function_findings(cut=self.settings.cut, note=self.note)
        yield from round_findings(cut=self.settings.cut, note=self.note)

    def coupled(self) -> Iterator[Finding]:
        """Plant drafts whose fate is known; try the noise."""
        from rollout.proof.noise_law import noise_findings
        from rollout.proof.orderings import ordering_findings

        yield from ordering_findings()
        yield from noise_findings()

    def faults(self) -> Iterator[Finding]:
        """Plant known-wrong engines."""
        from rollout.proof.planted import planted_findings

        yield from planted_findings()

    def equality(self) -> Iterator[Finding]:
        """Run this policy under every arm, then through the service."""
        from rollout.engine.native.build import weights_dtype
        from rollout.policy.source import load_policy
        from rollout.proof.equality import EqualityProof, Scope
        from rollout.proof.exact_cost import exact_over_fast

        settings, job = self.settings, self.job
        self.note(f"loading policy {job.policy.source}")
        policy = load_policy(job.policy, dtype=weights_dtype(job.engine))
        left_s = settings.limit_s - (time.monotonic() - self._started_s)
        scope = Scope(
            requests=settings.requests,
            batches=settings.batches,
            gammas=settings.gammas,
            drafters=settings.drafters or job.drafter.names,
            max_tokens=settings.max_tokens,
            seed=job.seed,
            within_s=max(1.0, left_s - HOST_START_S * len(settings.hosts)),
        )
        proof = EqualityProof(
            policy=policy,
            engine_config=job.engine,
            drafter_config=job.drafter,
            controller=job.controller,
            scope=scope,
            note=self.note,
        )
        yield from proof.findings()
        shapes = proof.part_shapes()
        proof.close()
        self.note("cost of exact numerics")
        self.exact_cost = exact_over_fast(policy, job.engine)
        if settings.hosts:
            from rollout.proof.hosts import host_finding

            for hosts in settings.hosts:
                yield host_finding(proof, job.policy, job.service, shapes, hosts=hosts)

    # ---- the end ----------------------------------------------------------------------------------

    def conclude(self) -> int:
        """Write the JSON, say the verdict and return the exit code."""
        failed = [f for f in self.findings if not f.passed]
        write_result(self.out, json.dumps(self._record(failed), indent=1) + "\n", "verify.out")
        if self.exact_cost is not None:
            say(f"exact numerics cost {self.exact_cost['ratio']:.3g} x fast, {self.exact_cost['how']}")
        seconds = time.monotonic() - self._started_s
        parts = ", ".join(self.settings.parts)
        verdict = (
            f"DIFFERENT: {len(failed)} of {len(self.findings)} checks failed"
            if failed
            else (f"proven: all {len(self.findings)} checks passed")
        )
        sys.stdout.write(f"{verdict} ({parts}; {seconds:.0f} s), details in {self.out}\n")
        for finding in failed:
            sys.stdout.write(f"{finding.line()}\n")
        return DIFFERENT if failed else PROVEN

    def _record(self, failed: list[Finding]) -> dict[str, Any]:
        from rollout.bench.machine import commit, machine, versions

        return {
            "schema": 1,
            "verdict": "different" if failed else "proven",
            "seconds": time.monotonic() - self._started_s,
            "findings": [to_plain(f) for f in self.findings],
            "faults": [
                {
                    "fault": f.name,
                    "caught": f.passed,
                    "caught_by": f.caught_by,
                    "first_difference": f.detail,
                }
                for f in self.findings
                if f.part == "faults"
            ],
            "exact_over_fast": self.exact_cost,
            "conditions": {
                "machine": machine(),
                "versions": versions(),
                "commit": commit(),
                "config": to_plain(self.job),
            },
        }
