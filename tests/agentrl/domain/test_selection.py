"""Options as typed: what they mean, and what is said about a wrong one."""

import pytest

from agentrl.domain.selection import Selection, StepRange
from agentrl.errors import UserError


@pytest.mark.parametrize(
    ("text", "first", "last"), [("5", 5, 5), ("3..7", 3, 7), ("3..", 3, None), ("..7", 1, 7), (" 2..2 ", 2, 2)]
)
def test_a_range_of_steps_is_parsed(text, first, last) -> None:
    assert StepRange.parse(text) == StepRange(first, last)


def test_a_range_includes_both_ends() -> None:
    assert [n for n in range(10) if n in StepRange(3, 5)] == [3, 4, 5]
    assert 10**9 in StepRange(3, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7..3", "did you mean '3..7'"),
        ("..", "not a range of steps"),
        ("", "not a range of steps"),
        ("3-7", "write 5, 3..7"),
        ("a..b", "not a range of steps"),
        ("0", "the first step is 1"),
        ("-1", "not a range of steps"),
        ("1...3", "not a range of steps"),
    ],
)
def test_an_invalid_range_is_refused(text, message) -> None:
    with pytest.raises(UserError, match=r"^--steps: ") as refused:
        StepRange.parse(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("what", "state", "message"),
    [
        ("trajectory", None, "--what: 'trajectory' is not one of its values; did you mean 'trajectories'?"),
        ("trajectories", "trained,redy", "did you mean 'ready'?"),
        ("steps", "ready", "--state: 'ready'"),
        ("rewards", "applied", "rewards have no state"),
    ],
)
def test_the_nearest_choice_is_named(what, state, message) -> None:
    with pytest.raises(UserError) as refused:
        Selection.parse(what, state)
    assert message in str(refused.value)


def test_states_are_a_list() -> None:
    assert Selection.parse("trajectories", "trained, ready", "2..").states == ("trained", "ready")
