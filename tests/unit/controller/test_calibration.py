from dataclasses import replace

import numpy as np
import pytest

from controller.calibration import CALIBRATION_FORMAT, OTHER, Calibration, OtherFit, Sample, fit, sweep_plan
from controller.testing import HISTORY, SMALL_COSTS, SMALL_POLICY, SMALL_W4, SimulatedMachine
from controller.types import POLICY

SHAPES = {POLICY: SMALL_POLICY, "w4": SMALL_W4, "history": HISTORY}


def sweep(machine: SimulatedMachine, *, stalls: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    out = []
    for p in sweep_plan(SHAPES, 32):
        read = p.context_tokens * p.sequences
        seconds = machine.forward_s(
            p.part,
            rows=p.rows,
            sequences=p.sequences,
            read=read,
            context=p.context_tokens * p.rows,
            round_index=0,
        )
        seconds *= float(np.exp(0.02 * rng.standard_normal())) * (2.0 if rng.random() < stalls else 1.0)
        out.append(
            Sample(
                part=p.part,
                rows=p.rows,
                sequences=p.sequences,
                context_tokens=p.context_tokens,
                seconds=seconds,
            )
        )
    return out


@pytest.mark.parametrize("stalls", [0.0, 0.1])
def test_a_fit_recovers_the_machine_even_when_some_samples_stalled(stalls: float) -> None:
    found = fit(sweep(SimulatedMachine(shapes=SHAPES), stalls=stalls), SHAPES)
    for part in (POLICY, "w4"):
        true, got = SMALL_COSTS[part], found.parts[part]
        assert got.flops_per_s == pytest.approx(true.flops_per_s, rel=0.15)
        assert got.context_factor == pytest.approx(true.context_factor, rel=0.3)
        # Bandwidth and fixed overhead trade against each other; the forward they make together does not.
        shape = SHAPES[part]
        alone = shape.weight_bytes / got.bandwidth_bytes_per_s + got.overhead_s
        assert alone == pytest.approx(
            shape.weight_bytes / true.bandwidth_bytes_per_s + true.overhead_s, rel=0.08 if stalls else 0.05
        )


def test_a_clean_fit_reports_a_small_error_per_part() -> None:
    report = fit(sweep(SimulatedMachine(shapes=SHAPES)), SHAPES).report()
    assert set(report) == {f"calibration/{k}_frac/{p}" for k in ("mape", "worst") for p in (POLICY, "w4")}
    assert all(0 < v < 0.1 for v in report.values())


def test_the_reported_error_shows_a_machine_the_form_cannot_describe() -> None:
    odd = SimulatedMachine(shapes=SHAPES, misfit=lambda part, rows, sequences: 2.0 if rows == 4 else 1.0)
    assert fit(sweep(odd), SHAPES).report()["calibration/worst_frac/policy"] > 0.3


def test_json_gives_back_an_equal_calibration() -> None:
    found = fit(sweep(SimulatedMachine(shapes=SHAPES)), SHAPES, key="box/model")
    found = replace(found, drafts={"w4": OtherFit(base_s=1e-4, s_per_row=2e-5)})
    assert Calibration.from_json(found.to_json(), key="box/model") == found


def test_a_calibration_of_another_machine_is_refused() -> None:
    text = fit(sweep(SimulatedMachine(shapes=SHAPES)), SHAPES, key="box/model").to_json()
    with pytest.raises(ValueError, match="box/model"):
        Calibration.from_json(text, key="other/model")


THIS = f'"format": {CALIBRATION_FORMAT}'


@pytest.mark.parametrize("text", ["", "[]", "{}", f"{{{THIS}}}", f'{{{THIS}, "key": "a", "parts": 3}}'])
def test_what_is_no_calibration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="calibration"):
        Calibration.from_json(text)


def test_another_format_is_refused_by_its_number_whatever_fields_it_has() -> None:
    text = fit(sweep(SimulatedMachine(shapes=SHAPES)), SHAPES).to_json()
    with pytest.raises(ValueError, match="format 99"):
        Calibration.from_json(text.replace(THIS, '"format": 99'))
    without_drafts = text.replace(THIS, '"format": 2').replace('"drafts"', '"later"')
    with pytest.raises(ValueError, match="calibration format 2, expected"):
        Calibration.from_json(without_drafts)


def test_a_sweep_is_small_covers_every_model_and_both_kinds_of_rows() -> None:
    plan = sweep_plan(SHAPES, 32)
    assert {p.part for p in plan} == {POLICY, "w4"}
    assert len(plan) < 60
    # Five repetitions on a machine five times slower than the simulated one stay within 20 s.
    machine = SimulatedMachine(shapes=SHAPES)
    seconds = sum(
        machine.forward_s(
            p.part,
            rows=p.rows,
            sequences=p.sequences,
            read=p.context_tokens * p.sequences,
            context=p.context_tokens * p.rows,
            round_index=0,
        )
        for p in plan
    )
    assert seconds * 5 * 5 < 20
    policy = [p for p in plan if p.part == POLICY]
    assert any(p.rows > p.sequences for p in policy)
    assert {p.sequences for p in policy if p.rows == p.sequences} >= {1, 2, 4, 8, 16, 32}
    assert len({p.context_tokens for p in policy}) == 2
    assert all(p.rows % p.sequences == 0 for p in plan)


def test_time_outside_forwards_is_a_line_over_rows() -> None:
    samples = sweep(SimulatedMachine(shapes=SHAPES))
    samples += [
        Sample(part=OTHER, rows=r, sequences=r, context_tokens=0, seconds=4e-4 + 2e-5 * r)
        for r in (1, 4, 16, 32)
    ]
    other = fit(samples, SHAPES).other
    assert other.base_s == pytest.approx(4e-4, rel=1e-6)
    assert other.s_per_row == pytest.approx(2e-5, rel=1e-6)


def test_unusable_samples_are_refused_by_name() -> None:
    good = sweep(SimulatedMachine(shapes=SHAPES))
    bad = Sample(part=POLICY, rows=1, sequences=1, context_tokens=1, seconds=float("nan"))
    with pytest.raises(ValueError, match="usable"):
        fit([*good, bad], SHAPES)
    with pytest.raises(ValueError, match="nonsense"):
        fit([*good, Sample(part="nonsense", rows=1, sequences=1, context_tokens=1, seconds=1.0)], SHAPES)
    with pytest.raises(ValueError, match="policy"):
        fit([s for s in good if s.part != POLICY], SHAPES)
    with pytest.raises(ValueError, match="samples"):
        fit([s for s in good if s.part == POLICY][:3], SHAPES)
