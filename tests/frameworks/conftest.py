"""The arena for the tests of one module, and the model that plays in it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from databases import Databases

sys.path.insert(0, str(Path(__file__).parent))  # for `import arena` and `import caller`

import caller
from arena import PYTHON, Arena, serve

from agentrl.engine.server_process import Server
from agentrl.engine.sglang_client import EngineClient


@pytest.fixture(scope="session")
def frameworks() -> None:
    """The environment of agent frameworks. Its tests are skipped without it, but in CI (absences.py)."""
    if not PYTHON.exists():
        pytest.skip("no .venv-agents: run `make setup-agents`")


@pytest.fixture(scope="session")
def caller_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that always calls its tool."""
    folder = tmp_path_factory.mktemp("caller")
    caller.build(folder)
    return folder


@pytest.fixture(scope="module")
def arena(frameworks: None, sglang_server: Server, caller_model: Path, databases: Databases) -> Iterator[Arena]:
    """The real server with the caller's weights as version 0, behind a proxy. Who uses the server next resets it."""
    asyncio.run(load_weights(sglang_server.url, caller_model))
    with databases.lent("sqlite") as url, serve(url, caller_model, sglang_server.url) as made:
        yield made


async def load_weights(engine_url: str, folder: Path) -> None:
    async with aiohttp.ClientSession() as http:
        client = EngineClient(engine_url, http)
        await client.pause("abort")
        await client.update_weights_from_disk(folder, 0)
        await client.continue_generation()
