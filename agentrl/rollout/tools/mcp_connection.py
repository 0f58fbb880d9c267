"""A connection to one MCP server, by the official SDK.

    STARTING ──tools listed──► CONNECTED ──close, or the server ends──► CLOSED
        └──────── error, time-out ───────────────────────────────────────►┘

One task holds the connection from its start to its end, as the SDK wants it. The calls come from any task.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import IO, TYPE_CHECKING, Any, Self

from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError, root_cause
from agentrl.rollout.tools.mcp_entry import McpEntry
from agentrl.rollout.tools.mcp_process import process_streams, stderr_file, tail_of
from agentrl.rollout.tools.tool_result import ToolBroken, ToolError, ToolResult

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult, Tool

MAX_PAGES = 64
"""Pages of a server's list of tools that are read."""
CLOSE_S = 30.0
HTTP_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S = 30.0


class McpConnection:
    """A connection that `start` opens. `tools` are those that the server lists."""

    def __init__(self, entry: McpEntry, task: Json, folder: str) -> None:
        self._entry, self._data, self._folder = entry, task, folder
        self.tools: list[Tool] = []
        self._client: Client | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._close = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        """Connect. Raises ToolBroken."""
        self._task = asyncio.create_task(self._hold())
        try:
            async with asyncio.timeout(self._entry.start_timeout_s):
                await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            limit_s = self._entry.start_timeout_s
            raise ToolBroken(f"mcp server {self._entry.name} did not start in {limit_s:g} s") from None
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def alive(self) -> bool:
        """Whether the connection is held."""
        return self._task is not None and not self._task.done() and not self._close.is_set()

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Call a tool. Raises ToolError for what the model did wrong, ToolBroken when the connection is lost."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        if not self.alive or self._client is None:
            raise ToolBroken(f"mcp server {self._entry.name} has ended")
        try:
            return result_of(await self._client.call_tool(name, arguments))
        except Exception as error:
            if not self.alive or (isinstance(error, MCPError) and error.error.code == CONNECTION_CLOSED):
                raise ToolBroken(f"mcp server {self._entry.name} ended during a call of {name}") from None
            if isinstance(error, MCPError):
                raise ToolError(error.error.message) from None
            raise

    async def close(self) -> None:
        """End the connection, and the process of the server. It goes on if the caller is cancelled."""
        self._close.set()
        if self._task is None:
            return
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_S)

    async def _hold(self) -> None:
        stderr = stderr_file()
        try:
            async with AsyncExitStack() as stack:
                stack.callback(stderr.close)
                try:
                    await self._connect(stack, stderr)
                except Exception as error:  # noqa: BLE001 - whatever the SDK raises: this server cannot be used
                    self._fail(error, stderr)
                    return
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._close.wait()
        except Exception as error:  # noqa: BLE001 - the end of a connection that is not needed any more
            self._fail(error, None)
        finally:
            self._close.set()

    def _fail(self, error: BaseException, stderr: IO[bytes] | None) -> None:
        if self._ready.done():
            return
        cause = root_cause(error)
        if not isinstance(cause, AgentRLError):
            tail = "" if stderr is None else tail_of(stderr)
            cause = ToolBroken(f"mcp server {self._entry.name} did not start: {type(cause).__name__}: {cause}{tail}")
        self._ready.set_exception(cause)
        self._ready.exception()  # read: the caller of `start` may be gone

    async def _connect(self, stack: AsyncExitStack, stderr: IO[bytes]) -> None:
        from mcp import Client

        transport: Any = await self._transport(stack, stderr)
        self._client = client = await stack.enter_async_context(Client(transport, cache=None))
        cursor = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            self.tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _transport(self, stack: AsyncExitStack, stderr: IO[bytes]) -> object:
        if isinstance(self._entry.mcp, str):
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=HTTP_TIMEOUT_S)
            http = httpx2.AsyncClient(headers=self._entry.all_headers(), timeout=timeout)
            await stack.enter_async_context(http)
            return streamable_http_client(self._entry.mcp, http_client=http)
        from mcp.client.stdio import get_default_environment

        argv, env, cwd = self._entry.command(self._data, self._folder)
        return process_streams(argv, get_default_environment() | env, cwd, stderr, self._close)


def result_of(found: CallToolResult) -> ToolResult:
    """A server's result as text. Parts that are no text are named."""
    parts = []
    for part in found.content:
        match part.type:
            case "text":
                parts.append(part.text)
            case "image" | "audio":
                parts.append(f"[{part.mime_type}, {len(part.data) * 3 // 4} bytes]")
            case "resource_link":
                parts.append(f"[{part.uri}]")
            case "resource":
                parts.append(getattr(part.resource, "text", None) or f"[{part.resource.uri}]")
    if not parts and found.structured_content is not None:
        parts.append(json.dumps(found.structured_content, ensure_ascii=False))
    text = "\n".join(parts)
    return ToolResult(text=f"error: {text}" if found.is_error else text, error=bool(found.is_error))
