"""Fixtures that every test may use: two models, a fake engine, and one real SGLang server per test session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from agentrl.engine.client import EngineClient
from agentrl.engine.server import EngineSpec, Server, free_port, launch
from agentrl.models import resolve_model
from agentrl.testing import FakeEngine


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
