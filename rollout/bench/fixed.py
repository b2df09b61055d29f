"""Workload ``fixed``: equal lengths at each of several batches. Where speculation pays, and AR to saturation.

``w4`` is a fixed gamma, the best of a pilot at that batch; the pilot's runs are not among those measured.
"""

import math
from collections.abc import Sequence

from rollout.bench.arms import Work, arm_specs, fixed_arm
from rollout.bench.cell import Cell
from rollout.bench.drain import check_context
from rollout.bench.grids import AUTO, Grid
from rollout.bench.pairing import Claim, PairedRatio
from rollout.bench.questions import questions_asked
from rollout.bench.schedule import Note
from rollout.job_config import JobConfig

W4 = "w4"
W4_OVER_AR_ON_GRID = {1: 1.4, 2: 1.25}
"""By batch."""

W4_OVER_AR_ON_GRID_STRICT = {1: 1.7, 2: 1.5, 4: 1.3}
"""By batch, the stricter goals beside them."""

AUTO_OVER_AR = 0.98
"""At every batch: what deciding and probing may cost where speculation never pays."""

PILOT_PATIENCE = 2
"""Gammas in a row that may be slower than the best so far before longer drafts are given up: cost grows with
gamma and acceptance does not, so at large batch most of the list would only be waited for."""

PILOT_FINALISTS = 2
"""Gammas that run a second time; the faster run counts, for a stall only ever adds."""


def fixed_cells(job: JobConfig, grids: Sequence[Grid], arms: Sequence[str]) -> list[Cell]:
    """Return one cell per batch and grid."""
    return [_cell(job, grid, batch, arms) for grid in grids for batch in job.bench.batches_run]


def _cell(job: JobConfig, grid: Grid, batch: int, arms: Sequence[str]) -> Cell:
    bench = job.bench
    prefix = f"fixed_b{batch}_{grid.prefix}"
    asked = questions_asked(grid.policy, bench.questions, rows=batch, new_tokens=bench.fixed_tokens)
    check_context(grid, asked.prompts, bench.fixed_tokens)
    specs = arm_specs(job.controller, job.drafter.names, gamma=bench.gamma)
    ours = {name: spec for name, spec in specs.items() if name in arms}

    def tune(cell: Cell, note: Note) -> None:
        choose_gamma(cell, job, note)

    return Cell(
        prefix=prefix,
        arms=grid.arms,
        specs=ours,
        work=Work(
            prompts=asked.prompts,
            max_tokens=(bench.fixed_tokens,) * batch,
            ignore_eos=True,
            temperature=bench.temperature,
            run_seed=job.seed,
        ),
        ratios=[
            PairedRatio(
                _claim(prefix, name, grid, batch, margin=bench.margin_frac),
                min_pairs=bench.min_pairs,
                max_pairs=bench.max_pairs,
            )
            for name in ours
            if name != "ar"
        ],
        seed=job.seed,
        cap_tokens=bench.fixed_tokens,
        tune=tune if W4 in ours else None,
        asked=asked,
    )


def choose_gamma(cell: Cell, job: JobConfig, note: Note) -> None:
    """Time ``w4`` at the pilot gammas, shortest first, and let the fastest be the cell's ``w4``."""
    most = next(d.max_gamma for d in cell.arms.all_drafters if d.name == W4)
    gammas = [gamma for gamma in job.bench.pilot_gammas if gamma <= most] or [min(job.bench.gamma, most)]
    arms = {gamma: fixed_arm(job.controller, W4, gamma=gamma) for gamma in sorted(gammas)}
    best_s: dict[int, float] = {}

    def run(gamma: int) -> float:
        note(f"{cell.prefix}{W4}: pilot, gamma {gamma}")
        seconds = cell.checked(arms[gamma]).timed.makespan_s
        best_s[gamma] = min(seconds, best_s.get(gamma, seconds))
        return seconds

    slower = 0
    for gamma in arms:
        best_before_s = min(best_s.values(), default=math.inf)
        slower = slower + 1 if run(gamma) > best_before_s else 0
        if slower == PILOT_PATIENCE:
            break
    if len(best_s) > 1:
        for gamma in sorted(best_s, key=best_s.__getitem__)[:PILOT_FINALISTS]:
            run(gamma)
    cell.specs[W4] = arms[min(best_s, key=best_s.__getitem__)]
    cell.pilot[W4] = {str(gamma): seconds for gamma, seconds in best_s.items()}


def _claim(prefix: str, name: str, grid: Grid, batch: int, *, margin: float) -> Claim:
    goal: float | None = None
    stricter: float | None = None
    if name == AUTO:
        goal = AUTO_OVER_AR
    elif name == W4 and grid.grid == "on":
        goal, stricter = W4_OVER_AR_ON_GRID.get(batch), W4_OVER_AR_ON_GRID_STRICT.get(batch)
    goals = [g for g in (goal, stricter) if g is not None]
    return Claim(
        name=f"{prefix}{name}_over_ar",
        a=name,
        b="ar",
        margin=min((abs(g - 1.0) for g in goals), default=margin),
        at_least=goal,
        stricter=stricter,
    )
