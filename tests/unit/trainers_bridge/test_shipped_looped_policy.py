"""The policy in ``policies/looped`` is the one its record describes."""

import math

import pytest
from transformers import AutoTokenizer

from rollout.paths import shipped_policies_dir
from rollout.policy.embedded import sha256_of
from trainers_bridge.looped.batches import data_digest, held_out
from trainers_bridge.looped.evaluation import score_depths
from trainers_bridge.looped.folder import WEIGHTS, load_served
from trainers_bridge.looped.pretraining import Pretraining, plain_settings
from trainers_bridge.looped.questions import QUESTIONS_FILE, questions
from trainers_bridge.looped.record import read_record
from trainers_bridge.looped.tokenizer import encode
from trainers_bridge.tasks.exercises import split_of

FOLDER = shipped_policies_dir() / "looped"
RECORD = read_record(FOLDER)
DEPTHS = RECORD["held_out"]["depths"]

MOST_BYTES = 6_000_000
"""Of the weights: the repository carries them in every clone."""


def test_the_record_is_of_these_weights_these_settings_and_this_data() -> None:
    assert sha256_of(FOLDER / WEIGHTS) == RECORD["weights_sha256"]
    assert (FOLDER / WEIGHTS).stat().st_size <= MOST_BYTES
    settings = Pretraining()
    assert RECORD["settings"] == plain_settings(settings)
    assert RECORD["steps"] == settings.steps
    assert RECORD["first_batches_sha256"] == data_digest(seed=settings.seed, tokens=settings.batch_tokens)


def test_the_shipped_tokenizer_is_the_one_of_training() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer("sum 2 3\n2+3=5, answer 5")["input_ids"] == encode("sum 2 3\n2+3=5, answer 5")


def test_it_brings_held_out_questions_half_of_which_have_long_replies() -> None:
    asked = (FOLDER / QUESTIONS_FILE).read_text().splitlines()
    assert asked == questions()
    assert len(set(asked)) == len(asked) == 64
    assert {split_of(question) for question in asked} == {"held_out"}


def test_the_record_says_that_depth_helps_and_that_shallow_loops_can_draft() -> None:
    for depth in DEPTHS[1:]:
        assert depth["gain"]["mean"] > 3 * depth["gain"]["standard_error"]
    answers = DEPTHS[-1]["accuracy_gain"]
    assert answers["mean"] > 3 * answers["standard_error"]
    assert DEPTHS[0]["agreement"] > 0.75
    assert DEPTHS[1]["agreement"] > 0.85


@pytest.mark.slow
def test_scored_again_the_policy_does_what_its_record_says() -> None:
    """Other held-out questions than the record's: each loss within five standard errors (1e-6 per depth)."""
    reports = score_depths(load_served(FOLDER), held_out(seed=12345, count=120), decode_replies=False)
    losses = [report.cross_entropy.mean for report in reports]
    assert losses == sorted(losses, reverse=True)
    for report, recorded in zip(reports, DEPTHS, strict=True):
        noise = math.hypot(report.cross_entropy.standard_error, recorded["cross_entropy"]["standard_error"])
        assert abs(report.cross_entropy.mean - recorded["cross_entropy"]["mean"]) < 5 * noise
        assert report.agreement == pytest.approx(recorded["agreement"], abs=0.05)
