"""Workload ``drain``: a batch of varied prompts, all submitted at once, runs empty.

Two length laws. ``natural``: rows end where the policy ends them. ``trace``: our own text, each row stopped
at a seeded long-tailed length; its goals are the ones speculation is judged by.
"""

from collections.abc import Sequence

from rollout.bench.arms import Work, arm_specs
from rollout.bench.cell import HF, Cell
from rollout.bench.foreign import HfReplay
from rollout.bench.grids import AUTO, Grid
from rollout.bench.hf_arm import HfArm
from rollout.bench.lengths import trace_lengths
from rollout.bench.pairing import Claim, PairedRatio
from rollout.bench.questions import Asked, questions_asked
from rollout.errors import ConfigError
from rollout.job_config import BenchConfig, JobConfig

AR_OVER_HF = 3.0
AUTO_OVER_AR_ON_TRACE = 1.15


def drain_cells(job: JobConfig, grids: Sequence[Grid], arms: Sequence[str], hf: HfArm | None) -> list[Cell]:
    """Return one cell per length law and grid; the foreign arm only on the policy as it is."""
    return [
        _cell(job, grid, law, arms, hf if grid.grid == "on" else None)
        for law in job.bench.laws
        for grid in grids
    ]


def _cell(job: JobConfig, grid: Grid, law: str, arms: Sequence[str], hf: HfArm | None) -> Cell:
    bench = job.bench
    prefix = f"{law}_{grid.prefix}"
    asked = questions_asked(grid.policy, bench.questions, rows=bench.prompts, new_tokens=bench.cap_tokens)
    check_context(grid, asked.prompts, bench.cap_tokens)
    specs = arm_specs(job.controller, job.drafter.names, gamma=bench.gamma)
    ours = {name: spec for name, spec in specs.items() if name in arms}
    claims = [
        _claim(prefix, name, "ar", margin=bench.margin_frac, goal=_goal(law, grid, name))
        for name in ours
        if name != "ar"
    ]
    if hf is not None:
        claims.append(_claim(prefix, "ar", HF, margin=bench.margin_frac, goal=AR_OVER_HF))
    return Cell(
        prefix=prefix,
        arms=grid.arms,
        specs=ours,
        work=_work(job, asked, law),
        ratios=[PairedRatio(c, min_pairs=bench.min_pairs, max_pairs=bench.max_pairs) for c in claims],
        seed=job.seed,
        cap_tokens=bench.cap_tokens,
        foreign={} if hf is None else {HF: HfReplay(arm=hf)},
        asked=asked,
    )


def _goal(law: str, grid: Grid, name: str) -> float | None:
    return AUTO_OVER_AR_ON_TRACE if (law, grid.grid, name) == ("trace", "on", AUTO) else None


def _claim(prefix: str, a: str, b: str, *, margin: float, goal: float | None) -> Claim:
    return Claim(
        name=f"{prefix}{a}_over_{b}",
        a=a,
        b=b,
        margin=margin if goal is None else abs(goal - 1.0),
        at_least=goal,
    )


def _work(job: JobConfig, asked: Asked, law: str) -> Work:
    bench = job.bench
    return Work(
        prompts=asked.prompts,
        max_tokens=_trace(bench, job.seed) if law == "trace" else (bench.cap_tokens,) * bench.prompts,
        ignore_eos=law == "trace",
        temperature=bench.temperature,
        run_seed=job.seed,
    )


def _trace(bench: BenchConfig, seed: int) -> tuple[int, ...]:
    return trace_lengths(
        bench.prompts,
        seed=seed,
        median_tokens=bench.trace_median_tokens,
        sigma=bench.trace_sigma,
        cap_tokens=bench.cap_tokens,
    )


def check_context(grid: Grid, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Raise ``ConfigError`` unless every row can get ``new_tokens`` before the context ends."""
    longest = max(len(p) for p in prompts)
    limit = grid.arms.engine.traits.max_context_tokens
    if longest + new_tokens > limit:
        raise ConfigError(
            f"bench: a prompt of {longest} tokens and {new_tokens} new ones exceed the context of {limit}: "
            "lower bench.cap_tokens or bench.fixed_tokens, or raise engine.max_context_tokens"
        )
