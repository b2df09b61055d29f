"""A sweep under way: its cells, the forwards timed beside them, and what both say of the cost law."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.types import AR, POLICY
from rollout.bench.cell import Cell
from rollout.bench.schedule import Note
from rollout.bench.summary import RoundSummary, Totals
from rollout.engine.native.decoder import Decoder
from rollout.evaluation.cost_law import RoundWork, lane_law, predict
from rollout.evaluation.forward_times import ForwardTimes, timed_rows
from rollout.evaluation.goals import Measured
from rollout.evaluation.questions import Selection
from rollout.evaluation.sweep import LeftOut, Spot


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One arm of the sweep."""

    drafter: str
    depth: int
    """Loops after which drafts are read out; 0 for those that are no readout of the policy."""

    gamma: int


@dataclass(kw_only=True, slots=True)
class SweptSpot:
    """A cell of the sweep, and forwards timed alone beside each of its repetitions: a ``Repeated``."""

    spot: Spot
    cell: Cell
    times: ForwardTimes
    parts: Sequence[str]
    """Whose forwards are timed."""

    @classmethod
    def of(
        cls,
        spot: Spot,
        cell: Cell,
        arms: Mapping[str, Arm],
        decoder: Decoder,
        *,
        context_tokens: int,
        lane_depth: int,
    ) -> "SweptSpot":
        """Return the spot, nothing timed yet; ``decoder`` holds the policy."""
        engine = cell.arms.engine
        shapes = engine.part_shapes()
        drafters = {arm.drafter for arm in arms.values()}
        models = [name for name in drafters if shapes[name].rows_per_draft_token]
        rows = timed_rows(
            spot.concurrency,
            [arm.gamma for arm in arms.values()],
            most_lanes=max((shapes[name].most_lanes for name in drafters), default=1),
        )
        times = ForwardTimes(
            engine,
            decoder,
            concurrency=spot.concurrency,
            context_tokens=context_tokens,
            rows=rows,
            lane_depth=lane_depth,
            arms=len(cell.specs),
        )
        return cls(spot=spot, cell=cell, times=times, parts=[POLICY, *sorted(models)])

    @property
    def prefix(self) -> str:
        """The cell's."""
        return self.cell.prefix

    @property
    def open(self) -> bool:
        """Whether another trial is wanted."""
        return self.cell.open

    @property
    def settled(self) -> bool:
        """Whether every ratio of the cell is known well enough."""
        return self.cell.settled

    def prepare(self, note: Note) -> None:
        """Run every arm once, uncounted."""
        self.cell.prepare(note)

    def repeat(self, note: Note) -> None:
        """Time forwards, then run a trial."""
        self.times.sample(self.parts)
        self.cell.repeat(note)


@dataclass(kw_only=True, slots=True)
class Sweep:
    """All that was swept."""

    arms: Mapping[str, Arm] = field(default_factory=dict)
    """By name, plain decoding left out."""

    spots: Sequence[SweptSpot] = ()
    left_out: Sequence[LeftOut] = ()
    selection: Selection | None = None
    trials: int = 0
    """Wanted of every spot."""

    loops: int = 1
    lane_depth: int = 1

    def measured(self) -> list[Measured]:
        """Return what every spot that was run found."""
        return [self._measured(swept) for swept in self.spots if AR in swept.cell.summaries]

    def _measured(self, swept: SweptSpot) -> Measured:
        cell = swept.cell
        works = {name: _work(cell, name) for name in cell.summaries}
        predictions, laws = [], []
        for name, arm in self.arms.items():
            work, plain = works.get(name), works[AR]
            if work is None or plain is None:
                continue
            shapes = cell.arms.engine.part_shapes()
            predictions.append(
                predict(
                    name,
                    arm.drafter,
                    arm.gamma,
                    plain=plain,
                    work=work,
                    shapes=shapes,
                    times=swept.times,
                    loops=self.loops,
                )
            )
            if shapes[arm.drafter].lane_loops and arm.gamma + 1 >= shapes[arm.drafter].most_lanes:
                alpha = _acceptance(cell, name, arm.drafter)
                laws.append(lane_law(name, depth=self.lane_depth, loops=self.loops, alpha=alpha, work=work))
        return Measured(
            spot=swept.spot,
            ratios={r.claim.a: r for r in cell.ratios},
            drafters={name: arm.drafter for name, arm in self.arms.items()},
            predictions=predictions,
            lane_laws=laws,
        )


def _acceptance(cell: Cell, name: str, drafter: str) -> float:
    counts = RoundSummary.merged(cell.summaries[name]).acceptance.get(drafter)
    return 0.0 if counts is None else counts.rate


def decoding_totals(cell: Cell, name: str) -> Totals:
    """Return the sums over an arm's rounds without prompt rows, all trials together."""
    return RoundSummary.merged(cell.summaries[name]).decoding()


def _work(cell: Cell, name: str) -> RoundWork | None:
    """Return what an arm's rounds did; None where all of them had prompt rows."""
    totals = decoding_totals(cell, name)
    return RoundWork.of(totals) if totals.decoded else None
