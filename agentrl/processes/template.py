"""Forks children from a process that has imported what they need (template_host.py): its parent's end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any, Self

from agentrl.environment import without_secrets
from agentrl.processes import children, guard

HOST = "agentrl.processes.template_host"
STDERR = 2
LOAD_TIMEOUT_S = 300.0
"""How long the imports may take."""


class Forked:
    """A child of a template. Its keeper ends it when the connection closes, also by our death."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.returncode: int | None = None
        self._writer, self._status = writer, asyncio.create_task(reader.read())

    async def wait(self) -> int:
        """The exit status, once it has ended (128 + N after signal N, also if its keeper was killed)."""
        with contextlib.suppress(ConnectionError):
            said = await asyncio.shield(self._status)
            self.returncode = int(said) if said else None
        if self.returncode is None:
            self.returncode = 128 + signal.SIGKILL
        self._writer.close()
        return self.returncode

    async def stop(self) -> None:
        """Kill it and everything that it started."""
        with contextlib.suppress(ConnectionError, OSError):
            self._writer.write(b"0.0")
            self._writer.write_eof()
        await self.wait()


class Template:
    """A process to fork from. `died` is True when it can fork no more."""

    def __init__(self, process: asyncio.subprocess.Process, connection: socket.socket) -> None:
        self._process, self._connection = process, connection

    @classmethod
    async def start(cls, host: str, setup: dict[str, Any]) -> Self | None:
        """Start a template for the module `host`; None where its children cannot be forked."""
        if not guard.LINUX:
            return None
        ours, its = socket.socketpair()
        try:
            command = [sys.executable, "-m", HOST, str(its.fileno())]
            env = without_secrets(os.environ)
            process = await children.start(command, env=env, stdout=STDERR, stderr=None, pass_fds=[its.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        template, ready = cls(process, ours), False
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                ready = await template._load({"host": host, "setup": setup})
        except TimeoutError:
            ready = False
        finally:
            if not ready:
                await asyncio.shield(template.stop())
        return template if ready else None

    @property
    def died(self) -> bool:
        """Whether it has ended."""
        return self._process.returncode is not None

    async def fork(self) -> tuple[Forked, socket.socket]:
        """A child, and the connection to it. Raises ConnectionError when the template has died."""
        ours, its = socket.socketpair()
        kept, keeper = socket.socketpair()
        try:
            socket.send_fds(self._connection, [b"f"], [its.fileno(), keeper.fileno()])
        except OSError as error:
            ours.close()
            kept.close()
            raise ConnectionError(str(error)) from error
        finally:
            its.close()
            keeper.close()
        return Forked(*await asyncio.open_unix_connection(sock=kept)), ours

    async def stop(self) -> None:
        """End it, and all its children."""
        if self._process.returncode is None:
            await children.stop(self._process, 0.0)
        self._connection.close()

    async def _load(self, asked: dict[str, Any]) -> bool:
        loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        said = b""
        try:
            await loop.sock_sendall(self._connection, json.dumps(asked).encode() + b"\n")
            while not said.endswith(b"\n"):
                if not (part := await loop.sock_recv(self._connection, 4096)):
                    return False
                said += part
        except ConnectionError:
            return False
        self._connection.setblocking(True)
        return bool(json.loads(said)["ready"])
