"""Answers requests for episodes over a socket, in lines of JSON. Standard library only.

    agentrl ══ {"settings"} ═══════════════════════════════════════════► open ══ {"ready"} or {"error"} ══► agentrl
    agentrl ══ {"id", "task", "base_url", "api_key", "is_eval"} ═══════► play ══ {"id", "rewards"} or {"id", "error"}
    agentrl ══ {"cancel": id} ═════════════════════════════════════════► the episode is cancelled

Episodes run at the same time, in one event loop. What the library prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

LONGEST_LINE_BYTES = 64 * 2**20
LONGEST_ERROR = 1_500


class Environment(Protocol):
    """A program's environment, made from its settings. It is an asynchronous context manager too."""

    def tasks(self) -> Iterable[dict[str, Any]]:
        """The environment's tasks."""

    async def play(self, request: dict[str, Any]) -> dict[str, float]:
        """Run the episode of a request; returns its rewards by name. Raises for an episode that failed."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *error: object) -> None: ...


def main(environment: Any) -> None:
    """Run a program whose `Environment` is made by `environment(settings)`."""
    sys.path.append(os.getcwd())  # the user's modules beside the config
    out = os.dup(1)
    os.dup2(2, 1)
    if sys.argv[1] == "tasks":
        with os.fdopen(out, "w") as lines:
            for task in environment(json.loads(sys.argv[2])).tasks():
                lines.write(json.dumps(task) + "\n")
        return
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    asyncio.run(serve(connection, environment))


async def serve(connection: socket.socket, environment: Any) -> None:
    """Open the environment, and run episodes until the connection ends."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE_BYTES)

    def send(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    setup = json.loads(await reader.readline())
    running: dict[int, asyncio.Task[None]] = {}
    try:
        opened = environment(setup["settings"])
        async with opened:
            send({"ready": {}})
            while text := await reader.readline():
                message = json.loads(text)
                if "cancel" in message:
                    if message["cancel"] in running:
                        running[message["cancel"]].cancel()
                    continue
                number = message["id"]
                running[number] = asyncio.create_task(answer(opened, message, send))
                running[number].add_done_callback(partial(forget, running, number))
            for task in list(running.values()):
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)
    except Exception as error:  # noqa: BLE001 - the library's
        send({"error": error_text(error)})
        await writer.drain()


async def answer(environment: Any, request: dict[str, Any], send: Any) -> None:
    """Run one episode and send its result."""
    try:
        send({"id": request["id"], "rewards": await environment.play(request)})
    except asyncio.CancelledError:
        send({"id": request["id"], "error": "cancelled"})
        raise
    except Exception as error:  # noqa: BLE001 - the library's
        send({"id": request["id"], "error": error_text(error)})


def forget(running: dict[int, asyncio.Task[None]], number: int, _: object) -> None:
    """An episode has ended."""
    running.pop(number)


def error_text(error: BaseException) -> str:
    """An error with its type."""
    return f"{type(error).__name__}: {error}"[:LONGEST_ERROR].encode(errors="replace").decode()
