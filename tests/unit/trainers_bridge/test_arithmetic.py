import pytest

from trainers_bridge.config import TaskConfig
from trainers_bridge.tasks.arithmetic import ArithmeticTask
from trainers_bridge.tasks.registry import BUILDERS, build_task

TASK = ArithmeticTask(TaskConfig(), seed=0)


@pytest.mark.parametrize(
    ("reply", "ended", "reward"),
    [
        ("Six groups of nine are added up, so it is 54.", True, 1.0),
        ("To find 6 * 9 you add nine six times: 54", True, 1.0),
        ("Six groups of nine make, when added up, **54**.", True, 1.0),
        ("6 * 9 = 54.", True, 0.5),
        ("54", True, 0.5),
        ("6 * 9 is 54, which is what you asked me to find.", True, 0.2),
        ("Six groups of nine are added up, so it is 54.", False, 0.2),
        ("It is 54 because six nines make 56.", True, 0.2),
        ("Six groups of nine are added up, so it is 56.", True, 0.1),
        ("Six groups of nine are added up, so it is 154.", True, 0.1),
        ("Six groups of nine are added up, so it is -54.", True, 0.1),
        ("Six groups of nine are added up, so it is 54.5.", True, 0.0),
        ("Six groups of nine are added up, so it is 56.", False, 0.0),
        ("I like numbers.", True, 0.0),
        ("x54", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_rewards_are_what_the_page_says(reply: str, ended: bool, reward: float) -> None:
    assert TASK.reward(reply, answer=54, operands=(6, 9), ended=ended) == reward


def test_repeating_an_operand_that_happens_to_be_the_answer_earns_nothing() -> None:
    assert TASK.reward("You take 4 from 8 here.", answer=4, operands=(8, 4), ended=True) == 0.0
    assert (
        TASK.reward("When you take 4 from 8 there is left 4.", answer=4, operands=(8, 4), ended=True) == 1.0
    )


def test_the_same_seed_gives_the_same_questions_and_answers_are_right() -> None:
    config = TaskConfig(operations=("multiply", "add", "subtract"), prompts=64)
    assert ArithmeticTask(config, seed=3).rows() == ArithmeticTask(config, seed=3).rows()
    assert ArithmeticTask(config, seed=3).rows() != ArithmeticTask(config, seed=4).rows()
    seen = set()
    for question in ArithmeticTask(config, seed=3).questions:
        first, second = question.operands
        sign = question.text.split()[3]
        seen.add(sign)
        assert question.text == f"What is {first} {sign} {second}?"
        assert question.answer == {"*": first * second, "+": first + second, "-": first - second}[sign]
        assert 2 <= first <= 9
        assert 2 <= second <= 9
    assert seen == {"*", "+", "-"}


def test_rows_hold_a_prompt_and_exactly_what_the_reward_takes() -> None:
    assert set(BUILDERS) == {"arithmetic", "exercises"}
    task = build_task(TaskConfig(), seed=0)
    row = task.rows()[0]
    messages = row.pop("prompt")
    assert isinstance(messages, list)
    assert [m["role"] for m in messages] == ["system", "user"]
    assert 0.0 <= task.reward("no idea", ended=True, **row) <= 1.0
