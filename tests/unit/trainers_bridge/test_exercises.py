import itertools

import pytest

from rollout.errors import ConfigError
from trainers_bridge.config import TaskConfig
from trainers_bridge.looped.tokenizer import CHARACTERS
from trainers_bridge.tasks.exercises import (
    EXACT_REWARD,
    FORM_REWARD,
    KINDS,
    ExerciseTask,
    answered,
    exercises,
    split_of,
)
from trainers_bridge.tasks.registry import build_task

SAMPLE = list(itertools.islice(exercises(seed="test", split="train"), 600))
TASK = ExerciseTask(TaskConfig(kind="exercises", prompts=6), seed=0)


def recomputed(question: str) -> str:
    """Work a question out without the generator."""
    word, *rest = question.replace(",", "").replace(".", "").split()
    if word == "sum":
        return str(sum(map(int, rest)))
    if word == "reverse":
        return rest[0][::-1]
    if word == "sort":
        return "".join(sorted(rest[0]))
    if word == "count":
        return str(rest[2].count(rest[0]))
    if word == "from":
        return str(int(rest[0]) % int(rest[3]))
    changes = [(rest[i], int(rest[i + 1])) for i in range(3, len(rest) - 2, 2)]
    return str(int(rest[1]) + sum(n if verb == "gets" else -n for verb, n in changes))


def test_every_answer_is_right_and_ends_its_reply() -> None:
    assert {e.kind for e in SAMPLE} == set(KINDS)
    for exercise in SAMPLE:
        assert exercise.answer == recomputed(exercise.question), exercise
        assert answered(exercise.reply) == exercise.answer


def test_the_reward_accepts_the_generators_replies_and_no_others() -> None:
    for exercise in SAMPLE[:60]:
        for other in SAMPLE[60:66]:
            right = exercise.answer == other.answer
            reward = TASK.reward(other.reply, answer=exercise.answer, ended=True)
            assert reward == (EXACT_REWARD if right else FORM_REWARD)
        assert TASK.reward(exercise.reply, answer=exercise.answer, ended=True) == EXACT_REWARD
        assert TASK.reward(exercise.reply, answer=exercise.answer, ended=False) == 0.0
        assert TASK.reward(exercise.reply + "1", answer=exercise.answer, ended=True) == FORM_REWARD
        assert TASK.reward(exercise.answer, answer=exercise.answer, ended=True) == 0.0


@pytest.mark.parametrize("reply", ["", "answer", "the answer is 4", "4 answer"])
def test_a_reply_without_the_form_has_no_answer(reply: str) -> None:
    assert answered(reply) is None


def test_no_question_is_on_both_sides_whatever_the_seed() -> None:
    held_out = list(itertools.islice(exercises(seed="other", split="held_out"), 600))
    assert not {e.question for e in held_out} & {e.question for e in SAMPLE}
    assert {split_of(e.question) for e in held_out} == {"held_out"}
    assert {split_of(e.question) for e in SAMPLE} == {"train"}


def test_the_same_seed_gives_the_same_exercises() -> None:
    assert list(itertools.islice(exercises(seed="test", split="train"), 600)) == SAMPLE
    assert SAMPLE[:6] != list(itertools.islice(exercises(seed="test2", split="train"), 6))


def test_replies_have_a_tail_and_use_only_known_characters() -> None:
    lengths = sorted(len(e.reply) for e in SAMPLE)
    assert lengths[-1] > 4 * lengths[len(lengths) // 2]
    assert {c for e in SAMPLE for c in e.question + e.reply} <= set(CHARACTERS)


def test_the_task_asks_what_its_settings_say() -> None:
    config = TaskConfig(kind="exercises", prompts=8, exercises=("sort", "sum"), split="held_out")
    task = build_task(config, seed=1)
    assert isinstance(task, ExerciseTask)
    assert [e.kind for e in task.exercises] == ["sort", "sum"] * 4
    assert all(split_of(e.question) == "held_out" for e in task.exercises)
    row = task.rows()[0]
    assert row == {
        "prompt": [{"role": "user", "content": task.exercises[0].question}],
        "answer": task.exercises[0].answer,
    }
    with pytest.raises(ConfigError, match=r"task\.exercises must name at least one"):
        TaskConfig(kind="exercises", exercises=())
