"""Workload ``peers``: the same prompts and lengths through other engines, beside our plain decoding.

A peer that is not there, or refuses this machine, is not measured, and the result says so where its ratio
would stand: a goal nobody could test is no goal that was met.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controller.types import AR
from rollout.bench.arms import Work, arm_specs
from rollout.bench.cell import HF, Cell
from rollout.bench.drain import check_context
from rollout.bench.foreign import Foreign, HfReplay
from rollout.bench.grids import Grid
from rollout.bench.hf_arm import HfArm
from rollout.bench.pairing import Claim, PairedRatio
from rollout.bench.peer_process import PeerError
from rollout.bench.prompts import prompt_ids
from rollout.bench.result import Json
from rollout.bench.vllm_arm import SPECULATIVE, VLLM, VllmArm, open_vllm, peers_python
from rollout.job_config import JobConfig

log = logging.getLogger(__name__)

GOALS: Mapping[str, Mapping[int, float]] = {
    VLLM: {1: 1.9, 4: 1.9, 16: 1.8, 32: 1.7},
    HF: {16: 4.0},
}
"""Least ratio of our plain decoding over a peer, by peer and batch."""

UNCLAIMED_MARGIN = 1.0
"""Of a ratio to a peer that has no goal. Peers are slower by factors: a machine that changed by a few percent
between the two runs spoils no such pair."""

CONTEXT_SPARE = 8
"""Tokens a peer's context is larger than its longest row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """The peers that were asked for: those that run here, and why others do not."""

    hf: HfArm | None = None
    vllm: Mapping[str, VllmArm] = field(default_factory=dict)
    """By mode."""

    not_run: Mapping[str, str] = field(default_factory=dict)
    """By arm, why."""

    def told(self, temperature: float) -> Json:
        """Return what each peer is, or that it was not run."""
        said: Json = {name: f"not run: {reason}" for name, reason in self.not_run.items()}
        if self.hf is not None:
            said[HF] = {"dtype": str(self.hf.dtype).removeprefix("torch."), "temperature": temperature}
        return said | {name: arm.told(temperature) for name, arm in self.vllm.items()}

    def arms(self) -> dict[str, Foreign]:
        """Return fresh foreign arms for one cell."""
        found: dict[str, Foreign] = {} if self.hf is None else {HF: HfReplay(arm=self.hf)}
        return found | dict(self.vllm)

    def close(self) -> None:
        """End every process."""
        for arm in self.vllm.values():
            arm.process.close()


def open_peers(job: JobConfig, arms: Sequence[str], folder: Path, *, threads: int, longest: int) -> Peers:
    """Start every peer among ``arms`` on the policy's folder; ``longest`` is the longest row, in tokens."""
    vllm: dict[str, VllmArm] = {}
    not_run: dict[str, str] = {}
    for mode in (name for name in SPECULATIVE if name in arms):
        try:
            vllm[mode] = open_vllm(
                mode,
                peers_python(job.bench.peers_env),
                folder,
                threads=threads,
                max_batch=max(job.bench.batches_run),
                max_context_tokens=longest + CONTEXT_SPARE,
            )
        except PeerError as error:
            log.warning("bench: %s is not run: %s", mode, error)
            not_run[mode] = str(error)
    hf = HfArm(folder, threads=threads) if HF in arms else None
    return Peers(hf=hf, vllm=vllm, not_run=not_run)


def longest_row(job: JobConfig, grid: Grid) -> int:
    """Return the tokens of the longest row, prompt and answer."""
    prompts = prompt_ids(grid.policy.tokenizer, max(job.bench.batches_run))
    check_context(grid, prompts, job.bench.fixed_tokens)
    return max(len(prompt) for prompt in prompts) + job.bench.fixed_tokens


def peers_cells(job: JobConfig, grid: Grid, peers: Peers) -> list[Cell]:
    """Return one cell per batch, our plain decoding against every peer that runs."""
    return [_cell(job, grid, peers, batch) for batch in job.bench.batches_run]


def _cell(job: JobConfig, grid: Grid, peers: Peers, batch: int) -> Cell:
    bench = job.bench
    foreign = peers.arms()
    return Cell(
        prefix=f"b{batch}_",
        arms=grid.arms,
        specs={AR: arm_specs(job.controller, (), gamma=bench.gamma)[AR]},
        work=Work(
            prompts=tuple(prompt_ids(grid.policy.tokenizer, batch)),
            max_tokens=(bench.fixed_tokens,) * batch,
            ignore_eos=True,
            temperature=bench.temperature,
            run_seed=job.seed,
        ),
        ratios=[
            PairedRatio(
                _claim(name, batch),
                min_pairs=bench.min_pairs,
                max_pairs=bench.max_pairs,
            )
            for name in foreign
        ],
        seed=job.seed,
        cap_tokens=bench.fixed_tokens,
        foreign=foreign,
    )


def _claim(peer: str, batch: int) -> Claim:
    goal = GOALS.get(peer, {}).get(batch)
    return Claim(
        name=f"{AR}_over_{peer}_b{batch}",
        a=AR,
        b=peer,
        margin=UNCLAIMED_MARGIN if goal is None else abs(goal - 1.0),
        at_least=goal,
    )


def with_peers(data: Json, job: JobConfig, peers: Peers) -> Json:
    """Return a result that also says what each peer is, and which goals nobody tested."""
    missing = [
        (_claim(name, batch), reason)
        for name, reason in peers.not_run.items()
        for batch in job.bench.batches_run
    ]
    return {
        **data,
        "peers": peers.told(job.bench.temperature),
        "goals": data["goals"]
        + [
            {"name": claim.name, "at_least": claim.at_least, "ci90_low": None, "verdict": "not run"}
            for claim, _ in missing
            if claim.at_least is not None
        ],
        "undecided": data["undecided"]
        + [
            {"name": claim.name, "pairs": 0, "width": None, "wanted_width": None, "why": f"not run: {reason}"}
            for claim, reason in missing
        ],
    }


def peers_lines(data: Mapping[str, object]) -> str:
    """Return, for people, one line per peer that was not run."""
    said = data["peers"]
    assert isinstance(said, Mapping), "with_peers comes first"
    return "".join(f"{name}: {what}\n" for name, what in said.items() if isinstance(what, str))
