"""Prepared versions of the fake engine: the protocol and the fetches are real, the staged weights are their digests."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from aiohttp import web

from agentrl.engine.control.preparation import UNDEFINED, Order, Swap
from agentrl.engine.prepared.preparer import Digests, Stager
from agentrl.errors import EngineError, NotPrepared

HEADER_LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100 << 20


class Weights(Protocol):
    """The part of the fake engine that a swap changes."""

    scheduler_paused: bool
    version: int | str
    content: dict[str, str] | None
    undefined: bool

    def _is_idle(self) -> bool: ...
    async def _die(self) -> None: ...


class FakeStager(Stager):
    """Stages digests of a folder's tensors. Tests script its faults.

    `fail_next_stage`: the error of the next staging; `fail_next_swap`: the error of a swap that stops in the middle;
    `dies_at`: where the server dies; `holding`: staging waits until a test sets it to False.
    """

    def __init__(self, engine: Weights) -> None:
        self._engine = engine
        self._staged: dict[str, str] | None = None
        self.fail_next_stage: str | None = None
        self.fail_next_swap: str | None = None
        self.dies_at: Literal["staging", "swap"] | None = None
        self.holding = False

    async def stage(self, folder: Path, order: Order) -> Digests | None:
        """Read the folder."""
        if self.dies_at == "staging":
            await self._engine._die()
        while self.holding:  # noqa: ASYNC110  a test in another thread ends it
            await asyncio.sleep(0.001)
        problem, self.fail_next_stage = self.fail_next_stage, None
        if problem is not None:
            raise EngineError(problem)
        self._staged = await asyncio.to_thread(folder_digests, folder)
        return [self._staged] if order.digests else None

    async def swap(self, order: Swap) -> float:
        """Serve the staged digests as the version."""
        engine = self._engine
        if self.dies_at == "swap":
            await engine._die()
        if not engine.scheduler_paused or self._staged is None:
            raise NotPrepared("no version is staged" if self._staged is None else "the engine is not paused")
        if order.flush_cache and not engine._is_idle():
            raise NotPrepared("requests are running: their cache cannot be flushed")
        problem, self.fail_next_swap = self.fail_next_swap, None
        if problem is not None:
            engine.version, engine.undefined, self._staged = UNDEFINED, True, None
            raise EngineError(problem)
        engine.version, engine.content, engine.undefined = str(order.version), self._staged, False
        self._staged = None
        return 0.001

    async def discard(self) -> None:
        """Forget the digests."""
        self._staged = None


def folder_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each tensor in a folder's safetensors files. Raises EngineError for a damaged file."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:HEADER_LENGTH_BYTES], "little")
        start = HEADER_LENGTH_BYTES + length
        try:
            header = json.loads(data[HEADER_LENGTH_BYTES : min(start, MOST_HEADER_BYTES)])
        except ValueError as error:
            raise EngineError(f"{path} is not a safetensors file") from error
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            found[name] = hashlib.sha256(data[start + first : start + last]).hexdigest()
    return dict(sorted(found.items()))


async def serve_asgi(app: Callable[[Any, Any, Any], Awaitable[None]], request: web.Request) -> web.StreamResponse:
    """Answer an aiohttp request by an ASGI application."""
    response = web.StreamResponse()
    scope = {
        "type": "http",
        "method": request.method,
        "path": request.path,
        "headers": [(name.lower(), value) for name, value in request.raw_headers],
        "query_string": b"",
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            response.set_status(message["status"])
            for name, value in message["headers"]:
                response.headers[name.decode()] = value.decode()
            await response.prepare(request)
        elif message.get("body"):
            await response.write(message["body"])

    await app(scope, receive, send)
    return response
