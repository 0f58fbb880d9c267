"""Real SGLang that is killed while it prepares a version: the next start finds nothing but drafts, and removes them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from serving import serving
from version_folders import changed, write_version

from agentrl.engine.control.preparation import Order, PreparationState
from agentrl.engine.engine_client import Health
from agentrl.engine.prepared.version_host import CacheSpec
from agentrl.engine.server_process import Server
from agentrl.engine.sglang.sglang_client import SGLangClient

from .test_prepared_contract import ended, prepared, swapped, tensors_of

pytestmark = [pytest.mark.engine, pytest.mark.long]


class StallingHost:
    """Serves versions, but stops in the middle of each tensor file."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights
        self.stalled = asyncio.Event()

    async def file(self, request: web.Request) -> web.StreamResponse:
        data = (self._weights / request.match_info["name"] / request.match_info["file"]).read_bytes()
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        if request.path.endswith(".safetensors"):
            await response.write(data[: len(data) // 2])
            self.stalled.set()
            await asyncio.sleep(600)
        await response.write(data)
        return response


def kill(server: Server) -> None:
    """Kill all processes of the server but its guard, which then ends."""
    for child in psutil.Process(server.pid).children(recursive=True):
        os.kill(child.pid, signal.SIGKILL)


async def killed_while_fetching(server: Server, weights: Path, order: Order) -> None:
    host = StallingHost(weights)
    app = web.Application()
    app.router.add_get("/{name}/{file}", host.file)
    async with TestServer(app) as stalling, aiohttp.ClientSession() as http:
        source = {"kind": "http", "url": str(stalling.make_url("")).rstrip("/"), "token": "t"}
        client = SGLangClient(server.url, http)
        await client.prepare(order.model_copy(update={"sources": [source]}))
        await asyncio.wait_for(host.stalled.wait(), 60)
        kill(server)
        assert await client.health() is Health.DEAD


async def serves_the_version(server: Server, order: Order) -> None:
    async with aiohttp.ClientSession() as http:
        client = SGLangClient(server.url, http)
        assert (await client.model_info()).weight_version == 0
        await client.prepare(order.model_copy(update={"sources": [{"kind": "folder", "root": "/absent"}]}))
        assert (await ended(client)).state is PreparationState.FAILED
        await prepared(client, order)
        await swapped(client, 1)
        assert (await client.model_info()).weight_version == 1


def test_a_killed_engine_leaves_drafts_only(tiny_model: Path, tmp_path: Path) -> None:
    weights, cache = tmp_path / "weights", tmp_path / "cache"
    manifest = write_version(weights, "v1-a", changed(np.random.default_rng(5), tensors_of(tiny_model)))
    source = {"kind": "folder", "root": str(weights), "in_place": False}
    order = Order(version=1, name="v1-a", checksum=manifest.checksum, sources=[source])
    spec = CacheSpec(root=cache, limit_bytes=1 << 30)
    with serving(tiny_model, tmp_path / "first.log", version_cache=spec) as server:
        asyncio.run(killed_while_fetching(server, weights, order))
    left = {path.name for path in cache.iterdir() if path.is_dir()}
    assert left
    assert "v1-a" not in left
    with serving(tiny_model, tmp_path / "second.log", version_cache=spec) as server:
        asyncio.run(serves_the_version(server, order))
    assert not left & {path.name for path in cache.iterdir()}
