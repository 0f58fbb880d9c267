"""The pool's end of one process that runs reward functions. A guard ends the process when this one dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.environment import without_secrets
from agentrl.errors import AgentRLError, UserError
from agentrl.processes import children

LOAD_TIMEOUT_S = 120.0
"""How long the import of the functions' modules may take."""
LATE_S = 1.0
"""How much later than an `async def` function its process is ended, which has not cancelled it in time."""
LONGEST_REPLY_BYTES = 16 * 2**20
STDERR = 2
"""Where the output of functions goes: a worker's stdout shows its progress."""
DYING_S = 5.0
"""How long the exit status of a process is awaited after its connection has ended."""


class CallFailed(AgentRLError):
    """One call of a reward function failed: it raised, timed out or crashed, or returned no finite number.

    `final` means that another attempt would not help.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class RewardProcess:
    """One process. `running` counts its calls; `retiring` says that it gets no more of them."""

    def __init__(self, guard: asyncio.subprocess.Process, writer: asyncio.StreamWriter, facts: Json) -> None:
        self.facts = facts
        self.running = 0
        self.exclusive = False  # a plain function runs
        self.retiring = False
        self.calls = 0
        self.rss_mb = 0.0
        self._guard, self._writer = guard, writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, listener: Listener, functions: Json, memory_mb: int) -> RewardProcess:
        """Start a process, which loads the functions. Raises UserError when one cannot be loaded."""
        name, connected = listener.expect()
        command = [sys.executable, "-m", "agentrl.rollout.rewards.reward_host", listener.path, name]
        guard = await children.start(command, env=without_secrets(os.environ), stdout=STDERR, stderr=None)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                reader, writer = await _first(connected, guard)
                writer.write(json.dumps({"functions": functions, "memory_mb": memory_mb}).encode() + b"\n")
                line = await reader.readline()
            if not line:
                status = await guard.wait()
                raise CallFailed(f"a process died while it imported the functions{_status(status)}")
            loaded = json.loads(line)
            if "error" in loaded:
                raise UserError(loaded["error"])
        except BaseException as error:
            await asyncio.shield(children.stop(guard, 0.0))
            if isinstance(error, TimeoutError):
                raise CallFailed(f"importing the functions took longer than {LOAD_TIMEOUT_S:g} s") from None
            raise
        finally:
            listener.forget(name)
        process = cls(guard, writer, loaded["ready"])
        process._reading = asyncio.create_task(process._read(reader))
        return process

    async def call(self, name: str, answers: list[Json], timeout_s: float) -> Json:
        """Call a function; returns `{"values": […]}`. Raises CallFailed. A call that is late ends the process."""
        number = next(self._ids)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        is_async = self.facts[name]["is_async"]
        request = {"id": number, "name": name, "answers": answers, "timeout_s": timeout_s}
        self.calls += 1
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(timeout_s + (LATE_S if is_async else 0.0)):
                answer: Json = await reply
        except TimeoutError:
            await self.stop()
            raise CallFailed(f"ran longer than {timeout_s:g} s") from None
        except asyncio.CancelledError:
            if not is_async:
                self.retiring = True
                await asyncio.shield(self.stop())
            raise
        finally:
            self._waiting.pop(number, None)
        if "timed_out" in answer:
            raise CallFailed(f"ran longer than {timeout_s:g} s")
        self.rss_mb = float(answer.get("rss_mb", 0.0))
        if "error" in answer:
            raise CallFailed(str(answer["error"]), final=bool(answer.get("final")))
        return answer

    async def stop(self) -> None:
        """Kill the process and everything that it started."""
        self.retiring = True
        if self._guard.returncode is None:
            await children.stop(self._guard, 0.0)
        self._writer.close()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand each reply to its call; when the connection ends, fail the calls that wait."""
        problem = "its connection ended"
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (ValueError, KeyError, TypeError, ConnectionError) as error:
            problem = f"its reply cannot be read: {error}"
        self.retiring = True
        with contextlib.suppress(TimeoutError):
            problem = f"its process died{_status(await asyncio.wait_for(self._guard.wait(), DYING_S))}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(CallFailed(problem))


class Listener:
    """The socket to which processes connect."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._names = itertools.count()
        self._expected: dict[str, asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}

    def expect(self) -> tuple[str, asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
        """The name of the next process, and the connection that it will make."""
        name = str(next(self._names))
        connected = self._expected[name] = asyncio.get_running_loop().create_future()
        return name, connected

    def forget(self, name: str) -> None:
        """Expect the process no longer."""
        self._expected.pop(name, None)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand a connection to the start that waits for it."""
        try:
            name = str(json.loads(await reader.readline())["process"])
        except (ValueError, KeyError, TypeError):
            name = ""
        waiting = self._expected.get(name)
        if waiting is None or waiting.done():
            writer.close()
        else:
            waiting.set_result((reader, writer))


async def _first(
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]], guard: asyncio.subprocess.Process
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The connection, unless the process ends before it connects."""
    ended = asyncio.ensure_future(guard.wait())
    either: list[asyncio.Future[Any]] = [connected, ended]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            raise CallFailed(f"a process for reward functions did not start{_status(ended.result())}")
        return connected.result()
    finally:
        ended.cancel()


def _status(status: int) -> str:
    return f" (signal {status - 128})" if status > 128 else f" (exit status {status})"
