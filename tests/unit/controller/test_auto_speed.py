from statistics import fmean

import pytest

from controller.config import ControllerConfig
from controller.decide import build_controller
from controller.testing import (
    W4_ONLY,
    SimulatedMachine,
    auto,
    constant,
    drain_s,
    load_of,
    regret_of,
    traits_of,
)
from controller.types import POLICY

# Speed against the best that was possible. Two dozen simulations, 18000 rounds in all.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("batch", "acceptance"), [(1, 0.97), (1, 0.6), (2, 0.9), (4, 0.8), (8, 0.9), (16, 0.97), (32, 0.9)]
)
def test_auto_reaches_97_percent_of_the_best_plan(batch: int, acceptance: float) -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(acceptance), seed=batch)
    found = regret_of(machine, auto(machine), lambda r: load_of(batch, round_index=r), rounds=500)
    assert found.of_best >= 0.97


@pytest.mark.parametrize(
    ("batch", "acceptance"), [(1, 0.3), (2, 0.4), (4, 0.45), (8, 0.6), (12, 0.7), (16, 0.8), (32, 0.95)]
)
def test_auto_keeps_98_percent_of_plain_decoding_where_speculation_never_pays(
    batch: int, acceptance: float
) -> None:
    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(acceptance), seed=batch)
    found = regret_of(machine, auto(machine), lambda r: load_of(batch, round_index=r), rounds=800)
    assert found.of_ar >= 0.98


@pytest.mark.parametrize(("batch", "acceptance"), [(2, 0.45), (4, 0.55), (8, 0.7), (16, 0.85)])
def test_a_model_that_flatters_speculation_is_found_out(batch: int, acceptance: float) -> None:
    def misfit(part: str, rows: int, sequences: int) -> float:
        return (1.08 if rows > sequences else 0.96) if part == POLICY else 1.0

    machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(acceptance), misfit=misfit, seed=batch)
    found = regret_of(machine, auto(machine), lambda r: load_of(batch, round_index=r), rounds=1000)
    assert found.of_ar >= 0.98


@pytest.mark.parametrize(("batch", "acceptance"), [(1, 0.9), (4, 0.9), (8, 0.8), (10, 0.9), (12, 0.9)])
def test_auto_follows_memory_that_changes_speed_by_40_percent(batch: int, acceptance: float) -> None:
    machine = SimulatedMachine(
        shapes=W4_ONLY,
        hazard=constant(acceptance),
        slowdown=lambda r: 1.4 if (r // 250) % 2 else 1.0,
        seed=batch,
    )
    found = regret_of(
        machine,
        auto(machine),
        lambda r: load_of(batch, round_index=r),
        rounds=1000,
        phase=lambda r: (r // 250) % 2,
    )
    assert found.of_best >= 0.97


def test_a_drain_ends_sooner_than_plain_decoding() -> None:
    """On the mean of three machines; the best plan of every round would end them 1.24 times as soon."""
    lengths = [20 + 9 * (i % 8) for i in range(24)] + [200, 240, 300, 340, 400, 460, 520, 600]
    sooner = []
    for seed in range(3):
        seconds = {}
        for kind in ("ar", "auto"):
            machine = SimulatedMachine(shapes=W4_ONLY, hazard=constant(0.92), seed=seed)
            controller = build_controller(
                ControllerConfig(kind=kind),  # type: ignore[arg-type]
                traits_of(W4_ONLY),
                W4_ONLY,
                machine.calibration(),
            )
            seconds[kind] = drain_s(machine, controller, lengths)
        sooner.append(seconds["ar"] / seconds["auto"])
    assert fmean(sooner) > 1.18
