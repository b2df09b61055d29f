"""Measures a machine with a policy: forwards timed on an idle engine, and rounds of throw-away requests.

Rounds price what a round does beside its forwards. Passes over all points, not repetitions of a point: a
stall then spoils one pass of every point instead of every repetition of one.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from controller.calibration import OTHER, Calibration, Sample, SweepPoint, fit, fit_other, sweep_plan
from controller.config import ControllerConfig
from controller.trust import Timing, anchors_of, disagreement, judge, timing_of
from controller.types import AR_ASSIGNMENT, POLICY, Assignment, PartShape, RoundFacts, RoundPlan
from rollout.calibration.neighbours import Neighbours
from rollout.engine.protocol import Engine
from rollout.errors import CapacityError
from rollout.progress import Progress
from rollout.types import Request, SamplingParams

log = logging.getLogger(__name__)

SWEEP_BUDGET_S = 13.0
"""No further pass over the sweep starts after this, so that the whole stays under 20 s. Forwards of billions
of weights take longer: of their first pass, what no fit needs is then left out."""

PASSES = 5
"""Passes over the sweep after the one that warms up."""

ANCHOR_PASSES = 3
"""Passes over the anchors after the one that warms up."""

ANCHOR_TRIES = 2
"""Tries before anchors that disagree are believed: a stall must not cost a whole calibration."""

MIN_SAMPLES = 4
"""Of each part, whatever the time: fewer cannot fix its parameters. And as many of its points."""

ROUNDS_PER_BATCH = 5
"""Rounds run to price a batch: the first warms up, and the median of four survives one stall."""

DRAFT_GAMMA = 4
PROMPT_IDS = tuple(range(3, 11))
"""Short of a KV page, so that no page of a throw-away prompt is ever kept for others."""


def calibrate(
    engine: Engine,
    controller_config: ControllerConfig,
    *,
    key: str,
    budget_s: float = SWEEP_BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> Calibration:
    """Time forwards and rounds of an idle engine and return the fit. Takes under 20 s on two slow cores."""
    if engine.busy:
        raise ValueError("calibrate only an idle engine")
    shapes = engine.part_shapes()
    neighbours = Neighbours()
    points = _points(engine, shapes, controller_config)
    with Progress("calibrating", total=len(points) * (PASSES + 1), unit="forwards") as progress:
        times = _sweep(engine, points, progress, until_s=clock() + budget_s, clock=clock)
        progress.note("whole rounds")
        extras = _price_rounds(engine, shapes, until_s=clock() + budget_s / 3, clock=clock)
    samples = [
        Sample(
            part=point.part,
            rows=point.rows,
            sequences=point.sequences,
            context_tokens=point.context_tokens,
            seconds=seconds + extras.draft_s(point.part, point.rows),
        )
        for point, measured in times.items()
        for seconds in _faster_half(measured)
    ]
    timings = tuple(
        timing_of(
            seconds,
            part=point.part,
            rows=point.rows,
            sequences=point.sequences,
            context_tokens=point.context_tokens,
        )
        for point, seconds in times.items()
        if seconds
    )
    fitted = fit([*samples, *extras.other], shapes, key=key)
    return replace(
        fitted,
        drafts={name: fit_other(rounds) for name, rounds in extras.per_round.items()},
        quality=judge(timings, others_frac=neighbours.share()),
        taken_utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        timings=timings,
    )


def contradiction(engine: Engine, calibration: Calibration) -> str:
    """Take a few forwards of a calibration again; return in words what no longer holds, empty for nothing.

    Takes about a second. The engine must be idle.
    """
    anchors = anchors_of(calibration.timings)
    wanted = [timing for pair in anchors.values() for timing in pair]
    fastest_s: dict[Timing, float] = {}
    said = ""
    for _ in range(ANCHOR_TRIES):
        for number in range(ANCHOR_PASSES + 1):
            for t in wanted:
                try:
                    seconds = engine.time_forward(
                        t.part, rows=t.rows, context_tokens=t.context_tokens, sequences=t.sequences
                    )
                except CapacityError as error:
                    return f"a forward it holds does not fit any more: {error}"
                if number > 0:
                    fastest_s[t] = min(seconds, fastest_s.get(t, seconds))
        said = disagreement(anchors, fastest_s)
        if not said:
            break
    return said


# ---- single forwards ------------------------------------------------------------------------------


def _points(engine: Engine, shapes: Mapping[str, PartShape], config: ControllerConfig) -> list[SweepPoint]:
    traits = engine.traits
    longest = max((drafter.max_gamma for drafter in traits.drafters), default=1)
    return sweep_plan(
        shapes,
        traits.max_batch,
        max_context_tokens=max(8, min(512, traits.max_context_tokens // 2)),
        max_gamma=min(max(config.gammas), longest),
    )


def _sweep(
    engine: Engine,
    points: Sequence[SweepPoint],
    progress: Progress,
    *,
    until_s: float,
    clock: Callable[[], float],
) -> dict[SweepPoint, list[float]]:
    """Return the seconds of every point that fits the engine; the first pass is not among them.

    It is where it alone took longer than there is time: what warms up is little of such forwards.
    """
    live = list(points)
    times: dict[SweepPoint, list[float]] = {point: [] for point in points}
    first: dict[SweepPoint, float] = {}
    for number in range(PASSES + 1):
        for point in list(live):
            if number == 0 and clock() > until_s and _timed(first, point.part) >= MIN_SAMPLES:
                live.remove(point)
                del times[point]
                continue
            try:
                seconds = engine.time_forward(
                    point.part,
                    rows=point.rows,
                    context_tokens=point.context_tokens,
                    sequences=point.sequences,
                )
            except CapacityError as error:
                log.info("calibration leaves out %s: %s", point, error)
                live.remove(point)
                del times[point]
                continue
            if number > 0:
                times[point].append(seconds)
            else:
                first[point] = seconds
            progress.advance(note=f"{point.part}, {point.rows} rows")
        if number == 0 and clock() > until_s:
            log.info("calibration took %d of %d forwards, once each", len(live), len(points))
            times = {point: [first[point]] for point in live}
        if clock() > until_s and _enough(times):
            log.info("calibration stops after %d of %d passes", number, PASSES)
            break
    return times


def _timed(first: Mapping[SweepPoint, float], part: str) -> int:
    return sum(point.part == part for point in first)


def _enough(times: Mapping[SweepPoint, Sequence[float]]) -> bool:
    kept: dict[str, int] = {}
    for point, seconds in times.items():
        kept[point.part] = kept.get(point.part, 0) + len(_faster_half(seconds))
    return all(count >= MIN_SAMPLES for count in kept.values())


def _faster_half(seconds: Sequence[float]) -> list[float]:
    # Other work on the machine only ever makes a forward longer.
    return sorted(seconds)[: (len(seconds) + 1) // 2]


# ---- whole rounds ---------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Extras:
    """What rounds cost beside the forwards ``time_forward`` sees."""

    other: list[Sample] = field(default_factory=list)
    """A plain round minus its forward: choosing, committing, bookkeeping."""

    per_pass: dict[str, dict[int, float]] = field(default_factory=dict)
    """By drafter and rows: seconds of a draft pass beside its forward."""

    per_round: dict[str, list[Sample]] = field(default_factory=dict)
    """By drafter: seconds of a round's drafting beside its passes, whose ``rows`` are sequences."""

    def draft_s(self, part: str, rows: int) -> float:
        """Return what a pass of ``part`` over ``rows`` costs beside its forward; 0 for the policy."""
        known = self.per_pass.get(part)
        if not known:
            return 0.0
        at = sorted(known)
        return float(np.interp(rows, at, [known[r] for r in at]))


