"""The pool's end of one process that runs reward functions. A guard ends the process when this one dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys

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
    async def start(cls, functions: Json, memory_mb: int) -> RewardProcess:
        """Start a process, which loads the functions. Raises UserError when one cannot be loaded."""
        ours, its = socket.socketpair()
        try:
            command = [sys.executable, "-m", "agentrl.rollout.rewards.reward_host", str(its.fileno())]
            env = without_secrets(os.environ)
            guard = await children.start(command, env=env, stdout=STDERR, stderr=None, pass_fds=[its.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LONGEST_REPLY_BYTES)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                writer.write(json.dumps({"functions": functions, "memory_mb": memory_mb}).encode() + b"\n")
                line = await _line(reader)
                if not line:
                    raise CallFailed(f"a process died while it imported the functions{_status(await guard.wait())}")
            loaded = json.loads(line)
            if "error" in loaded:
                raise UserError(loaded["error"])
        except BaseException as error:
            writer.close()
            await asyncio.shield(children.stop(guard, 0.0))
            if isinstance(error, TimeoutError):
                raise CallFailed(f"importing the functions took longer than {LOAD_TIMEOUT_S:g} s") from None
            raise
        process = cls(guard, writer, loaded["ready"])
        process._reading = asyncio.create_task(process._read(reader))
        return process

    async def call(self, name: str, answers: list[Json], timeout_s: float) -> Json:
        """Call a function; returns `{"values": […]}`. Raises CallFailed. A call that is late ends the process."""
        if self.retiring:
            raise CallFailed("its process died")
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
            while line := await _line(reader):
                answer = json.loads(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (ValueError, KeyError, TypeError) as error:
            problem = f"its reply cannot be read: {error}"
        self.retiring = True
        with contextlib.suppress(TimeoutError):
            problem = f"its process died{_status(await asyncio.wait_for(self._guard.wait(), DYING_S))}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(CallFailed(problem))


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty at the end of the connection."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


def _status(status: int) -> str:
    return f" (signal {status - 128})" if status > 128 else f" (exit status {status})"
