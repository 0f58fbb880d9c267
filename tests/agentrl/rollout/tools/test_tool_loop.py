"""The loop: parallel calls, errors, time-outs, cancellation, budgets, releases and rewards."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import httpx
import openai
import pytest

from agentrl import ToolBroken, ToolError, ToolLoop, ToolResult, UserError, tool
from agentrl.rollout.score import Reward, Score
from agentrl.rollout.tools import bounded_call
from agentrl.rollout.tools.tool_limits import MARK, ToolLimits
from agentrl.rollout.tools.toolbox import MAX_CALLS

ASK = [{"role": "user", "content": "go"}]


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Room:
    """Tools that wait for one another, and that count their lives."""

    def __init__(self) -> None:
        self.entered, self.opened = asyncio.Semaphore(0), asyncio.Event()
        self.lives: list[str] = []
        self.freed = threading.Event()

    async def create(self, task: dict) -> None:
        self.lives.append("created")

    @tool
    async def wait(self) -> str:
        """Wait until the room is opened."""
        self.entered.release()
        await self.opened.wait()
        return "waited"

    @tool
    async def open_room(self) -> str:
        """Let the others go on."""
        self.opened.set()
        return "opened"

    @tool
    async def stay(self) -> str:
        """Stay, though it is cancelled."""
        self.entered.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.lives.append("ignored")
        await asyncio.Event().wait()
        return "never"

    @tool
    def hang(self) -> None:
        """Block."""
        self.freed.wait(60)

    async def release(self) -> None:
        self.lives.append("released")
        self.freed.set()


async def test_an_answer_ends_the_loop(model: Any, extra: Any) -> None:
    model.says([("add", {"a": 2, "b": "3"})], "five")
    async with ToolLoop(extra, [add]) as loop:
        await loop.run(ASK)
    assert (loop.text, loop.stopped, loop.turns, loop.tokens) == ("five", "answered", 2, 20)
    assert [one["role"] for one in loop.messages] == ["user", "assistant", "tool", "assistant"]
    assert loop.messages[2]["content"] == "5"
    assert loop.messages[:3] == loop.asked == model.requests[1]["messages"]
    assert model.requests[0]["tools"] == [add.schema]


async def test_results_keep_the_order_of_the_calls(model: Any, extra: Any, said: Any) -> None:
    model.says([("wait", {}), ("add", {"a": 1, "b": 1}), ("open_room", {})], "done")
    async with ToolLoop(extra, [Room(), add]) as loop:
        await loop.run(ASK)
    assert said(1) == ["waited", "2", "opened"]
    assert [one["tool_call_id"] for one in loop.messages[2:5]] == ["call_0", "call_1", "call_2"]


async def test_at_most_parallel_calls_run_at_once(model: Any, extra: Any, said: Any) -> None:
    running, most = 0, 0

    @tool
    async def count() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    model.says([("count", {})] * (MAX_CALLS + 1), "done")
    async with ToolLoop(extra, [count], parallel=3) as loop:
        await loop.run(ASK)
    assert most == 3
    assert said(1)[-2:] == ["", f"error: at most {MAX_CALLS} calls in one turn"]


async def test_the_model_is_told_what_it_did_wrong(model: Any, extra: Any, said: Any) -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    @tool
    def fails(how: str) -> object:
        if how == "exit":
            sys.exit("bye")
        if how == "odd":
            return [Odd()]
        if how == "nul":
            return "a\0b\ud800"
        raise {"error": ToolError("not today"), "value": ValueError("bad"), "stop": StopIteration(1)}[how]

    @tool
    async def cancels() -> None:
        raise asyncio.CancelledError

    @tool
    async def exits() -> None:
        sys.exit(3)

    names = [("ad", {}), ("add", "{"), ("add", "[1]"), ("add", {"a": 1}), ("cancels", {}), ("exits", {})]
    hows = ("error", "value", "stop", "exit", "odd", "nul")
    model.says([*names, *(("fails", {"how": how}) for how in hows)], "done")
    async with ToolLoop(extra, [add, fails, cancels, exits]) as loop:
        await loop.run(ASK)
    found = said(1)
    assert found[0] == "error: there is no tool 'ad'; did you mean 'add'?"
    assert found[1].startswith("error: the arguments are not valid JSON: ")
    assert found[2:6] == [
        "error: the arguments must be a JSON object, not list",
        "error: invalid arguments: b is missing",
        "error: cancels was cancelled",
        "error: RuntimeError: SystemExit: 3",
    ]
    assert found[6:10] == [
        "error: not today",
        "error: ValueError: bad",
        "error: RuntimeError: StopIteration: 1",
        "error: RuntimeError: SystemExit: bye",
    ]
    assert "Odd object" in found[10]
    assert found[11] == "a\ufffdb?"


async def test_a_call_that_takes_too_long_is_left(model: Any, extra: Any, said: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(bounded_call, "GRACE_S", 0.05)
    room = Room()
    model.says([("hang", {}), ("wait", {}), ("stay", {})], [("open_room", {})], "done")
    short = {"timeout_s": 0.05}
    async with ToolLoop(extra, [room], overrides=dict.fromkeys(("hang", "wait", "stay"), short)) as loop:
        await loop.run(ASK)
    assert said(1) == [f"error: {name} took longer than 0.05 s" for name in ("hang", "wait", "stay")]
    assert said(2)[-1] == "opened"
    assert room.lives == ["created", "ignored", "released"]


async def test_a_cancelled_episode_releases_each_tool_once(model: Any, extra: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(bounded_call, "GRACE_S", 0.05)
    room = Room()

    async def episode() -> None:
        async with ToolLoop(extra, [room]), ToolLoop(extra, [room]) as loop:
            await loop.run(ASK)

    model.says([("wait", {}), ("stay", {})])
    task = asyncio.create_task(episode())
    await room.entered.acquire()
    await room.entered.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert room.lives == ["created", "created", "ignored", "released", "released"]


async def test_a_release_goes_on_when_its_episode_is_cancelled_again(model: Any, extra: Any) -> None:
    going, go = asyncio.Event(), asyncio.Event()
    released = asyncio.Event()

    class Slow(Room):
        async def release(self) -> None:
            going.set()
            await go.wait()
            released.set()

    async def episode() -> None:
        async with ToolLoop(extra, [Slow()]) as loop:
            await loop.run(ASK)

    model.says("done")
    task = asyncio.create_task(episode())
    await going.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    await released.wait()


async def test_what_was_created_is_released_when_another_cannot_be(extra: Any, caplog: Any) -> None:
    room = Room()

    class Broken(Room):
        async def create(self, task: dict) -> None:
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        async with ToolLoop(extra, [room, Broken]):
            raise AssertionError("it was opened")
    assert room.lives == ["created", "released"]
    with pytest.raises(UserError, match="two tools are called 'wait'"):
        async with ToolLoop(extra, [room, Room]):
            raise AssertionError("it was opened")
    assert room.lives == ["created", "released"] * 2

    class Sticky(Room):
        async def release(self) -> None:
            raise OSError("stuck")

    async with ToolLoop(extra, [Sticky]):
        pass
    assert "the release of tool Sticky failed: OSError: stuck" in caplog.text


async def test_an_episode_that_ends_while_a_tool_is_created_releases_it(extra: Any) -> None:
    creating, create, lives = asyncio.Event(), asyncio.Event(), []

    class Late(Room):
        async def create(self, task: dict) -> None:
            creating.set()
            await create.wait()

        async def release(self) -> None:
            lives.append("released")

    async def episode() -> None:
        async with ToolLoop(extra, [Late]):
            raise AssertionError("it was opened")

    task = asyncio.create_task(episode())
    await creating.wait()
    task.cancel()
    await asyncio.sleep(0)
    create.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lives == ["released"]


async def test_turns_and_tokens_are_bounded(model: Any, extra: Any, said: Any) -> None:
    call = [("add", {"a": 1, "b": 1})]
    model.says(call, call, call)
    async with ToolLoop(extra, [add], max_turns=2) as loop:
        await loop.run(ASK)
    assert (loop.stopped, loop.turns, loop.messages[-1]["content"]) == ("max_turns", 2, "2")
    assert (await loop.result(1.0)).truncated
    async with ToolLoop(extra, [add], max_tokens=15) as loop:
        model.says(call, call)
        await loop.run(ASK)
    assert (loop.stopped, loop.turns, loop.tokens) == ("max_tokens", 2, 15)
    assert [request.get("max_tokens") for request in model.requests] == [None, None, 15, 5]
    for wrong in ({"max_turns": 0}, {"max_tokens": 0}, {"parallel": 0}):
        with pytest.raises(UserError, match="must be at least 1"):
            ToolLoop(extra, [add], **wrong)


async def test_a_full_context_ends_the_loop(model: Any, extra: Any) -> None:
    full = httpx.Response(400, json={"error": {"message": "too long", "code": "context_length_exceeded"}})
    model.says([("add", {"a": 1, "b": 1})], full, full)
    async with ToolLoop(extra, [add]) as loop:
        await loop.run(ASK)
        assert (loop.stopped, loop.turns) == ("context_length", 1)
    async with ToolLoop(extra, [add]) as loop:
        with pytest.raises(openai.BadRequestError):
            await loop.run(ASK)


@pytest.mark.parametrize(("side", "left"), [("left", f"abc{MARK}"), ("right", f"{MARK}efg"), ("middle", f"ab{MARK}g")])
async def test_a_long_result_is_cut(model: Any, extra: Any, said: Any, side: Any, left: str) -> None:
    @tool
    def letters(count: int) -> str:
        return "abcdefg"[:count]

    model.says([("letters", {"count": 7}), ("letters", {"count": 3})], "done")
    async with ToolLoop(extra, [letters], limits=ToolLimits(max_chars=3, truncate=side)) as loop:
        await loop.run(ASK)
    assert said(1) == [left, "abc"]


class Guess:
    """A game with rewards."""

    @tool
    async def guess(self, number: int) -> ToolResult:
        """Guess."""
        return ToolResult(text="yes" if number == 7 else "no", reward=float(number), end=number == 7)

    async def calc_reward(self) -> float:
        return 2.0


async def test_tools_have_rewards_by_their_names(model: Any, extra: Any) -> None:
    model.says([("guess", {"number": 1}), ("guess", {"number": 2})], [("guess", {"number": 7})])
    async with ToolLoop(extra, [Guess], overrides={"Guess": {"reward_weight": 0.5}}) as loop:
        await loop.run(ASK)
        result = await loop.result(Score((Reward(value=1.0, name="right"),), "7"))
    assert (loop.stopped, result.answer) == ("ended", "7")
    assert result.rewards == (
        Reward(value=1.0, name="right"),
        Reward(value=3.0, interaction_id="c1", name="guess", source="tool"),
        Reward(value=7.0, interaction_id="c2", name="guess", source="tool"),
        Reward(value=1.0, name="Guess", source="tool"),
    )


async def test_a_broken_tool_fails_the_episode(model: Any, extra: Any) -> None:
    @tool
    def broken(how: str) -> ToolResult:
        if how == "nan":
            return ToolResult(reward=float("nan"))
        raise ToolBroken("no database") if how == "broken" else ValueError("odd")

    found = {"broken": "no database", "nan": "a reward must be a finite number", "error": "ValueError: odd"}
    for how, message in found.items():
        model.says([("broken", {"how": how})])
        async with ToolLoop(extra, [broken], limits=ToolLimits(on_error="fail")) as loop:
            with pytest.raises(ToolBroken, match=message):
                await loop.run(ASK)


async def test_wrong_use_is_refused(extra: Any) -> None:
    with pytest.raises(UserError, match="use it in `async with"):
        await ToolLoop(extra, [add]).run(ASK)
    with pytest.raises(UserError, match="overrides: there is no tool 'ad'; did you mean 'add'"):
        async with ToolLoop(extra, [add], overrides={"ad": {}}):
            pass
    with pytest.raises(UserError, match=r"overrides\.add: unknown 'timeout'; did you mean 'timeout_s'"):
        ToolLoop(extra, [add], overrides={"add": {"timeout": 3}})
