"""Fixtures of real vLLM servers (`make setup-vllm`, `make test-vllm`), imported by conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from serving import ENGINE_KEY, serving

from agentrl.engine.server_process import Server
from agentrl.engine.vllm.vllm_client import VLLMClient
from agentrl.engine.vllm.vllm_command import vllm_python
from agentrl.errors import UserError

CONTEXT = 2048


@pytest.fixture(scope="session")
def with_vllm() -> None:
    """Skips where there is no vLLM."""
    try:
        vllm_python()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def vllm_server(with_vllm: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The one real vLLM server of the session, on the tiny model; it takes adapters, and asks for ENGINE_KEY."""
    log_file = tmp_path_factory.mktemp("vllm") / "engine.log"
    settings = {"backend": "vllm", "key": ENGINE_KEY, "lora_rank": 8, "context_length": CONTEXT}
    with serving(tiny_model, log_file, max_running_requests=32, **settings) as server:
        yield server


@pytest.fixture
async def vllm_engine(vllm_server: Server, tiny_model: Path) -> Server:
    """That server with base weights as version 0, running, without adapters, empty."""
    async with aiohttp.ClientSession() as http:
        client = VLLMClient(vllm_server.url, http, key=ENGINE_KEY)
        await client.pause("abort")
        for name in await client.adapters():
            await client.unload_adapter(name)
        await client.update_weights_from_disk(tiny_model, 0)
        await client.continue_generation()
        client.close()
    return vllm_server
