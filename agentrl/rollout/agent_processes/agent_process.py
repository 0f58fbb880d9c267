"""The worker's end of one process that runs agents.

STARTING ──► SERVING ◄──► STALLED   an agent blocks its event loop: it answers no ping, and gets no new episodes
                │             │
                └► RETIRING ◄─┘     it gets no new episodes, and ends with its last one
                      │
                      └► ENDED      its episodes that still run fail
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import time

from agentrl.domain.schemas import Json
from agentrl.environment import without_secrets
from agentrl.errors import AgentRLError, UserError
from agentrl.processes import children
from agentrl.rollout.agent_processes.agent_messages import LONGEST_LINE_BYTES, line, read_result
from agentrl.rollout.episode import AgentFailed
from agentrl.rollout.score import Result

LOAD_TIMEOUT_S = 300.0
"""How long the import of the agent's module may take."""
PING_S = 0.5
STALLED_S = 2.0
"""A process that answers no ping for this long is stalled."""
CANCEL_S = 10.0
"""How long a cancelled episode may take to end before its process is killed."""
DYING_S = 5.0
"""How long the exit status of a process is awaited after its connection has ended."""
STDERR = 2
"""Where the output of agents goes: a worker's stdout shows its progress."""


class AgentProcess:
    """One process. `running` counts its episodes; `retiring` says that it gets no more of them."""

    def __init__(self, guard: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        self.running = 0
        self.retiring = False
        self.rss_mb = 0.0
        self._guard, self._writer = guard, writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._unanswered_since: float | None = None  # the oldest ping without a pong
        self._why_killed: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, config: Json) -> AgentProcess:
        """Start a process, which loads the agent. Raises UserError when it cannot be loaded."""
        ours, its = socket.socketpair()
        try:
            command = [sys.executable, "-m", "agentrl.rollout.agent_processes.agent_host", str(its.fileno())]
            env = without_secrets(os.environ)
            guard = await children.start(command, env=env, stdout=STDERR, stderr=None, pass_fds=[its.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LONGEST_LINE_BYTES)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                writer.write(line({"config": config}))
                if not (first := await _next_line(reader)):
                    status = _status(await guard.wait())
                    raise AgentRLError(f"a process for agents died while it loaded the agent{status}")
            loaded = json.loads(first)
            if "error" in loaded:
                raise UserError(loaded["error"])
        except BaseException as error:
            writer.close()
            await asyncio.shield(children.stop(guard, 0.0))
            if isinstance(error, TimeoutError):
                raise AgentRLError(f"loading the agent took longer than {LOAD_TIMEOUT_S:g} s") from None
            raise
        process = cls(guard, writer)
        process._tasks = [asyncio.create_task(process._read(reader)), asyncio.create_task(process._ping())]
        return process

    @property
    def stalled(self) -> bool:
        """Whether an agent blocks the process."""
        return self._unanswered_since is not None and time.monotonic() - self._unanswered_since > STALLED_S

    async def run(self, data: Json, extra: Json) -> Result:
        """Run an episode. Raises AgentFailed. Cancellation ends the episode, at the latest with its process."""
        if self.retiring:
            raise AgentFailed(self._why_killed or "its process died")
        number = next(self._ids)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(line({"run": number, "data": data, "extra": extra}))
            answer = await asyncio.shield(reply)
        except asyncio.CancelledError:
            await asyncio.shield(self._cancel(number, reply))
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise AgentFailed(str(answer["error"]))
        return read_result(answer["result"])

    async def stop(self, why: str = "the worker ended its process") -> None:
        """Kill the process and everything that it started; its episodes fail with this reason."""
        self.retiring = True
        self._why_killed = self._why_killed or why
        if self._guard.returncode is None:
            await children.stop(self._guard, 0.0)
        self._writer.close()
        reading, pinging = self._tasks
        pinging.cancel()
        await asyncio.wait([reading, pinging])

    async def _cancel(self, number: int, reply: asyncio.Future[Json]) -> None:
        self._writer.write(line({"cancel": number}))
        done, _ = await asyncio.wait([reply], timeout=CANCEL_S)
        if not done:
            self.retiring = True
            await self.stop("another episode blocked its process, which was killed")

    async def _ping(self) -> None:
        for number in itertools.count():
            self._unanswered_since = self._unanswered_since or time.monotonic()
            with contextlib.suppress(ConnectionError):
                self._writer.write(line({"ping": number}))
            await asyncio.sleep(PING_S)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand each result to its episode; when the connection ends, fail the episodes that run."""
        problem = "its process closed the connection"
        try:
            while text := await _next_line(reader):
                message = json.loads(text)
                if "pong" in message:
                    self._unanswered_since, self.rss_mb = None, float(message["rss_mb"])
                    continue
                waiting = self._waiting.get(message["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        except (ValueError, KeyError, TypeError) as error:
            problem = f"the messages of its process cannot be read: {error}"
        self.retiring = True
        if self._why_killed is None:
            with contextlib.suppress(TimeoutError):
                problem = f"its process died{_status(await asyncio.wait_for(self._guard.wait(), DYING_S))}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({"error": self._why_killed or problem})


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty at the end of the connection."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


def _status(status: int) -> str:
    return f" (signal {status - 128})" if status > 128 else f" (exit status {status})"
