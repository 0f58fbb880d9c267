"""What we rely on in an engine, asserted on the fake one and on real SGLang, so that the fake cannot drift."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentrl.domain.schemas import Json
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.server_process import Server
from agentrl.testing import FakeEngine, FakeVLLM

from .servers import SERVERS


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


def named(names: Iterable[str]) -> list[Any]:
    """Servers as parameters of the fixture `url`."""
    return [pytest.param(name, marks=[pytest.mark.engine] * (name == "sglang")) for name in names]


def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of the server that the fixture's parameter names."""
    if request.param == "sglang":
        server: Server = request.getfixturevalue("sglang_engine")
        yield server.url
        return
    with fake(request.param, tmp_path / "versions") as engine:
        yield engine.url


@pytest.fixture(params=named(SERVERS))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield from served(request, tmp_path)


@pytest.fixture
async def client(request: pytest.FixtureRequest, url: str) -> AsyncIterator[EngineClient]:
    kind = BACKENDS[SERVERS[request.node.callspec.params["url"]]].client
    async with aiohttp.ClientSession() as http:
        with closing(kind(url, http)) as client:
            yield client
