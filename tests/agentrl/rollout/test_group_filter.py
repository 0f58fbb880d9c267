"""The user's filter of groups: what it is given, and what becomes of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.rollout.group_filter import GroupVerdict, load_accept
from agentrl.rollout.score import Result, Reward

RESULTS = [
    (Result(rewards=(Reward(value=0.5), Reward(value=0.25, name="format"))), None),
    (Result(rewards=(Reward(value=9.0),)), "the agent failed"),
    (Result(rewards=(Reward(value=9.0),), reject="no"), None),
    (Result(), None),
    (Result(rewards=(Reward(value=1.0),)), None),
]


async def verdict(accept: Any) -> str | None:
    group = GroupVerdict(accept, {"n": 1}, len(RESULTS))
    found = [await group.reason(result, error) for result, error in RESULTS]
    assert found[:-1] == [None] * 4  # the last episode decides
    return found[-1]


async def test_a_filter_gets_the_task_and_the_rewards_of_episodes_that_have_one() -> None:
    def accept(task: dict[str, int], rewards: Sequence[float]) -> bool:
        assert (task, rewards) == ({"n": 1}, [0.75, 1.0])
        return True

    assert await verdict(accept) is None
    assert await verdict(None) is None


@pytest.mark.parametrize(
    ("answer", "reason"), [(False, "rollout.accept"), ("too easy", "too easy"), ("x" * 200, "x" * 100), (True, None)]
)
async def test_its_answer_is_the_reason(answer: bool | str, reason: str | None) -> None:
    assert await verdict(lambda *_: answer) == reason


async def test_a_group_that_it_cannot_judge_does_not_train() -> None:
    def accept(task: Any, rewards: Any) -> bool:
        raise ValueError("no idea")

    assert await verdict(accept) == "rollout.accept raised ValueError: no idea"


def test_a_filter_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_filters.py").write_text(
        "def varied(task, rewards):\n    return len(set(rewards)) > 1\nnone = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    accept = load_accept("some_filters:varied")
    assert accept is not None
    assert [accept({}, rewards) for rewards in ([1.0, 1.0], [0.0, 1.0])] == [False, True]
    assert load_accept(None) is None
    for spec in ("some_filters:none", "some_filters:vared", "some_filters"):
        with pytest.raises(UserError, match=r"rollout\.accept"):
            load_accept(spec)
