"""``taildraft evaluate``: what drafts of this policy compute, say and bring, against plain decoding.

Exactness decides the exit code; speed is measured, put beside its goals and decides nothing.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollout.bench.arms import TextDiffersError
from rollout.bench.book import Book
from rollout.bench.bound import Peaks
from rollout.bench.grids import Grid
from rollout.bench.memory import STATUS, resident
from rollout.bench.result import Json
from rollout.bench.result import table as speed_table
from rollout.bench.schedule import measure
from rollout.draft_lengths import gammas_to_try
from rollout.evaluation.laws import law_findings
from rollout.evaluation.page import evaluation_page
from rollout.evaluation.parts import chain_findings, text_findings
from rollout.evaluation.questions import select_questions
from rollout.evaluation.record import Found, evaluation_result
from rollout.evaluation.subject import Subject, open_subject
from rollout.evaluation.sweep import arm_name, plain_token_s, plan_spots, sweep_arms, sweep_cells
from rollout.evaluation.swept import Arm, Sweep, SweptSpot
from rollout.job_config import EvaluateConfig, JobConfig
from rollout.output_files import check_apart, output_path, write_result
from rollout.progress import Progress, say
from rollout.proof.finding import Finding

EQUAL, DIFFERENT = 0, 1

USUAL_GAMMAS = (1, 2, 4, 8)
LONG_GAMMAS = (12, 16)
"""Tried as well where ``drafter.max_gamma`` allows."""


def main(job: JobConfig) -> int:
    """Run the parts and return 0 when every check passed, else 1."""
    settings = _with_gammas(job)
    if settings.cut:
        settings = _cut(settings)
    folder = job.output_dir
    out = output_path(settings.out, folder=folder, name="evaluate.json", setting="evaluate.out")
    html = output_path(settings.html, folder=folder, name="evaluate.html", setting="evaluate.html")
    check_apart(html, "evaluate.html", out, "evaluate.out")
    started_s = time.monotonic()
    with Progress(f"evaluate: opening {job.policy.source}"):
        subject = open_subject(job, settings)
    evaluation = _Evaluation(
        job=subject.settings(replace(job, evaluate=settings)),
        settings=settings,
        subject=subject,
        out=out,
        started_s=started_s,
    )
    try:
        parts = {
            "chains": evaluation.chains,
            "generation": evaluation.generation,
            "laws": evaluation.laws,
            "sweep": evaluation.sweep,
        }
        for part in settings.parts:
            evaluation.run(part, parts[part]())
            evaluation.keep()
        return evaluation.conclude(html)
    finally:
        subject.arms.close()


def _with_gammas(job: JobConfig) -> EvaluateConfig:
    """Return the settings with draft lengths. Raises ``ConfigError`` for longer ones than drafters draft."""
    return replace(
        job.evaluate,
        gammas=gammas_to_try(
            job.evaluate.gammas,
            usual=(*USUAL_GAMMAS, *(g for g in LONG_GAMMAS if g <= job.drafter.max_gamma)),
            max_gamma=job.drafter.max_gamma,
            setting="evaluate.gammas",
        ),
    )


def _cut(full: EvaluateConfig) -> EvaluateConfig:
    """Return the short version: no more than asked for, and seconds of a small policy."""
    return replace(
        full,
        gammas=tuple(g for g in full.gammas if g in (1, 4)) or full.gammas[:1],
        concurrencies=tuple(sorted({min(c, 4) for c in full.concurrencies})),
        lengths=(min(full.lengths),),
        rows=min(full.rows, 2),
        trials=2,
        chains=min(full.chains, 2),
        chain_tokens=min(full.chain_tokens, 10),
        texts=min(full.texts, 8),
        max_tokens=min(full.max_tokens, 12),
        draws=min(full.draws, 600),
    )


@dataclass(kw_only=True, slots=True)
class _Evaluation:
    """The parts, what they found so far, and who is told."""

    job: JobConfig
    settings: EvaluateConfig
    subject: Subject
    out: Path
    started_s: float
    found: Found = field(default_factory=Found)
    book: Book = field(init=False)
    ending: str = "done"
    _progress: Progress | None = None

    def __post_init__(self) -> None:
        subject = self.subject
        grid = Grid(grid="on", policy=subject.policy, arms=subject.arms, calibration=None)
        self.book = Book(self.job, subject.engine_config, [grid], self.out)

    def run(self, part: str, findings: Iterator[Finding]) -> None:
        """Take one finding after the other and say each."""
        while True:
            started_s = time.monotonic()
            with Progress(f"evaluate, {part}") as progress:
                self._progress = progress
                finding = next(findings, None)
                progress.hush()
            if finding is None:
                return
            finding = replace(finding, seconds=finding.seconds or time.monotonic() - started_s)
            self.found.findings.append(finding)
            say(finding.line())

    def keep(self) -> None:
        """Write what was found so far: whoever stops the rest loses none of it."""
        self._write(None)

    def note(self, text: str) -> None:
        """Show what is being done now."""
        if self._progress is not None:
            self._progress.note(text)

    @property
    def left_s(self) -> float:
        """Seconds of the time allowed that are left."""
        return max(1.0, 60 * self.settings.max_minutes - (time.monotonic() - self.started_s))

    # ---- the parts --------------------------------------------------------------------------------

    def chains(self) -> Iterator[Finding]:
        """Compare what reused drafts leave with a serial forward of full depth."""
        yield from chain_findings(self.subject, self.settings, self.found, seed=self.job.seed, note=self.note)

    def generation(self) -> Iterator[Finding]:
        """Compare free texts with plain decoding's."""
        yield from text_findings(
            self.subject,
            self.settings,
            self.found,
            seed=self.job.seed,
            left_s=self.left_s,
            note=self.note,
        )

    def laws(self) -> Iterator[Finding]:
        """Sample short texts of small vocabularies; enumerate what can be."""
        yield from law_findings(
            self.subject.drafter_config.names,
            self.subject.drafter_config,
            looped=self.subject.loops > 1,
            draws=self.settings.draws,
            seeds=self.settings.draw_seeds,
            seed=self.job.seed,
            note=self.note,
        )

    def sweep(self) -> Iterator[Finding]:
        """Measure every arm against plain decoding; what is judged is that their texts are one."""
        if not self.subject.weights.exact:
            say("sweep: not run, for arms are compared on one text and numerics are not exact here")
            return
        self.note("choosing questions")
        sweep = self.found.sweep = self._planned()
        if not sweep.spots:
            say("sweep: not run, for nothing that was asked for can be measured: see left_out")
            return
        gc.freeze()  # what lives until the end need not be walked before every run
        problem = ""
        try:
            self.ending = measure(
                list(sweep.spots),
                limit_s=self.left_s,
                clock=time.monotonic,
                note=self.note,
                before_repetition=self.book.sample,
                after_repetition=lambda: self._write(None),
            )
        except TextDiffersError as error:
            self.ending, problem = "another text", str(error)
        runs = sum(sum(s.cell.guard.runs_by_arm.values()) for s in sweep.spots)
        spots = ", ".join(s.prefix.rstrip("_") for s in sweep.spots)
        yield Finding(
            part="sweep",
            name="every timed run gave plain decoding's texts",
            passed=not problem,
            detail=problem or f"{runs} runs of {len(sweep.arms) + 1} arms at {spots}",
            compared=runs,
        )

    def _planned(self) -> Sweep:
        """Choose what is asked, and what fits the time left."""
        subject, settings, engine = self.subject, self.settings, self.subject.arms.engine
        arms = {
            arm_name(way.drafter, gamma): Arm(drafter=way.drafter, depth=way.depth, gamma=gamma)
            for way in subject.ways_set
            for gamma in way.gammas
        }
        lane_depth = subject.drafter_config.wavefront_depth
        context = sum(map(len, subject.prompts)) // len(subject.prompts) + max(settings.lengths) // 2
        engine.use_drafters(())
        spots, left_out = plan_spots(
            settings,
            token_s=plain_token_s(engine, context_tokens=context),
            arms=len(arms) + 1,
            within_s=self.left_s,
        )
        selection = select_questions(
            engine,
            subject.prompts,
            lengths=sorted({spot.length for spot in spots}),
            wanted=max(spot.rows for spot in spots),
            temperature=settings.temperature,
            seed=self.job.seed,
        )
        specs = sweep_arms(self.job.controller, subject.gammas_of)
        cells, unasked = sweep_cells(spots, selection, subject.arms, specs, settings, seed=self.job.seed)
        return Sweep(
            arms=arms,
            spots=[
                SweptSpot.of(
                    spot, cell, arms, subject.weights.decoder, context_tokens=context, lane_depth=lane_depth
                )
                for spot, cell in cells
            ],
            left_out=[*left_out, *unasked],
            selection=selection,
            trials=settings.trials,
            loops=subject.loops,
            lane_depth=lane_depth,
        )

    # ---- the end ----------------------------------------------------------------------------------

    def _write(self, ending: str | None) -> Json:
        def tell(conditions: Json, peaks: Peaks) -> Json:
            peak = resident("VmHWM") if STATUS.exists() else None
            return evaluation_result(
                self.found,
                conditions={**conditions, "peak_resident_bytes": peak},
                peaks=peaks,
                ending=ending,
                seconds=time.monotonic() - self.started_s,
            )

        return self.book.write(tell)

    def conclude(self, html: Path) -> int:
        """Write the JSON and the page, say the verdict and return the exit code."""
        data = self._write(self.ending)
        write_result(html, evaluation_page(data), "evaluate.html")
        if self.found.sweep.spots:
            # Trials are a fixed number, so nearly every ratio could be known better: the intervals say it.
            sys.stdout.write(speed_table({**data, "undecided": [], "goals": []}) + _goal_lines(data))
        failed, count = self.found.failed, len(self.found.findings)
        verdict = f"equal: all {count} checks passed"
        if failed:
            verdict = f"DIFFERENT: {len(failed)} of {count} checks failed"
        elif not count:
            verdict = "NOT RUN: nothing could be checked"
        where = f"{os.path.relpath(self.out)}, {os.path.relpath(html)}"
        sys.stdout.write(f"{verdict} ({data['seconds']:.0f} s; {self.ending}), details in {where}\n")
        for finding in failed:
            sys.stdout.write(f"{finding.line()}\n")
        return EQUAL if data["verdict"] == "equal" else DIFFERENT


def _goal_lines(data: Json) -> str:
    lines = [f"{g['name']:<34}{g['wanted']}: {g['verdict']} ({g['found']})" for g in data["goals"]]
    lines += [
        f"not measured: {spot['concurrency']} at once, {spot['length']} tokens: {spot['reason']}"
        for spot in data["left_out"]
    ]
    lines += [
        f"fewer trials than asked for at {prefix.rstrip('_')}: {count}, for want of time"
        for prefix, count in data["too_few_trials"].items()
    ]
    asked = data["questions"]
    if asked and asked["echoes"]:
        lines.append(f"left out as echoes: {len(asked['echoes'])} of {asked['considered']} texts considered")
    return "".join(f"{line}\n" for line in ["", *lines, ""])
