"""The foreign arm: exactly our lengths, whichever way it runs, and never an end-of-sequence id in the way."""

from pathlib import Path

import pytest
import torch

from rollout.bench.hf_arm import WAYS, HfArm, ReplayError, Way, _left_padded, _sample
from rollout.testing import EOS_ID, save_tiny_folder

PROMPTS = [tuple(range(3, 3 + n)) for n in (5, 9, 2, 7)]
LENGTHS = [3, 17, 9, 1]


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> HfArm:
    folder: Path = tmp_path_factory.mktemp("policy")
    save_tiny_folder(folder)
    return HfArm(folder, threads=1, dtype=torch.float32)


@pytest.mark.slow  # these two run whole generations of transformers, in every way it offers
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_every_row_gets_exactly_its_length(arm: HfArm, way: Way, temperature: float) -> None:
    assert arm.replay(PROMPTS, LENGTHS, temperature=temperature, way=way) > 0


def test_a_row_of_another_length_is_refused(arm: HfArm) -> None:
    with pytest.raises(ReplayError, match=r"\[3, 17, 9, 1\] new tokens instead of \[3, 17, 9, 0\]"):
        arm.replay(PROMPTS, [3, 17, 9, 0], temperature=1.0, way="rows dropped, sdpa")


@pytest.mark.slow
def test_the_pilot_times_every_way_and_takes_the_fastest(arm: HfArm) -> None:
    pilot = arm.choose(PROMPTS, [2 * n for n in LENGTHS], temperature=1.0)
    assert set(pilot.seconds) | set(pilot.failed) == set(WAYS)
    assert pilot.seconds[pilot.chosen] == min(pilot.seconds.values())


def test_no_end_of_sequence_id_is_ever_sampled() -> None:
    logits_BV = torch.zeros(200, 8)
    logits_BV[:, EOS_ID] = 50.0
    generator = torch.Generator().manual_seed(0)
    assert EOS_ID not in _sample(logits_BV.clone(), [EOS_ID], 1.0, generator)
    assert EOS_ID not in _sample(logits_BV.clone(), [EOS_ID], 0.0, generator)


def test_padding_comes_first() -> None:
    input_BT, mask_BT = _left_padded([(5, 6, 7), (8,)])
    assert input_BT.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask_BT.tolist() == [[1, 1, 1], [0, 0, 1]]
