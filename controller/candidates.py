"""Which drafter each sequence would use, and what its draft tokens promise.

Shapes in this file: B sequences, P positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from controller.cost import DraftLine

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@lru_cache(maxsize=64)
def positions_to(last: int) -> Ints:
    """Return 1 to ``last``, read-only: plans ask for the same few every time."""
    positions: Ints = np.arange(1, last + 1)
    positions.flags.writeable = False
    return positions


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Which drafter each sequence would use, and what its draft tokens are worth."""

    label: str
    drafter_B: tuple[str, ...]
    survival_BP: Floats
    cap_B: Ints
    model_B: NDArray[np.bool_]
    """Sequences whose drafter runs a model: their positions cost passes."""

    line: DraftLine
    """Of that model; zero when none is used."""

    switch_s_B: Floats | None = None
    """Seconds of catching the drafter up, spread over rounds; None when no sequence needs it."""

    free_s: float = 0.0
    """Seconds of asking drafters that run no model."""

    reuse_frac: float = 0.0
    """Share of the policy's forward that the model leaves done for every row it drafted from."""

    @property
    def all_model(self) -> bool:
        """Whether every sequence's drafter runs a model."""
        return bool(self.model_B.all())


def mixed(
    model: Candidates, free: Sequence[Candidates], *, row_worth: float, plain_per_s: float
) -> Candidates | None:
    """Return ``model`` with the sequences moved to a free drafter that gain more there.

    None when none or all of them move: that is what one of the drafters alone stands for already.

    Gain is what the kept tokens are worth beyond the rows they take, at plain decoding's rate; under the
    model a token also pays its draft row and its share of the pass, and only what its draft left undone of
    its row. ``row_worth`` is the tokens plain decoding commits in the time of one policy row,
    ``plain_per_s`` those per second.
    """
    drafting = max(1, int(np.count_nonzero(model.cap_B)))
    verified_worth = row_worth * (1.0 - model.reuse_frac)
    gain_B = _gain(model, verified_worth + (model.line.row_s + model.line.pass_s / drafting) * plain_per_s)
    gains = [_gain(other, row_worth) for other in free]
    moved = [(other.cap_B > 0) & (gain >= gain_B) for other, gain in zip(free, gains, strict=True)]
    leaves_B = moved[0] if len(moved) == 1 else np.logical_or.reduce(moved)
    if not 0 < np.count_nonzero(leaves_B) < len(leaves_B):
        # Later drafters only have to beat more, so none moves that did not move here.
        return None
    drafter_B = np.asarray(model.drafter_B, dtype=object)
    survival_BP, cap_B, model_B = model.survival_BP.copy(), model.cap_B.copy(), model.model_B.copy()
    free_s, switch_s_B = 0.0, None if model.switch_s_B is None else model.switch_s_B.copy()
    positions = survival_BP.shape[1]
    for other, other_gain_B in zip(free, gains, strict=True):
        moved_B = (other.cap_B > 0) & (other_gain_B >= gain_B)
        width = min(positions, other.survival_BP.shape[1])
        gain_B = np.where(moved_B, other_gain_B, gain_B)
        drafter_B[moved_B] = other.label
        survival_BP[moved_B] = 0.0
        survival_BP[moved_B, :width] = other.survival_BP[moved_B, :width]
        cap_B[moved_B] = np.minimum(other.cap_B, width)[moved_B]
        model_B[moved_B] = False
        free_s += other.free_s
        if switch_s_B is not None:
            switch_s_B[moved_B] = 0.0
    return Candidates(
        label=f"{model.label}+{'+'.join(f.label for f in free)}",
        drafter_B=tuple(drafter_B.tolist()),
        survival_BP=survival_BP,
        cap_B=cap_B,
        model_B=model_B,
        line=model.line,
        switch_s_B=switch_s_B,
        free_s=free_s,
        reuse_frac=model.reuse_frac,
    )


def _gain(candidates: Candidates, row_worth: float) -> NDArray[np.float64]:
    """Return per sequence the worth of its best number of draft tokens beyond their rows."""
    within = positions_to(candidates.survival_BP.shape[1]) <= candidates.cap_B[:, None]
    return np.asarray(np.maximum(0.0, (candidates.survival_BP - row_worth) * within).sum(1))
