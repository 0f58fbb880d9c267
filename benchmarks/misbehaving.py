"""The agents of benchmarks/bad_agents.py. Half of them are good; the others block, sleep, crash, leak or spin.

The two episodes of a group are a good one and a bad one, in either order. Both make model calls that use a tool, whose
life the benchmark's ledger follows over a connection of the tool's own. A bad one makes one call, and misbehaves while
it holds its tool. `wait` is what a well-behaved agent would do in its place: wait as long.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

from agentrl import ToolLoop, tool

ROLES, LEDGER = "BAD_AGENTS_ROLES", "BAD_AGENTS_LEDGER"
THINK_S = 0.2
"""How long a call of the tool takes."""
LEAK_BYTES = 16 * 2**20

kept: list[bytearray] = []


class Counter:
    """A tool that holds a connection to the ledger."""

    async def create(self, task: dict[str, Any]) -> None:
        """Connect."""
        self.count = 0
        _, self.writer = await asyncio.open_unix_connection(os.environ[LEDGER])
        self._say("create", session=task["session"], role=task["role"])

    @tool
    async def step(self) -> str:
        """Count one more."""
        await asyncio.sleep(THINK_S)
        self.count += 1
        self._say("execute")
        return f"counted {self.count}"

    async def calc_reward(self) -> float:
        """Whether the model has counted."""
        self._say("calc_reward")
        return float(self.count > 0)

    async def release(self) -> None:
        """Disconnect."""
        self._say("release")
        await self.writer.drain()
        self.writer.close()

    def _say(self, event: str, **about: str) -> None:
        self.writer.write(json.dumps({"event": event, **about}).encode() + b"\n")


class Agent:
    """Plays the role that its group leaves it."""

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        """Count with the tool, and misbehave."""
        session = extra["base_url"].partition("/sessions/")[2].partition("/")[0]
        role = role_of(extra["group_id"])
        with (Path(os.environ[ROLES]) / "sessions.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps({"session": session, "role": role}).encode() + b"\n")
        turns = 3 if role == "good" else 1
        async with ToolLoop(extra, [Counter], task={"session": session, "role": role}, max_turns=turns) as loop:
            await loop.run([{"role": "user", "content": "Count to two."}])
            if role == "bad":
                await misbehave(data["kind"], data["number"], data["seconds"])
            return await loop.result(1.0)


def role_of(group_id: str) -> str:
    """The role of this episode: the first of a group chooses by its id, the second gets the other one."""
    first = ("good", "bad")[zlib.crc32(group_id.encode()) % 2]
    try:
        os.close(os.open(Path(os.environ[ROLES]) / group_id, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "bad" if first == "good" else "good"
    return first


async def misbehave(kind: str, number: int, seconds: float) -> None:
    """Do what agents should not."""
    end = time.monotonic() + seconds
    match kind:
        case "wait":
            await asyncio.sleep(seconds)
        case "block":
            time.sleep(seconds)  # noqa: ASYNC251 - this is the point
        case "sleep":
            while (left_s := end - time.monotonic()) > 0:
                try:
                    await asyncio.sleep(left_s)
                except asyncio.CancelledError:
                    continue
        case "spin":
            while time.monotonic() < end:
                pass
        case "leak":
            await asyncio.sleep(seconds)
            kept.append(bytearray(os.urandom(2**10)) * (LEAK_BYTES // 2**10))
        case "crash":
            await asyncio.sleep(seconds)
            crash(number % 3)


def crash(how: int) -> None:
    """End by an exception; or leave a process behind, and end by an exit or a signal."""
    if how == 2:
        raise ValueError("no luck")
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    if how == 0:
        os._exit(3)
    ctypes.string_at(0)
