"""``taildraft bench``: our arms and foreign ones, interleaved and compared, as one JSON per workload.

A result is data: the exit code says whether it could be measured, goals are reported. The one thing that
fails is a text that differs between two runs of our own.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from rollout.bench.book import Book, page_path, result_path
from rollout.bench.bound import Peaks
from rollout.bench.cell import HF
from rollout.bench.drain import drain_cells
from rollout.bench.fixed import fixed_cells
from rollout.bench.grids import Grid, chosen_arms, open_grid, resolved_engine
from rollout.bench.hf_arm import HfArm
from rollout.bench.peers import longest_row, open_peers, peers_cells, peers_lines, with_peers
from rollout.bench.result import Json, result, table
from rollout.bench.schedule import Ending, Repeated, measure
from rollout.bench.step_page import write_page
from rollout.bench.step_result import steps_result, steps_table
from rollout.bench.steps import parts_timed, steps_cells, steps_engine, told_ahead
from rollout.config import EngineConfig
from rollout.job_config import JobConfig
from rollout.progress import Progress, say

Tell = Callable[[Json, Peaks, Ending | None], Json]
"""Makes the result from conditions and peaks; the ending is None while it still runs."""


def main(job: JobConfig) -> int:
    """Measure, write the JSON after every repetition, and show the table. Returns 0."""
    if job.bench.workload == "steps":
        return _steps(job)
    if job.bench.workload == "peers":
        return _peers(job)
    return _arms(job)


def _arms(job: JobConfig) -> int:
    """Run workload ``drain`` or ``fixed``."""
    bench = job.bench
    drains = bench.workload == "drain"
    engine_config = resolved_engine(job, rows=bench.prompts if drains else max(bench.batches_run))
    arms = chosen_arms(job)
    out = result_path(job)
    grids = _open(job, engine_config, bench.grids)
    hf = _foreign_arm(grids, engine_config) if HF in arms else None
    cells = drain_cells(job, grids, arms, hf) if drains else fixed_cells(job, grids, arms)

    def tell(conditions: Json, peaks: Peaks, ending: Ending | None) -> Json:
        return result(cells, workload=bench.workload, conditions=conditions, peaks=peaks, ending=ending)

    data = _measured(job, cells, Book(job, engine_config, grids, out, hf=hf), tell)
    _close(grids)
    sys.stdout.write(table(data))
    return 0


def _steps(job: JobConfig) -> int:
    """Run workload ``steps``, and draw it."""
    engine_config = steps_engine(job)
    arms = chosen_arms(job)
    out = result_path(job)
    html = page_path(job, out)
    grids = _open(job, engine_config, ("on",))
    book = Book(job, engine_config, grids, out, parts=parts_timed(arms))
    cells, left_out = steps_cells(job, grids[0], arms, memory=book.memory, rate_of=book.rate)
    book.sample()
    say(told_ahead(cells, left_out, job.bench))

    def tell(conditions: Json, peaks: Peaks, ending: Ending | None) -> Json:
        return steps_result(cells, left_out, conditions=conditions, ending=ending)

    data = _measured(job, cells, book, tell)
    _close(grids)
    write_page(data, html)
    say(f"drawn: {os.path.relpath(html)}")
    sys.stdout.write(steps_table(data))
    return 0


def _peers(job: JobConfig) -> int:
    """Run workload ``peers``. Opening peers takes minutes, and counts towards ``bench.max_minutes``."""
    started_s = time.monotonic()
    engine_config = resolved_engine(job, rows=max(job.bench.batches_run))
    arms = chosen_arms(job)
    out = result_path(job)
    (grid,) = grids = _open(job, engine_config, ("on",))
    longest = longest_row(job, grid)
    with Progress("opening peers: one to two minutes each", unit="peers"):
        peers = open_peers(job, arms, grid.policy.folder, threads=engine_config.threads, longest=longest)
    try:
        cells = peers_cells(job, grid, peers)

        def tell(conditions: Json, peaks: Peaks, ending: Ending | None) -> Json:
            data = result(cells, workload="peers", conditions=conditions, peaks=peaks, ending=ending)
            return with_peers(data, job, peers)

        book = Book(job, engine_config, grids, out, hf=peers.hf)
        data = _measured(job, cells, book, tell, spent_s=time.monotonic() - started_s)
    finally:
        peers.close()
        _close(grids)
    sys.stdout.write(table(data) + peers_lines(data))
    return 0


def _open(job: JobConfig, engine_config: EngineConfig, which: Sequence[Literal["on", "off"]]) -> list[Grid]:
    torch.set_num_threads(engine_config.threads)
    grids = []
    with Progress("opening policies", total=len(which), unit="policies") as progress:
        for grid in which:
            grids.append(open_grid(job, engine_config, grid))
            progress.advance()
    return grids


def _foreign_arm(grids: Sequence[Grid], engine_config: EngineConfig) -> HfArm | None:
    """Return transformers on the policy as it is; None where only the moved policy is measured."""
    folders = [grid.policy.folder for grid in grids if grid.grid == "on"]
    return HfArm(folders[0], threads=engine_config.threads) if folders else None


def _measured(
    job: JobConfig, cells: Sequence[Repeated], book: Book, tell: Tell, *, spent_s: float = 0.0
) -> Json:
    """Run the measuring loop and return the complete result; it is on disk after every repetition.

    ``spent_s`` of the time allowed has passed already.
    """
    allowed_s = 60 * job.bench.max_minutes
    gc.freeze()  # what lives until the end need not be walked before every run
    with Progress(f"bench {job.bench.workload}", unit="runs") as progress:

        def note(what: str) -> None:
            progress.advance(note=what)

        ending = measure(
            cells,
            limit_s=max(1.0, allowed_s - spent_s) if allowed_s else 0.0,  # 0 is no limit
            clock=time.monotonic,
            note=note,
            before_repetition=book.sample,
            after_repetition=lambda: book.write(partial(_running, tell)),
        )
    book.sample()
    data = book.write(lambda conditions, peaks: tell(conditions, peaks, ending))
    say(f"written: {os.path.relpath(book.out)} ({ending})")
    return data


def _running(tell: Tell, conditions: Json, peaks: Peaks) -> Json:
    return tell(conditions, peaks, None)


def _close(grids: Sequence[Grid]) -> None:
    for opened in grids:
        opened.arms.close()
