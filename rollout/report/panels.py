"""The panels of a report: each reads one journal and returns a drawing, or says why there is none."""

from collections.abc import Callable

from rollout.report.drift import acceptance_over_steps, first_drafts, loop_overlap
from rollout.report.journal import Journal
from rollout.report.panel import Panel
from rollout.report.rounds import (
    acceptance_by_position,
    decisions,
    predicted_against_measured,
    round_parts,
)
from rollout.report.steps import (
    lengths,
    makespan,
    makespan_by_step,
    mismatch,
    reward_curve,
    updates,
    wall_clock,
)
from rollout.report.time_split import time_split

PANELS: tuple[Callable[[Journal], Panel], ...] = (
    reward_curve,
    wall_clock,
    makespan_by_step,
    acceptance_by_position,
    acceptance_over_steps,
    first_drafts,
    loop_overlap,
    decisions,
    predicted_against_measured,
    lengths,
    makespan,
    updates,
    mismatch,
    time_split,
    round_parts,
)
"""In the order of the page."""
