"""A pool of engines that get adapters, over a store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path

import aiohttp
import pytest

from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.proxy.engines.adapters import Adapters
from agentrl.proxy.engines.pool import EnginePool
from agentrl.testing import FakeEngine

from .adapter_pool import Store, probe, states


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
async def make(store: Store) -> AsyncIterator[Callable[..., EnginePool]]:
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:

        def build(*fakes: FakeEngine) -> EnginePool:
            clients = [stack.enter_context(closing(SGLangClient(fake.url, http))) for fake in fakes]
            return EnginePool(clients, store, adapters=Adapters(store.oldest_call))

        yield build


@pytest.fixture
async def pool(make: Callable[..., EnginePool], fakes: list[FakeEngine]) -> EnginePool:
    """Both engines serve."""
    pool = make(*fakes)
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    return pool
