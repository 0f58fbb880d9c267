"""An MCP server by the official SDK, with a state of its own: `counting_server.py [PORT | dies | mute | chatty]`."""

from __future__ import annotations

import asyncio
import os
import sys
import time

if sys.argv[1:] == ["dies"]:
    sys.exit("no such database")
if sys.argv[1:] == ["mute"]:
    time.sleep(600)

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("counting")
count = 0


@server.tool()
def add(n: int = 1) -> int:
    """Add to the count.

    Args:
        n: how much
    """
    global count
    count += n
    return count


@server.tool()
def pid() -> str:
    """The process of this server."""
    return str(os.getpid())


@server.tool(name="file.here")
def here() -> str:
    """Where this server runs."""
    return f"{os.getcwd()} {os.environ.get('WORD')} {os.environ.get('AGENTRL_RUN_KEY')}"


@server.tool()
def fail(how: str) -> str:
    """Fail."""
    if how == "die":
        os._exit(3)
    raise ToolError("not today")


@server.tool()
async def wait() -> str:
    """Wait for long."""
    await asyncio.sleep(600)
    return "waited"


if __name__ == "__main__":
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    if how == "chatty":
        print("welcome to this server", flush=True)
    if how.isdecimal():
        server.run(transport="streamable-http", port=int(how))
    else:
        server.run()
