"""Faults of prepared versions that tests script on the fake engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import aiohttp
import numpy as np
import pytest
from version_folders import read_tensors, tensors, write_version

from agentrl.engine.control.preparation import UNDEFINED, Order, Preparation, PreparationState
from agentrl.engine.engine_client import EngineClient, Health
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import CannotPrepare, EngineError, EngineUnavailable, NotPrepared
from agentrl.testing import FakeEngine

NAMES = ("v1-a", "v2-a")


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[FakeEngine]:
    with FakeEngine(cache=tmp_path / "cache") as made:
        yield made


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    async with aiohttp.ClientSession() as http:
        with closing(SGLangClient(engine.url, http)) as made:
            yield made


@pytest.fixture
def orders(tmp_path: Path) -> list[Order]:
    """Versions 1 and 2, copied into the cache."""
    rng = np.random.default_rng(3)
    source = {"kind": "folder", "root": str(tmp_path / "weights"), "in_place": False}
    found = []
    for version, name in enumerate(NAMES, 1):
        manifest = write_version(tmp_path / "weights", name, tensors(rng))
        found.append(Order(version=version, name=name, checksum=manifest.checksum, sources=[source], digests=True))
    return found


async def ended(client: EngineClient) -> Preparation:
    async with asyncio.timeout(10):
        while True:
            found = await client.preparation()
            assert found is not None
            if found.state in (PreparationState.READY, PreparationState.FAILED):
                return found
            await asyncio.sleep(0.001)


async def test_digests_are_those_of_the_tensors(client: EngineClient, orders: list[Order], tmp_path: Path) -> None:
    await client.prepare(orders[0])
    await ended(client)
    content = read_tensors(tmp_path / "weights" / "v1-a")
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    assert await client.prepared_digests("v1-a") == [digests]
    await client.pause()
    await client.swap("v1-a", 1)
    assert await client.checksums() == [digests]
    await client.update_weights_from_disk(tmp_path / "weights" / "v1-a", 1)
    assert await client.checksums() == [digests]


async def test_an_engine_without_a_cache_cannot_prepare(fake_engine: FakeEngine, orders: list[Order]) -> None:
    async with aiohttp.ClientSession() as http:
        client = SGLangClient(fake_engine.url, http)
        assert await client.preparation() is None
        with pytest.raises(CannotPrepare):
            await client.prepare(orders[0])


async def test_a_staging_fails_once(client: EngineClient, engine: FakeEngine, orders: list[Order]) -> None:
    engine.stager.fail_next_stage = "no memory"
    await client.prepare(orders[0])
    assert (await ended(client)).error == "no memory"
    await client.prepare(orders[0])
    assert (await ended(client)).state is PreparationState.READY


async def test_a_staging_that_is_held_can_be_replaced(
    client: EngineClient, engine: FakeEngine, orders: list[Order]
) -> None:
    engine.stager.holding = True
    await client.prepare(orders[0])
    async with asyncio.timeout(10):
        while (await client.preparation()).state is not PreparationState.STAGING:  # noqa: ASYNC110  another thread
            await asyncio.sleep(0.001)
    await client.prepare(orders[1])
    engine.stager.holding = False
    assert (await ended(client)).name == "v2-a"
    await client.pause()
    with pytest.raises(NotPrepared):
        await client.swap("v1-a", 1)
    await client.swap("v2-a", 2)
    assert engine.version == "2"


async def test_a_swap_that_fails_in_the_middle_leaves_no_version(
    client: EngineClient, engine: FakeEngine, orders: list[Order], tmp_path: Path
) -> None:
    await client.prepare(orders[0])
    await ended(client)
    await client.pause()
    engine.stager.fail_next_swap = "rank 1 failed"
    with pytest.raises(EngineError, match="rank 1 failed") as caught:
        await client.swap("v1-a", 1)
    assert not isinstance(caught.value, NotPrepared)
    assert (await client.model_info()).version == UNDEFINED
    await client.update_weights_from_disk(tmp_path / "weights" / "v1-a", 1)
    await client.continue_generation()
    assert (await client.model_info()).weight_version == 1


@pytest.mark.parametrize("where", ["staging", "swap"])
async def test_an_engine_that_dies_has_its_base_weights_after_a_restart(
    client: EngineClient, engine: FakeEngine, orders: list[Order], where: Literal["staging", "swap"]
) -> None:
    engine.stager.dies_at = where
    await client.prepare(orders[0])
    if where == "swap":
        await ended(client)
        await client.pause()
        with pytest.raises(EngineUnavailable):
            await client.swap("v1-a", 1)
    async with asyncio.timeout(10):
        while await client.health() is not Health.DEAD:  # noqa: ASYNC110  another thread
            await asyncio.sleep(0.001)
    engine.stager.dies_at = None
    engine.stop()
    engine.start()
    found = await client.preparation()
    assert found is not None
    assert found.state is PreparationState.NONE
    assert (await client.model_info()).weight_version == 0
    await client.prepare(orders[0])
    assert (await ended(client)).state is PreparationState.READY
