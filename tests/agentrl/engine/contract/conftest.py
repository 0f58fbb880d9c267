"""What we rely on in an engine, asserted on the fake ones, on real SGLang and on real vLLM, so that no fake drifts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from serving import ENGINE_KEY

from agentrl.domain.schemas import Json
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.server_process import Server
from agentrl.testing import FakeEngine, FakeVLLM

from .servers import MARKS, SERVERS, marked


def endless(input_ids: list[int], sampling_params: Json) -> list[int]:
    """As many tokens as asked for, as a model with `ignore_eos` gives."""
    n = sampling_params["max_new_tokens"]
    return [3 + i % 200 for i in range(n if sampling_params.get("ignore_eos") else 3)] + [2]


def fake(name: str, cache: Path) -> FakeEngine:
    """The fake engine of this name, not started."""
    if name == "fake-vllm":
        return FakeVLLM(endless, context_length=2048, token_delay_s=0.002)
    cumulative = name == "fake-cumulative"
    return FakeEngine(endless, cumulative=cumulative, context_length=2048, token_delay_s=0.002, cache=cache)


@pytest.fixture(params=marked(*SERVERS))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param in MARKS:
        server: Server = request.getfixturevalue(f"{request.param}_engine")
        yield server.url
        return
    with fake(request.param, tmp_path / "versions") as engine:
        yield engine.url


@pytest.fixture
async def client(request: pytest.FixtureRequest, url: str) -> AsyncIterator[EngineClient]:
    kind = BACKENDS[SERVERS[request.node.callspec.params["url"]]].client
    async with aiohttp.ClientSession() as http:
        with closing(kind(url, http, key=ENGINE_KEY)) as client:
            yield client
