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
from arena import Arena, serve

from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import Server

PYTHON_OF_FRAMEWORKS = Path(__file__).parents[2] / ".venv-agents" / "bin" / "python"


@pytest.fixture(scope="session")
def frameworks() -> Path:
    """The Python of the environment of agent frameworks; tests that need it are skipped without it."""
    if not PYTHON_OF_FRAMEWORKS.exists():
        pytest.skip("no .venv-agents: run `make setup-agents`")
    return PYTHON_OF_FRAMEWORKS


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python that runs the programs of the arena."""
    return Path(sys.executable)


@pytest.fixture(scope="session")
def caller_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that always calls its tool."""
    folder = tmp_path_factory.mktemp("caller")
    caller.build(folder)
    return folder


@pytest.fixture(scope="module", params=["sglang", pytest.param("vllm", marks=pytest.mark.vllm)])
def arena(python: Path, caller_model: Path, databases: Databases, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """A real server with the caller's weights as version 0, behind a proxy. Who uses the server next resets it."""
    server: Server = request.getfixturevalue(f"{request.param}_server")
    asyncio.run(load_weights(server.spec, caller_model))
    with databases.lent("sqlite") as url, serve(url, caller_model, server.spec, python) as made:
        yield made


async def load_weights(engine: EngineSpec, folder: Path) -> None:
    async with aiohttp.ClientSession() as http:
        client = BACKENDS[engine.backend].client(engine.url, http, key=engine.key)
        await client.pause("abort")
        await client.update_weights_from_disk(folder, 0)
        await client.continue_generation()
