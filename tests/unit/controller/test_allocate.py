import itertools

import numpy as np
import pytest

from controller.allocate import Batch, allocate, allocate_uniform, batch_of, slots_of
from controller.calibration import Calibration, PartFit
from controller.candidates import Candidates
from controller.config import ControllerConfig
from controller.cost import CostModel
from controller.testing import SMALL_COSTS, SMALL_POLICY, SMALL_W4, load_of
from controller.types import POLICY, SequenceLoad

SHAPES = {POLICY: SMALL_POLICY, "w4": SMALL_W4}


def cost_model() -> CostModel:
    parts = {
        name: PartFit(
            bandwidth_bytes_per_s=c.bandwidth_bytes_per_s,
            flops_per_s=c.flops_per_s,
            context_factor=c.context_factor,
            overhead_s=c.overhead_s,
            overhead_s_per_row=c.overhead_s_per_row,
            samples=9,
            mape_frac=0.0,
            worst_frac=0.0,
        )
        for name, c in SMALL_COSTS.items()
    }
    return CostModel(SHAPES, Calibration(key="exact", parts=parts), ControllerConfig())


def candidates(batch: Batch, survival: np.ndarray, *, cap: int, cost: CostModel) -> Candidates:
    return Candidates(
        label="w4",
        drafter_B=("w4",) * batch.size,
        survival_BP=survival,
        cap_B=np.minimum(batch.room_B, cap),
        model_B=np.full(batch.size, True),
        line=cost.draft_line("w4", sequences=batch.size, mean_context_tokens=300.0),
    )


def batch(size: int, **load: int) -> Batch:
    return batch_of(load_of(size, **load).sequences, tail_weight=0.0, tail=False)


def brute_force(b: Batch, c: Candidates, cost: CostModel, deepest: int) -> float:
    """Best tokens per second over every combination of gammas, priced with the same line."""
    best = 0.0
    base, per_row = cost.other_line_s(speculates=True)
    read = b.read_tokens
    for gammas in itertools.product(*(range(int(cap) + 1) for cap in c.cap_B)):
        if not any(gammas) or max(gammas) > deepest:
            continue
        rows = b.size + sum(gammas)
        context = read + sum(g * x for g, x in zip(gammas, b.context_B, strict=True))
        seconds = float(
            cost.verify_curve_s(
                np.asarray([rows]), np.asarray([context]), sequences=b.size, read_tokens=read
            )[0]
        )
        seconds += base + rows * per_row + max(gammas) * c.line.pass_s + sum(gammas) * c.line.row_s
        worth = b.size + sum(float(c.survival_BP[i, :g].sum()) for i, g in enumerate(gammas))
        best = max(best, worth / seconds)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_greedy_is_within_half_a_percent_of_every_combination(seed: int) -> None:
    rng, cost = np.random.default_rng(seed), cost_model()
    size = int(rng.integers(1, 5))
    b = batch(size)
    survival = np.cumprod(rng.uniform(0.3, 0.99, size=(size, 1)) * np.ones((size, 5)), axis=1)
    c = candidates(b, survival, cap=5, cost=cost)
    found = allocate(b, c, cost, longest=(1, 2, 3, 4, 5), least_worth=0.0)
    assert found is not None
    assert found.worth_per_s >= 0.995 * brute_force(b, c, cost, 5)
    assert found.worth_per_s <= 1.000001 * brute_force(b, c, cost, 5)


def test_gammas_stay_within_caps_and_the_longest_allowed() -> None:
    cost = cost_model()
    sequences = tuple(
        SequenceLoad(key=i, context_tokens=300, generated_tokens=9, remaining_tokens=left)
        for i, left in enumerate((1, 2, 4, 100))
    )
    b = batch_of(sequences, tail_weight=0.0, tail=False)
    found = allocate(
        b, candidates(b, np.full((4, 8), 0.99), cap=6, cost=cost), cost, longest=(1, 2, 3, 4), least_worth=0.0
    )
    assert found is not None
    assert found.gamma_B[0] == 0
    assert (found.gamma_B <= [0, 1, 3, 4]).all()


def test_a_slot_that_cannot_pay_its_row_is_not_looked_at() -> None:
    cost, b = cost_model(), batch(4)
    c = candidates(b, np.full((4, 4), 0.3), cap=4, cost=cost)
    assert allocate(b, c, cost, longest=(1, 2), least_worth=0.4) is None
    assert len(slots_of(b, c, least_worth=0.2).worth_N) == 16


def test_every_prefix_of_the_slots_is_a_prefix_of_every_sequence() -> None:
    cost, b = cost_model(), batch(6)
    c = candidates(b, np.ones((6, 4)), cap=4, cost=cost)  # all ties
    slots, reached = slots_of(b, c, least_worth=0.0), np.zeros(6, dtype=int)
    for sequence, position in zip(slots.sequence_N, slots.position_N, strict=True):
        assert position == reached[sequence] + 1
        reached[sequence] += 1


def test_better_sequences_draft_more() -> None:
    cost, b = cost_model(), batch(4)
    shares = np.asarray([0.98, 0.9, 0.7, 0.3])[:, None]
    found = allocate(
        b,
        candidates(b, np.cumprod(np.repeat(shares, 6, 1), 1), cap=6, cost=cost),
        cost,
        longest=tuple(range(1, 7)),
        least_worth=0.0,
    )
    assert found is not None
    gammas = found.gamma_B.tolist()
    assert gammas == sorted(gammas, reverse=True)
    assert gammas[0] > gammas[3]


def test_one_gamma_for_all_is_the_best_of_the_allowed_ones() -> None:
    cost, b = cost_model(), batch(3)
    c = candidates(b, np.cumprod(np.full((3, 8), 0.9), 1), cap=8, cost=cost)
    found = allocate_uniform(b, c, cost, longest=(1, 2, 4, 8))
    free = allocate(b, c, cost, longest=tuple(range(1, 9)), least_worth=0.0)
    assert found is not None
    assert free is not None
    assert len(set(found.gamma_B.tolist())) == 1
    assert found.gamma_B[0] in (1, 2, 4, 8)
    assert 0.95 * free.worth_per_s < found.worth_per_s <= free.worth_per_s * 1.000001


def test_in_the_tail_a_token_of_the_longest_is_worth_more_and_worths_average_one() -> None:
    sequences = tuple(
        SequenceLoad(key=i, context_tokens=300, generated_tokens=done, remaining_tokens=900)
        for i, done in enumerate((60, 100, 140))
    )
    tail = batch_of(sequences, tail_weight=1.0, tail=True)
    assert tail.worth_B[0] < tail.worth_B[1] < tail.worth_B[2]
    assert tail.worth_B.mean() == pytest.approx(1.0)
    assert (batch_of(sequences, tail_weight=1.0, tail=False).worth_B == 1.0).all()


def test_work_that_the_limit_forbids_is_not_expected() -> None:
    sequences = tuple(
        SequenceLoad(key=i, context_tokens=300, generated_tokens=500, remaining_tokens=left)
        for i, left in enumerate((3, 500))
    )
    worth = batch_of(sequences, tail_weight=1.0, tail=True).worth_B
    assert worth[0] < worth[1]
