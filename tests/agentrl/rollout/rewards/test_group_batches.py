"""When the batch of a group is called."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.rollout.rewards.group_batches import GroupBatches


class Function:
    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    async def __call__(self, answers: list[Any]) -> list[float]:
        self.calls.append([answer["n"] for answer in answers])
        return [float(answer["n"]) for answer in answers]


def ask(batches: GroupBatches[float], n: int, size: int = 3) -> asyncio.Task[float]:
    return asyncio.create_task(batches.value({"n": n}, "g", str(n), size))


async def test_a_full_group_is_one_call() -> None:
    function = Function()
    batches = GroupBatches(function, wait_s=100)
    assert await asyncio.gather(*(ask(batches, n) for n in range(3))) == [0.0, 1.0, 2.0]
    assert function.calls == [[0, 1, 2]]
    for n in range(3):
        batches.left("g", str(n), 3)
    assert batches._groups == {}


async def test_a_session_that_ended_without_an_answer_is_not_awaited() -> None:
    function = Function()
    batches = GroupBatches(function, wait_s=100)
    asked = [ask(batches, n) for n in (0, 1)]
    await asyncio.sleep(0)
    batches.left("g", "2", 3)
    assert await asyncio.gather(*asked) == [0.0, 1.0]
    assert function.calls == [[0, 1]]


async def test_late_answers_are_a_batch_of_their_own() -> None:
    function = Function()
    batches = GroupBatches(function, wait_s=0.01)
    assert await ask(batches, 0) == 0.0
    assert list(await asyncio.gather(ask(batches, 1), ask(batches, 2))) == [1.0, 2.0]
    assert function.calls == [[0], [1, 2]]


async def test_an_error_reaches_every_session_and_a_cancelled_one_is_left_out() -> None:
    called: list[int] = []

    async def fails(answers: list[Any]) -> list[float]:
        called.append(len(answers))
        raise ValueError("no")

    batches = GroupBatches(fails, wait_s=100)
    asked = [ask(batches, n) for n in range(3)]
    await asyncio.sleep(0)
    asked[0].cancel()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError, ValueError, ValueError]
    with pytest.raises(ValueError, match="no"):
        raise results[1]  # type: ignore[misc]
    assert called == [2]
