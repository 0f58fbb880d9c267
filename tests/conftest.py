"""Fixtures that every test may use: databases, two models, a fake engine, one real SGLang server per test session."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `import databases` and `import postgres`

from databases import KINDS, Databases

from agentrl.engine.client import EngineClient
from agentrl.engine.server import EngineSpec, Server, free_port, launch
from agentrl.models import resolve_model
from agentrl.testing import FakeEngine


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    """Makes and drops databases; for tests that need several, or one kind only."""
    made = Databases(tmp_path_factory.mktemp("databases"))
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def database_kind(request: pytest.FixtureRequest) -> str:
    """`sqlite`, then `postgresql`: a test with any of the fixtures below runs once on each."""
    return str(request.param)


@pytest.fixture
def empty_database_url(databases: Databases, database_kind: str) -> Iterator[str]:
    """URL of a database without tables."""
    with databases.lent(database_kind, migrated=False) as url:
        yield url


@pytest.fixture
def database_url(databases: Databases, database_kind: str) -> Iterator[str]:
    """URL of a database at the newest revision."""
    with databases.lent(database_kind) as url:
        yield url


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the 0.4M-parameter Qwen2; made in the cache the first time (10 s)."""
    return resolve_model("tiny")


@pytest.fixture(scope="session")
def smollm2_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; made in the cache the first time (10 s)."""
    return resolve_model("smollm2")


@pytest.fixture
def fake_engine() -> Iterator[FakeEngine]:
    """A scriptable engine that serves on a real socket."""
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="session")
def sglang_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The one real SGLang server of the test session, on the tiny model. Tests that use it are marked `engine`."""
    log_file = tmp_path_factory.mktemp("sglang") / "engine.log"
    server = launch(EngineSpec(model=tiny_model, port=free_port(), log_file=log_file, max_running_requests=32))
    try:
        asyncio.run(server.wait_healthy())
        yield server
    finally:
        server.stop()


@pytest.fixture
async def sglang_engine(sglang_server: Server, tiny_model: Path) -> Server:
    """The real server with base weights as version 0, running, empty; whatever a test before did to it is undone."""
    async with aiohttp.ClientSession() as http:
        client = EngineClient(sglang_server.url, http)
        await client.pause("abort")
        await client.update_weights_from_disk(tiny_model, 0)
        await client.continue_generation()
    return sglang_server
