"""What an engine says of its weights: whatever it is, the client returns what it promises or raises EngineError."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.domain.schemas import Json
from agentrl.engine.backends import BACKENDS
from agentrl.engine.chunks import VERSION_DIGITS, parse_version
from agentrl.engine.engine_client import EngineClient
from agentrl.errors import EngineError

MODELS: Json = {"data": [{"id": "base", "root": "/base", "parent": None}, {"id": "a", "root": "/a", "parent": "base"}]}
LABELS = [None, 3, 1.5, True, ["0"], {"version": "0"}, "9" * 101, "9" * 5000]
DIGESTS = [None, 3, "ranks", [None], [["checksums"]]]
Ask = Callable[[Json], EngineClient]


@pytest.fixture(params=["sglang", "vllm"])
async def ask(request: pytest.FixtureRequest) -> AsyncIterator[Ask]:
    """A client of a server that gives this answer to every request, over that of a healthy one."""
    said: Json = {}

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(said)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        client = BACKENDS[request.param].client(str(server.make_url("")), http)
        with closing(client):

            def of(odd: Json) -> EngineClient:
                said.clear()
                said.update({"model_path": "/base", "weight_version": "0", **MODELS, **odd})
                return client

            yield of


async def test_a_healthy_answer_is_read(ask: Ask) -> None:
    info = await ask({}).model_info()
    assert (info.model_path, info.version) == ("/base", "0")
    assert await ask({}).adapters() == {"a": "/a"}


@pytest.mark.parametrize("label", LABELS)
async def test_a_label_that_is_no_short_string_is_an_engine_error(ask: Ask, label: Any) -> None:
    with pytest.raises(EngineError, match="no weight version") as caught:
        await ask({"weight_version": label}).model_info()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("models", [None, "x", [None], ["x"]])
async def test_a_list_without_models_is_an_engine_error(ask: Ask, models: Any) -> None:
    with pytest.raises(EngineError):
        await ask({"model_path": None, "data": models}).model_info()
    with pytest.raises(EngineError):
        await ask({"data": models}).adapters()


async def test_an_adapter_without_a_folder_is_an_engine_error(ask: Ask) -> None:
    with pytest.raises(EngineError, match="adapter"):
        await ask({"data": [{"id": ["x"], "parent": "base"}]}).adapters()


@pytest.mark.parametrize("ranks", DIGESTS)
async def test_digests_of_no_ranks_are_an_engine_error(ask: Ask, ranks: Any) -> None:
    with pytest.raises(EngineError):
        await ask({"ranks": ranks}).checksums()


@pytest.mark.parametrize("ranks", [None, 0, -1, 1.5, True, "two", [1], 10**9])
async def test_a_number_of_ranks_that_is_none_is_an_engine_error(ask: Ask, ranks: Any) -> None:
    """It would be a process group that never forms, or that the proxy refuses for good."""
    with pytest.raises(EngineError):
        await ask({"tp_size": ranks}).tensor_ranks()


@pytest.mark.parametrize("label", ["", "default", "-1", "1.0", "9" * (VERSION_DIGITS + 1), "9" * 5000])
def test_a_label_is_a_version_only_if_the_store_can_keep_it(label: str) -> None:
    with pytest.raises(EngineError, match="is not a number") as caught:
        parse_version(label)
    assert len(str(caught.value)) < 400
