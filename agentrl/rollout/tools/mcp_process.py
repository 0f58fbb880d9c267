"""An MCP server that is a process: its messages, and its end.

    session ─► one JSON object a line ─► socket ─► the server's stdin and stdout;  its stderr is kept in a file

A guard (agentrl/processes/guard.py) starts the server, and ends it with everything that it started: when the connection
is closed, and when this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, TYPE_CHECKING

from agentrl.processes import children
from agentrl.visible import visible

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

LONGEST_LINE_BYTES = 64 * 2**20
EXIT_S = 1.0
"""How long a server may take to end after its stdin has ended, and again after SIGTERM."""
TAIL_BYTES = 1_000
"""Bytes of stderr that an error quotes."""


@asynccontextmanager
async def process_streams(
    argv: Sequence[str], env: Mapping[str, str], cwd: str | None, stderr: IO[bytes], ended: asyncio.Event
) -> AsyncIterator[TransportStreams]:
    """Start a server, and connect to it until the block ends. Its end ends the stream of its messages, and sets
    `ended`.
    """
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    guard, reader, writer = await _started(argv, env, cwd, stderr)

    async def receive() -> None:
        with contextlib.suppress(anyio.BrokenResourceError, ConnectionError, ValueError):  # ValueError: a long line
            async with to_session:
                while line := await reader.readline():
                    message: SessionMessage | Exception
                    try:
                        message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                    except ValueError as error:  # a server that prints something else
                        message = error
                    await to_session.send(message)
        ended.set()

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                writer.write(text.encode() + b"\n")
                await writer.drain()

    tasks = [asyncio.create_task(receive()), asyncio.create_task(send())]
    try:
        yield from_server, to_server
    finally:
        for task in tasks:
            task.cancel()
        writer.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(guard.wait(), EXIT_S)
        await children.stop(guard, EXIT_S)
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (to_session, from_server, to_server, from_session):
            stream.close()


async def _started(
    argv: Sequence[str], env: Mapping[str, str], cwd: str | None, stderr: IO[bytes]
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    ours, its = socket.socketpair()
    try:
        guard = await children.start(
            argv, env=env, cwd=cwd, stdout=asyncio.subprocess.DEVNULL, stderr=stderr, io=its.fileno(), nice=True
        )
    except BaseException:
        ours.close()
        raise
    finally:
        its.close()
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LONGEST_LINE_BYTES)
    return guard, reader, writer


def stderr_file() -> IO[bytes]:
    """A file for a server's stderr, which is deleted when it is closed."""
    return tempfile.TemporaryFile()


def tail_of(stderr: IO[bytes]) -> str:
    """The end of what a server wrote to its stderr, for an error."""
    size = stderr.seek(0, 2)
    stderr.seek(max(0, size - TAIL_BYTES))
    text = visible(stderr.read().decode(errors="replace").strip(), "\n")
    return f": {text}" if text else ""
