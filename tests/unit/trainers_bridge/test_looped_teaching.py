"""The comparison of training on with and without the loops' auxiliary loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trainers_bridge.looped.batches import batch_of
from trainers_bridge.looped.folder import write_policy
from trainers_bridge.looped.loss import distillation
from trainers_bridge.looped.model import OuroForCausalLM
from trainers_bridge.looped.pretraining import Pretraining, Shape, new_policy
from trainers_bridge.looped.teaching import REFUSED, Continuing, Measuring, compare, continued, gains, main

TINY = Pretraining(shape=Shape(hidden_size=32, intermediate_size=32, layers=1, heads=2))


def measured(loss: float, kept: float) -> dict[str, Any]:
    depth = {"loops": 1, "cross_entropy": {"mean": loss}, "agreement": 0.5, "sum_min": 0.5}
    return {"depths": [depth], "drafts": {"shallow_loop_1": {"accepted_share": kept}}}


def test_gains_are_paired_by_seed() -> None:
    # What seeds differ in among themselves is far more than what the weight does.
    found = gains([measured(1.0, 0.2), measured(3.0, 0.6)], [measured(0.9, 0.3), measured(2.9, 0.7)])
    assert found["cross entropy of depth 1"]["mean"] == pytest.approx(-0.1)
    assert found["drafts kept of shallow_loop_1"]["mean"] == pytest.approx(0.1)
    assert found["drafts kept of shallow_loop_1"]["standard_error"] < 1e-6
    assert found["agreement of depth 1"]["mean"] == 0.0


def test_the_learning_rate_rises_to_its_height_and_falls_to_nearly_nothing() -> None:
    training = Continuing(steps=100, learning_rate=2.0, warmup_steps=10)
    rates = [training.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == rates[10] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.03


@torch.no_grad()
def apart(model: OuroForCausalLM) -> float:
    """Return how far the shallow loops are from the last one, in nats."""
    ids = batch_of(seed=77, step=0, tokens=256).input_ids_BT
    states = model.model(input_ids=ids).loop_hidden_states
    return float(distillation([model.lm_head(state) for state in states]))


def test_runs_differ_by_the_weight_alone_and_the_taught_loops_stay_nearer(tmp_path: Path) -> None:
    write_policy(new_policy(TINY), tmp_path)
    training = Continuing(steps=8, batch_tokens=128, learning_rate=5e-3, warmup_steps=1)
    plain, again, taught = (
        continued(tmp_path, training, seed=1000, distillation=weight) for weight in (0.0, 0.0, 1.0)
    )
    others = again.state_dict()
    assert all(torch.equal(value, others[name]) for name, value in plain.state_dict().items())
    assert apart(taught) < 0.9 * apart(plain)


def test_a_record_that_cannot_be_written_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), "--threads", str(torch.get_num_threads())]) == REFUSED
    assert "--out" in capsys.readouterr().err


@pytest.mark.slow
def test_the_record_tells_every_depth_and_drafter_before_and_after(tmp_path: Path) -> None:
    write_policy(new_policy(TINY), tmp_path)
    record = compare(
        str(tmp_path),
        Continuing(steps=2, batch_tokens=128),
        Measuring(exercises=12, questions=4, gamma=2, max_tokens=8),
        weights=(0.0, 0.5),
        seeds=(0, 1),
    )
    for run in (record["before"], *record["after"]["0.0"], *record["after"]["0.5"]):
        assert [depth["loops"] for depth in run["depths"]] == [1, 2, 3, 4]
        assert run["depths"][-1]["agreement"] == 1.0
        assert sorted(run["drafts"]) == ["shallow_loop_1", "shallow_loop_2", "shallow_loop_3"]
        assert all(0 < kept["drafted"] >= kept["accepted"] for kept in run["drafts"].values())
    assert list(record["gain_over_0.0"]) == ["0.5"]
    assert record["gain_over_0.0"]["0.5"]["cross entropy of depth 4"]["standard_error"] > 0
