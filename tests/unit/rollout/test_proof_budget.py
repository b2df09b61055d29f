"""What an arm of the proof is priced at, on a machine whose forwards take what its weights take."""

import pytest

from controller.types import AR, POLICY, PartShape
from rollout.proof.budget import (
    ASSUMED_ACCEPTANCE,
    LONG_S,
    TIMED_ROWS,
    ArmPrices,
    PricedArm,
    affordable_tokens,
)
from rollout.testing import tiny_policy
from rollout.testing_native import tiny_engine

LOOPS, LOOP_S = 4, 0.025
"""Seconds that dwarf what a round costs beside its forwards."""

ALPHA = ASSUMED_ACCEPTANCE


def shape(name: str, *, reuse_frac: float = 0.0, lanes: bool = False) -> PartShape:
    return PartShape(
        name=name,
        weight_bytes=1,
        flops_per_row=1.0,
        kv_bytes_per_token=1,
        flops_per_context_token=1.0,
        reuse_frac=reuse_frac,
        lane_loops=LOOPS if lanes else 0,
        lane_depth=int(lanes),
    )


def prices(*, rows_cost: bool = False) -> ArmPrices:
    """Forwards of ``LOOP_S`` a loop whatever their rows, or of that for each row."""

    def seconds(loops: int) -> dict[int, float]:
        return {rows: loops * LOOP_S * (rows if rows_cost else 1) for rows in (1, 8, 128)}

    return ArmPrices(
        shapes={
            POLICY: shape(POLICY),
            "shallow_loop_1": shape("shallow_loop_1", reuse_frac=1 / LOOPS),
            "wavefront": shape("wavefront", lanes=True),
            "history": shape("history"),
        },
        times={POLICY: seconds(LOOPS), "shallow_loop_1": seconds(1), "wavefront": seconds(1), "history": {}},
    )


def priced(drafter: str, gamma: int, *, batch: int = 1, rows_cost: bool = False) -> float:
    """Return a token's price in loops of plain decoding."""
    arm = PricedArm(batch=batch, drafter=drafter, gamma=gamma)
    plain = PricedArm(batch=1, drafter=AR, gamma=0)
    table = prices(rows_cost=rows_cost)
    return LOOPS * table.token_s(arm) / table.token_s(plain)


def test_a_token_in_lanes_is_priced_by_its_passes_and_nothing_else() -> None:
    full = ALPHA * 1 + (1 - ALPHA) * LOOPS
    assert priced("wavefront", LOOPS - 1) == pytest.approx(full, rel=0.01)
    assert priced("wavefront", 1) == pytest.approx(ALPHA * LOOPS / 2 + (1 - ALPHA) * LOOPS, rel=0.01)


def test_lanes_that_a_pipeline_has_no_place_for_cost_nothing() -> None:
    assert priced("wavefront", 8) == pytest.approx(priced("wavefront", LOOPS - 1))
    assert priced("wavefront", 8, rows_cost=True) == pytest.approx(
        priced("wavefront", LOOPS - 1, rows_cost=True)
    )


def test_lanes_cost_their_rows_where_rows_cost() -> None:
    """All lanes of a pipeline are computed, those that fall as well: never less than plain decoding."""
    assert priced("wavefront", 3, rows_cost=True) > LOOPS


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_drafts_are_priced_with_their_round(gamma: int) -> None:
    """Where weights alone cost: a loop per draft and a whole forward, for what is likely to be kept."""
    kept = sum(ALPHA**k for k in range(gamma + 1))
    assert priced("shallow_loop_1", gamma) == pytest.approx((gamma + LOOPS) / kept, rel=0.01)
    assert priced("history", gamma) == pytest.approx(LOOPS / kept, rel=0.01)


def test_loops_that_drafts_have_computed_are_not_priced_again() -> None:
    """Where rows cost: gamma drafts and the last one's fill run the first loop, gamma + 1 rows the rest."""
    gamma = 4
    kept = sum(ALPHA**k for k in range(gamma + 1))
    loops = gamma + 1 + (gamma + 1) * (LOOPS - 1)
    # The fill is priced as that share of a whole forward.
    assert priced("shallow_loop_1", gamma, rows_cost=True) == pytest.approx(loops / kept, rel=0.01)


@pytest.mark.parametrize(
    ("row_s", "timed"),
    [(0.001, [rows for rows in TIMED_ROWS for _ in range(3)]), (0.07, [1, 1, 1, 8]), (LONG_S, [1])],
)
def test_long_forwards_are_timed_once_and_none_that_are_wider(
    row_s: float, timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = tiny_engine(tiny_policy(), compiled=True), list[int]()

    def time_forward(part: str, *, rows: int, context_tokens: int, sequences: int) -> float:
        seen.append(rows)
        return rows * row_s

    monkeypatch.setattr(engine, "time_forward", time_forward)
    arm = PricedArm(batch=1, drafter=AR, gamma=0)
    tokens = affordable_tokens(engine, [arm], requests=1, within_s=30 * row_s, most=100)
    assert seen == timed
    assert 15 <= tokens <= 25
