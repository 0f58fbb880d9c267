"""The reference server of everything that the protocol has, from npm, over both transports."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import ToolLoop
from agentrl.engine.server_process import free_port

pytestmark = pytest.mark.long
PROGRAM = Path(__file__).parents[4] / ".venv-servers" / "bin" / "mcp-server-everything"


@pytest.fixture
def program() -> str:
    if not PROGRAM.exists():
        pytest.skip("no .venv-servers: run `make setup-servers`")
    return str(PROGRAM)


@pytest.fixture
def url(program: str) -> Iterator[str]:
    port = free_port()
    env = os.environ | {"PORT": str(port)}
    server = subprocess.Popen([program, "streamableHttp"], env=env, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        while f"{port}" not in server.stderr.readline():
            assert server.poll() is None
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_an_agent_uses_the_server_of_everything(
    model: Any, extra: Any, said: Any, program: str, transport: str, request: pytest.FixtureRequest
) -> None:
    server = [program, "stdio"] if transport == "stdio" else request.getfixturevalue("url")
    calls = [
        ("echo", {"message": "hi"}),
        ("get-sum", {"a": 2, "b": 3}),
        ("get-sum", {"a": "x"}),
        ("get-tiny-image", {}),
    ]
    model.says(calls, "done")
    async with ToolLoop(extra, [{"mcp": server}]) as loop:
        await loop.run([{"role": "user", "content": "go"}])
    echoed, added, refused, image = said(1)
    assert (echoed, added) == ("Echo: hi", "The sum of 2 and 3 is 5.")
    assert refused.startswith("error: ")
    assert "[image/png, " in image
