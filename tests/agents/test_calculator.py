"""The calculator's arithmetic, its rewards and its tasks."""

from __future__ import annotations

import pytest

from agentrl.agents.calculator import (
    calculate,
    heldout_tasks,
    is_held_out,
    read_expression,
    score,
    train_tasks,
    unseen_tasks,
)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+35", 47),
        ("7*8", 56),
        ("35-12", 23),
        ("12-35", -23),
        (" 2 + 3 * 4", 14),
        ("(2+3)*4", 20),
        ("-5+3", -2),
        ("", None),
        ("12+", None),
        ("12/3", None),
        ("2**9", None),
        ("__import__('os')", None),
        ("True+1", None),
        ("1.5+1", None),
        ("9" * 12, None),
        ("(" * 400, None),
        ("a\x00b", None),
    ],
)
def test_only_whole_number_arithmetic_is_worked_out(expression: str, value: int | None) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("arguments", "expression"),
    [('{"expression": "1+2"}', "1+2"), ('{"expression": 3}', ""), ("[1]", ""), ("not json", ""), ("{}", "")],
)
def test_odd_tool_arguments_are_no_expression(arguments: str, expression: str) -> None:
    assert read_expression(arguments) == expression


@pytest.mark.parametrize(
    ("expression", "answer", "reward"),
    [
        ("12+36", "Answer: 48", 1.0),
        ("36+12", "Answer: 48", 1.0),
        ("12+36", "It is 48.", 0.6),
        ("12+36", "Answer: 47", 0.4),
        ("12+36", "", 0.4),
        ("12-36", "Answer: -24", 0.1),
        ("36-12", "Answer: 24", 0.0),
        ("12+35", "Answer: 47", 0.0),
        ("12+", "error", 0.0),
    ],
)
def test_the_reward_grows_with_every_part_that_is_right(expression: str, answer: str, reward: float) -> None:
    data = {"question": "What is 12 plus 36?", "x": 12, "y": 36, "answer": 48}
    assert score(data, expression, calculate(expression), answer) == reward


def test_held_out_pairs_are_never_trained() -> None:
    held = [*heldout_tasks(), *unseen_tasks()]
    assert len(held) == 128
    assert all(is_held_out(task["x"], task["y"]) for task in held)
    assert not any(is_held_out(task["x"], task["y"]) for task in train_tasks(seed=3, count=500))
    share = sum(is_held_out(x, y) for x in range(10, 100) for y in range(10, x + 1)) / (90 * 91 / 2)
    assert 0.17 < share < 0.23


def test_tasks_are_fixed_by_their_seed() -> None:
    assert heldout_tasks() == heldout_tasks()
    assert list(train_tasks(seed=1, count=9)) == list(train_tasks(seed=1, count=9))
    assert list(train_tasks(seed=1, count=9)) != list(train_tasks(seed=2, count=9))


def test_unseen_phrasings_are_unseen() -> None:
    def shapes(tasks: list[dict[str, object]]) -> set[str]:
        return {"".join(c for c in str(task["question"]) if not c.isdigit()) for task in tasks}

    assert not shapes(unseen_tasks()) & shapes(list(train_tasks(count=500)))