def _price_rounds(
    engine: Engine, shapes: Mapping[str, PartShape], *, until_s: float, clock: Callable[[], float]
) -> _Extras:
    """Price batches, the two ends first; all but a single sequence are left out when the time is over."""
    extras = _Extras()
    drafters = {d.name: d for d in engine.traits.drafters if shapes[d.name].rows_per_draft_token > 0}
    largest = engine.traits.max_batch
    for number, batch in enumerate(dict.fromkeys(min(b, largest) for b in (1, largest, 4, 16))):
        if number >= 1 and clock() > until_s:
            log.info("calibration leaves out rounds of %d sequences and more", batch)
            break
        plain = _run_rounds(engine, batch, AR_ASSIGNMENT)
        if plain:
            seconds = max(_beside_forward_s(engine, plain, batch), 1e-6)
            extras.other.append(
                Sample(part=OTHER, rows=batch, sequences=batch, context_tokens=0, seconds=seconds)
            )
        for name, traits in drafters.items():
            gamma = min(DRAFT_GAMMA, traits.max_gamma)
            if shapes[name].lane_loops:
                passes = shapes[name].passes_of(batch, alone=True)
                _price_lanes(engine, extras, name, batch, gamma=gamma, most_tokens=passes)
            else:
                _price_drafts(engine, extras, name, batch, gamma=gamma)
    return extras


