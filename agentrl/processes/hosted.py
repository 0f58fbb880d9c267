"""A child process that answers requests: both ends of its connection, which carries lines of JSON.

    here ══ setup ══════════════════► child ══ {"ready": …} or {"error": …} ══► here
    here ══ {"id": n, …} ═══════════► child ══ {"id": n, …} ══════════════════► here
    here ══ other messages ═════════► child ══ other messages ════════════════► here

The child runs a module of ours: `python -m MODULE N`, N an open socket; or another command: `COMMAND N`. It ends with
its connection, or by its guard when this process dies. A template (template.py) starts modules faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self

from agentrl.environment import without_secrets
from agentrl.errors import AgentRLError, UserError
from agentrl.processes import children
from agentrl.processes.template import STDERR, Template

DYING_S = 5.0
"""How long the exit status of a child is awaited after its connection has ended."""


class ProcessDied(AgentRLError):
    """A child process ended, was killed, or sent what cannot be read. The message says how, and begins with "its"."""


class NotStarted(AgentRLError):
    """A child process died, or took too long, before it was ready."""


class Kept(Protocol):
    """What ends a child with everything that it started."""

    @property
    def returncode(self) -> int | None:
        """The exit status of the child; None while it runs."""

    async def wait(self) -> int:
        """The exit status of the child, once it has ended."""

    async def stop(self) -> None:
        """Kill it, and wait."""


class Guarded:
    """A child behind a guard of its own."""

    def __init__(self, guard: asyncio.subprocess.Process) -> None:
        self._guard = guard

    @property
    def returncode(self) -> int | None:
        """The guard's exit status; None while it runs."""
        return self._guard.returncode

    async def wait(self) -> int:
        """Wait for the guard."""
        return await self._guard.wait()

    async def stop(self) -> None:
        """Let the guard kill it."""
        await children.stop(self._guard, 0.0)


class HostedProcess:
    """A child process. `running` is for its owner to count what it does; `retiring` means: give it nothing more."""

    def __init__(self, kept: Kept, writer: asyncio.StreamWriter, ready: Any) -> None:
        self.ready = ready
        """The child's first message, which says that it is ready."""
        self.running = 0
        self.retiring = False
        self.rss_mb = 0.0
        self.died: str | None = None
        """How the child ended; None while it is connected."""
        self._kept, self._writer = kept, writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def launch(
        cls,
        module: str | Sequence[str],
        setup: dict[str, Any],
        *,
        longest_line: int,
        doing: str,
        limit_s: float,
        template: Template | None = None,
    ) -> Self:
        """Start `module`, or a command that is a list, and wait until it is ready. Lines of more than `longest_line`
        bytes are refused. A `template` of the module forks it.

        Raises UserError with the child's error, and NotStarted when the child dies or needs more than `limit_s`;
        `doing` says in the message what it did then.
        """
        kept, connection = await _started(module, template)
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=longest_line)
        try:
            async with asyncio.timeout(limit_s):
                writer.write(line(setup))
                if not (first := await _next_line(reader)):
                    raise NotStarted(f"a process died while {doing}{_status(await kept.wait())}")
            answer = json.loads(first)
            if "error" in answer:
                raise UserError(answer["error"])
        except BaseException as error:
            writer.close()
            await asyncio.shield(kept.stop())
            if isinstance(error, TimeoutError):
                raise NotStarted(f"{doing} took longer than {limit_s:g} s") from None
            raise
        process = cls(kept, writer, answer["ready"])
        process._reading = asyncio.create_task(process._read(reader))
        return process

    @contextmanager
    def request(self, message: dict[str, Any]) -> Iterator[tuple[int, asyncio.Future[dict[str, Any]]]]:
        """Send a request. Yields its id and the future of its reply, which raises ProcessDied if there is none."""
        number = next(self._ids)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if self.died is not None:
                raise ProcessDied(self.died)
            self.send({"id": number, **message})
            yield number, reply
        finally:
            del self._waiting[number]
            if not reply.cancel() and not reply.cancelled():
                reply.exception()  # read, so that asyncio does not report it

    def send(self, message: dict[str, Any]) -> None:
        """Send any other message. Does nothing when the connection has ended."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(line(message))

    def received(self, message: dict[str, Any]) -> None:
        """Called with each message of the child that is no reply. May raise ValueError, KeyError or TypeError."""
        raise KeyError("id")

    async def stop(self, why: str = "its process was ended") -> None:
        """Kill the process and everything that it started. Requests without a reply raise ProcessDied with `why`."""
        self.retiring = True
        self.died = self.died or why
        if self._kept.returncode is None:
            await self._kept.stop()
        self._writer.close()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand each reply to its request; when the connection ends, fail the requests that wait."""
        problem = "its process closed the connection"
        try:
            while text := await _next_line(reader):
                message = json.loads(text)
                if "id" not in message:
                    self.received(message)
                elif (waiting := self._waiting.get(message["id"])) is not None and not waiting.done():
                    waiting.set_result(message)
        except (ValueError, KeyError, TypeError) as error:
            problem = f"its messages cannot be read: {error}"
        self.retiring = True
        if self.died is None:
            with contextlib.suppress(TimeoutError):
                problem = f"its process died{_status(await asyncio.wait_for(self._kept.wait(), DYING_S))}"
            self.died = self.died or problem
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ProcessDied(self.died))


async def _started(module: str | Sequence[str], template: Template | None) -> tuple[Kept, socket.socket]:
    if template is not None:
        with contextlib.suppress(ConnectionError):  # it has died: start the child without it
            return await template.fork()
    ours, its = socket.socketpair()
    try:
        command = [sys.executable, "-m", module] if isinstance(module, str) else list(module)
        command, env = [*command, str(its.fileno())], without_secrets(os.environ)
        guard = await children.start(command, env=env, stdout=STDERR, stderr=None, pass_fds=[its.fileno()], nice=True)
    except BaseException:
        ours.close()
        raise
    finally:
        its.close()
    return Guarded(guard), ours


def inherited(connected: str) -> socket.socket:
    """In the child: the open socket whose number is its only argument. Its stdout becomes its stderr."""
    sys.stdout = sys.stderr
    connection = socket.socket(fileno=int(connected))
    connection.set_inheritable(False)
    return connection


def line(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def rss_mb() -> float:
    """The resident memory of this process, in MiB; its peak where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty at the end of the connection."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


def _status(status: int) -> str:
    return f" (signal {status - 128})" if status > 128 else f" (exit status {status})"
