"""The sweep: every drafter and gamma against plain decoding, by concurrency and length.

Cells, lockstep, pairing and text guards are the benchmark's. A cell's texts are known before it starts, so an
arm whose text is another stops the sweep.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from controller.config import ControllerConfig
from controller.types import AR, POLICY, EngineTraits
from drafters.wavefront import WAVEFRONT
from rollout.bench.arms import ArmSpec, EngineArms, Work, fixed_arm
from rollout.bench.cell import Cell
from rollout.bench.pairing import Claim, PairedRatio
from rollout.engine.native.engine import NativeEngine
from rollout.evaluation.questions import Selection
from rollout.job_config import EvaluateConfig

MARGIN_FRAC = 0.1
"""What a ratio should be known to; trials are a fixed number, so this only says what is still undecided."""

ROUND_OVER_FORWARD = 1.4
"""A round of any arm over a plain one, per token committed: arms that win make up for those that lose."""


FEWEST_ROWS = 2
"""Texts of a trial, or the concurrency: one text alone says little of a drafter."""

FEWEST_TRIALS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """One concurrency and length, and how many texts a trial of it has."""

    concurrency: int
    length: int
    rows: int

    @property
    def prefix(self) -> str:
        """Names its results."""
        return f"c{self.concurrency}_t{self.length}_"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A concurrency and length that was asked for and is not measured."""

    concurrency: int
    length: int
    reason: str


def draft_lengths(
    drafter: str, gammas: Sequence[int], *, traits: EngineTraits, most_lanes: int
) -> tuple[int, ...]:
    """Return the gammas a drafter can be asked for; those that come to the same are one.

    ``most_lanes`` are the tokens of one sequence under way in a full pipeline: beyond them lanes wait.
    """
    most = next(d.max_gamma for d in traits.drafters if d.name == drafter)
    if drafter == WAVEFRONT:
        most = min(most, most_lanes - 1)
    return tuple(sorted({min(gamma, most) for gamma in gammas}))


def arm_name(drafter: str, gamma: int) -> str:
    """Name an arm."""
    return f"{drafter}_k{gamma}"


def sweep_arms(controller: ControllerConfig, gammas_of: Mapping[str, Sequence[int]]) -> dict[str, ArmSpec]:
    """Return plain decoding and every drafter at each of its gammas, by name."""
    specs = {AR: ArmSpec(name=AR, drafters=(), controller=replace(controller, kind="ar"))}
    for drafter, gammas in gammas_of.items():
        for gamma in gammas:
            name = arm_name(drafter, gamma)
            specs[name] = replace(fixed_arm(controller, drafter, gamma=gamma), name=name)
    return specs


def plan_spots(
    config: EvaluateConfig, *, token_s: Callable[[int], float], arms: int, within_s: float
) -> tuple[list[Spot], list[LeftOut]]:
    """Return what can be measured in time, and what is left out. Pure.

    ``token_s`` tells the seconds of one token of plain decoding by concurrency. One run of every arm to warm
    up comes on top of the trials. Rows are halved, down to ``FEWEST_ROWS``, until all trials fit; then cells
    are left out, the dearest first, until ``FEWEST_TRIALS`` of each do; one is always kept.
    """
    wanted = [(c, t) for t in sorted(config.lengths) for c in sorted(config.concurrencies)]

    token_s_at = {concurrency: token_s(concurrency) for concurrency in config.concurrencies}

    def trial_s(spot: Spot) -> float:
        return arms * spot.rows * spot.length * token_s_at[spot.concurrency] * ROUND_OVER_FORWARD

    def fits(trials: int) -> bool:
        return (trials + 1) * sum(map(trial_s, spots)) <= within_s

    rows, spots = config.rows, [Spot(concurrency=c, length=t, rows=max(config.rows, c)) for c, t in wanted]
    while rows > FEWEST_ROWS and not fits(config.trials):
        rows = max(FEWEST_ROWS, rows // 2)
        spots = [Spot(concurrency=c, length=t, rows=max(rows, c)) for c, t in wanted]
    left_out = []
    while len(spots) > 1 and not fits(FEWEST_TRIALS):
        dearest = max(spots, key=trial_s)
        spots.remove(dearest)
        left_out.append(
            LeftOut(
                concurrency=dearest.concurrency,
                length=dearest.length,
                reason=f"a trial would take about {trial_s(dearest):.0f} s: raise evaluate.max_minutes",
            )
        )
    return spots, left_out


def plain_token_s(engine: NativeEngine, *, context_tokens: int) -> Callable[[int], float]:
    """Return what tells the seconds of one token of plain decoding by concurrency, from single forwards."""

    def token_s(concurrency: int) -> float:
        times = [
            engine.time_forward(
                POLICY, rows=concurrency, context_tokens=context_tokens, sequences=concurrency
            )
            for _ in range(3)
        ]
        return (sorted(times)[1] + ROUND_S) / concurrency

    return token_s


ROUND_S = 0.0005
"""Of a round outside its forward, about: it decides how much is planned, never a result."""


def sweep_cells(
    spots: Sequence[Spot],
    selection: Selection,
    arms: EngineArms,
    specs: Mapping[str, ArmSpec],
    config: EvaluateConfig,
    *,
    seed: int,
) -> tuple[list[tuple[Spot, Cell]], list[LeftOut]]:
    """Return a cell per spot that has enough questions, and what is left out for want of them."""
    cells, left_out = [], []
    for spot in spots:
        found = selection.by_length[spot.length][: spot.rows]
        if len(found) < spot.concurrency:
            left_out.append(
                LeftOut(
                    concurrency=spot.concurrency,
                    length=spot.length,
                    reason=f"too few texts, {len(found)}, have {spot.length} tokens and do not echo",
                )
            )
            continue
        work = Work(
            prompts=tuple(q.prompt for q in found),
            max_tokens=(spot.length,) * len(found),
            ignore_eos=True,  # none of them ends earlier
            temperature=config.temperature,
            run_seed=seed,
            rows_at_once=spot.concurrency,
            names=tuple(q.name for q in found),
        )
        cell = Cell(
            prefix=spot.prefix,
            arms=arms,
            specs=dict(specs),
            work=work,
            ratios=[_ratio(spot.prefix, name, trials=config.trials) for name in specs if name != AR],
            seed=seed,
            cap_tokens=spot.length,
        )
        cell.guard.texts = tuple(q.text[: spot.length] for q in found)
        cells.append((spot, cell))
    return cells, left_out


def _ratio(prefix: str, name: str, *, trials: int) -> PairedRatio:
    claim = Claim(name=f"{prefix}{name}_over_{AR}", a=name, b=AR, margin=MARGIN_FRAC)
    return PairedRatio(claim, min_pairs=trials, max_pairs=trials)