def _price_drafts(engine: Engine, extras: _Extras, name: str, batch: int, *, gamma: int) -> None:
    """Tell what each pass costs beside its forward from what the round does: a long draft costs the latter
    once, too."""
    short, long = (_beside_passes(engine, name, batch, gamma=g) for g in (1, gamma))
    if short is None or long is None:
        return
    more_passes = long[0] - short[0]
    pass_s = (long[1] - short[1]) / more_passes if more_passes > 0 else short[1] / short[0]
    pass_s = min(max(pass_s, 0.0), long[1] / long[0])
    extras.per_pass.setdefault(name, {})[batch] = pass_s
    round_s = max(min(short[1] - short[0] * pass_s, long[1] - long[0] * pass_s), 0.0)
    extras.per_round.setdefault(name, []).append(
        Sample(part=name, rows=batch, sequences=batch, context_tokens=0, seconds=round_s)
    )


def _price_lanes(
    engine: Engine, extras: _Extras, name: str, batch: int, *, gamma: int, most_tokens: int
) -> None:
    """Tell what each pass of lanes costs beside its forward; what their rounds do is spread over them.

    ``most_tokens`` is what a round may commit of each sequence: one that ends cuts the round of all short.
    """
    beside = _beside_passes(engine, name, batch, gamma=gamma, most_tokens=most_tokens)
    if beside is not None:
        passes, seconds, rows = beside
        extras.per_pass.setdefault(name, {})[rows] = seconds / passes


def _beside_passes(
    engine: Engine, name: str, batch: int, *, gamma: int, most_tokens: int = DRAFT_GAMMA + 1
) -> tuple[float, float, int] | None:
    """Return passes of a round in which all draft, what drafting took beside their forwards, and the rows of
    a pass; None where none drafted."""
    facts = _run_rounds(engine, batch, Assignment(drafter=name, gamma=gamma), most_tokens=most_tokens)
    costs = [(f, d) for f in facts for d in f.drafts if d.drafter == name and d.passes and not d.failures]
    if not costs:
        return None
    rows = round(statistics.median(d.rows / d.passes for _, d in costs))
    forward_s = None
    seconds = []
    for f, d in costs:
        if f.draft_pass is not None:
            seconds.append(f.draft_s - f.draft_pass.forward_s)
            continue
        if forward_s is None:
            forward_s = _forward_s(engine, name, batch, rows=rows)
        seconds.append(d.seconds - d.passes * forward_s)
    passes = statistics.median(d.passes for _, d in costs)
    return passes, max(statistics.median(seconds), 0.0), rows


def _beside_forward_s(engine: Engine, plain: Sequence[RoundFacts], batch: int) -> float:
    """Return what plain rounds took beside their forward.

    A round that tells its forward's time is taken at its word: a forward timed a moment later may meet
    another machine, and what it differs by would pass for work outside the forward.
    """
    told = [f.total_s - f.policy_pass.forward_s for f in plain if f.policy_pass is not None]
    if told:
        return statistics.median(told)
    return statistics.median(f.total_s for f in plain) - _forward_s(engine, POLICY, batch)


def _forward_s(engine: Engine, part: str, batch: int, *, rows: int | None = None) -> float:
    context_tokens = len(PROMPT_IDS) + 2
    return statistics.median(
        engine.time_forward(part, rows=rows or batch, context_tokens=context_tokens, sequences=batch)
        for _ in range(3)
    )


def _run_rounds(
    engine: Engine, batch: int, assignment: Assignment, *, most_tokens: int = DRAFT_GAMMA + 1
) -> list[RoundFacts]:
    """Run a few rounds of ``batch`` throw-away requests; return those in which all of them decoded.

    ``most_tokens`` is what a round may commit of each.
    """
    name = f"calibration/{assignment.drafter}/{batch}"
    room = engine.traits.max_context_tokens - len(PROMPT_IDS)
    params = SamplingParams(max_tokens=min(room, (ROUNDS_PER_BATCH + 1) * most_tokens), ignore_eos=True)
    keys = [(f"{name}/{i}", 0) for i in range(batch)]
    facts: list[RoundFacts] = []
    try:
        for i, (uid, sample) in enumerate(keys):
            engine.add(
                Request(prompt_uid=uid, sample_index=sample, prompt_ids=PROMPT_IDS, params=params, seed=i)
            )
        for _ in range(2 * ROUNDS_PER_BATCH):
            load = engine.load()
            plan = RoundPlan(assignments={s.key: assignment for s in load.sequences}, reason="calibration")
            outcome = engine.run_round(plan)
            if outcome.facts.batch == batch and outcome.facts.prefill_rows == 0:
                facts.append(outcome.facts)
            if len(facts) == ROUNDS_PER_BATCH or not engine.busy:
                break
    finally:
        for key in keys:
            engine.abort(key, reason="calibration is over")
    return facts[1:]
