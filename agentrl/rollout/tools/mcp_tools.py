"""The tools of an MCP server: one server for each episode, or one for all episodes of a process."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.domain.schemas import Json
from agentrl.errors import UserError, did_you_mean
from agentrl.rollout import command
from agentrl.rollout.tools.mcp_connection import McpConnection
from agentrl.rollout.tools.mcp_entry import McpEntry
from agentrl.rollout.tools.tool_result import OpenTool, OpenTools, ToolContext, schema_of

if TYPE_CHECKING:
    from mcp_types import Tool

UNNAMEABLE = re.compile(r"[^A-Za-z0-9_-]")
_shared: list[McpTools] = []
"""Sources with a server that is shared and may run."""


class McpTools:
    """A source of the tools of a server."""

    def __init__(self, entry: McpEntry, at: str) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise UserError(f"{at}: MCP servers need the official SDK: pip install 'agentrl[mcp]'")
        if not isinstance(entry.mcp, str):
            try:
                command.check(entry.mcp)
            except UserError as error:
                raise UserError(f"{at}: {error}") from None
        self._entry = entry
        self._connection: McpConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()

    async def open(self, context: ToolContext) -> OpenTools:
        """The server's tools. Raises ToolBroken when it does not start, UserError for an unknown tool in `only`."""
        if self._entry.shared:
            connection = await self._shared_connection()
            return OpenTools(name=self._entry.name, tools=self._tools(connection))
        stack = AsyncExitStack()
        try:
            folder = ""
            if self._entry.needs_folder:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-mcp-"))
            connection = await McpConnection(self._entry, context.task, folder).start()
            stack.push_async_callback(connection.close)
            return OpenTools(name=self._entry.name, tools=self._tools(connection), release=stack.aclose)
        except BaseException:
            await stack.aclose()
            raise

    async def _shared_connection(self) -> McpConnection:
        """The server of this process; a new one if it has ended."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connection, self._starting = loop, None, asyncio.Lock()
        async with self._starting:
            if self._connection is None or not self._connection.alive:
                if self not in _shared:
                    _shared.append(self)
                self._connection = await McpConnection(self._entry, {}, "").start()
            return self._connection

    async def close(self) -> None:
        """End the shared server."""
        if self._connection is not None and self._loop is asyncio.get_running_loop():
            await self._connection.close()
        self._connection = None

    def _tools(self, connection: McpConnection) -> list[OpenTool]:
        listed = {one.name: one for one in connection.tools}
        names = list(listed) if self._entry.only is None else self._entry.only
        if unknown := [name for name in names if name not in listed]:
            hint = did_you_mean(unknown[0], listed)
            raise UserError(f"mcp server {self._entry.name} has no tool {unknown[0]!r}{hint}")
        return [self._tool(listed[name], connection) for name in names]

    def _tool(self, listed: Tool, connection: McpConnection) -> OpenTool:
        name = UNNAMEABLE.sub("_", self._entry.prefix + listed.name)
        schema = schema_of(name, listed.description or "", dict(listed.input_schema))
        return OpenTool(name=name, schema=schema, call=partial(_call, connection, listed.name))


async def _call(connection: McpConnection, name: str, arguments: Json, _: ToolContext) -> Any:
    return await connection.call(name, arguments)


@asynccontextmanager
async def shared_servers_closed() -> AsyncIterator[None]:
    """End the shared servers of this process when the block ends."""
    try:
        yield
    finally:
        while _shared:
            await _shared.pop().close()
