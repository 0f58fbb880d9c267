"""Many episodes at once, whose tools do everything that tools may do: each that is created is released exactly once."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections import Counter
from typing import Any

import pytest

from agentrl import ToolBroken, ToolLoop, UserError, tool
from agentrl.rollout.tools import bounded_call

EPISODES = int(os.environ.get("AGENTRL_TEST_TOOL_EPISODES", "150"))
AT_ONCE = 32
HOWS = ("return", "raise", "break", "exit", "block", "wait", "stay", "cancel")


class Storm:
    """What the tools of all episodes did."""

    def __init__(self) -> None:
        self.created, self.released = Counter[int](), Counter[int]()
        self.over = threading.Event()


def tools_of(storm: Storm, number: int, rng: random.Random) -> type:
    class Thing:
        async def create(self, task: dict[str, Any]) -> None:
            await asyncio.sleep(rng.choice((0, 0.001)))
            if rng.random() < 0.05:
                raise OSError("no disk")
            storm.created[number] += 1

        @tool
        async def do(self, how: str) -> str:
            match how:
                case "raise":
                    raise ValueError(how)
                case "break":
                    raise ToolBroken(how)
                case "exit":
                    sys.exit(how)
                case "cancel":
                    raise asyncio.CancelledError
                case "wait":
                    await asyncio.sleep(600)
                case "stay":
                    try:
                        await asyncio.sleep(600)
                    except asyncio.CancelledError:
                        await asyncio.sleep(600)
            return "done"

        @tool
        def block(self) -> str:
            storm.over.wait(rng.choice((0.001, 60)))
            return "done"

        async def release(self) -> None:
            storm.released[number] += 1
            if rng.random() < 0.1:
                raise OSError("stuck")

    return Thing


async def episode(number: int, extra: Any, model: Any, storm: Storm, places: asyncio.Semaphore) -> str:
    rng = random.Random(number)
    calls = [("block", {}) if how == "block" else ("do", {"how": how}) for how in rng.choices(HOWS, k=3)]
    thing = tools_of(storm, number, rng)
    async with places:
        try:
            async with asyncio.timeout(rng.choice((0.005, 0.05, 30))):
                overrides = {name: {"timeout_s": 0.02} for name in ("do", "block")}
                async with ToolLoop(extra, [thing], overrides=overrides, max_turns=1) as loop:
                    model.says(calls)
                    await loop.run([{"role": "user", "content": "go"}])
                    return str(loop.stopped)
        except (TimeoutError, ToolBroken, UserError, OSError) as error:
            return type(error).__name__


async def test_each_tool_is_released_exactly_once(model: Any, extra: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_call, "GRACE_S", 0.005)
    storm, places = Storm(), asyncio.Semaphore(AT_ONCE)
    ends = Counter(await asyncio.gather(*(episode(n, extra, model, storm, places) for n in range(EPISODES))))
    storm.over.set()
    print(ends, len(storm.created))
    assert sum(ends.values()) == EPISODES
    assert {"max_turns", "ToolBroken", "TimeoutError"} <= ends.keys()
    assert storm.created == storm.released
    assert set(storm.created.values()) == {1}
