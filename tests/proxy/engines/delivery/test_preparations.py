"""Following the preparation of one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from agentrl.engine.control.preparation import Order, Preparation, PreparationState
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.proxy.engines.delivery.preparations import Preparations, Wish
from agentrl.proxy.engines.delivery.version_places import VersionPlaces
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.version_delivery import EngineBusy

OURS, OTHER = "0" * 64, "1" * 64


class Preparing(SGLangClient):
    """A client of an engine that says that it prepares a version, and takes orders."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        super().__init__(url, http)
        self.says = Preparation()
        self.orders: list[Order] = []

    async def preparation(self, timeout_s: float = 0.0) -> Preparation | None:
        return self.says

    async def prepare(self, order: Order, timeout_s: float = 0.0) -> Preparation:
        self.orders.append(order)
        return Preparation(name=order.name, version=order.version, state=PreparationState.FETCHING)


@pytest.fixture
async def client() -> AsyncIterator[Preparing]:
    async with aiohttp.ClientSession() as http:
        yield Preparing("http://engine:1", http)


@pytest.fixture
def wish(places: VersionPlaces) -> Wish:
    return Wish(version=2, folder=places.weights / "v2-a", checksum=OURS)


def preparations(places: VersionPlaces, timeout_s: float) -> Preparations:
    return Preparations(places, fan_out=1, parallel=1, timeout_s=timeout_s)


@pytest.mark.parametrize("state", [PreparationState.FETCHING, PreparationState.STAGING, PreparationState.READY])
async def test_a_newer_version_holds_an_engine_back_for_a_limited_time(
    client: Preparing, places: VersionPlaces, wish: Wish, state: PreparationState
) -> None:
    """Its publish may have been abandoned, and its source may hang."""
    client.says, engine = Preparation(name="v3-a", version=3, state=state), Engine(client)
    with pytest.raises(EngineBusy, match="version 3"):
        await preparations(places, 60.0).advance(engine, wish, [])
    assert client.orders == []
    await preparations(places, 0.0).advance(engine, wish, [])
    assert [order.name for order in client.orders] == ["v2-a"]


async def test_a_version_of_the_same_name_with_other_tensors_is_prepared_again(
    client: Preparing, places: VersionPlaces, wish: Wish
) -> None:
    """A resumed trainer has written it again, in another type."""
    ready = Preparation(name="v2-a", version=2, checksum=OTHER, state=PreparationState.READY)
    client.says, engine = ready, Engine(client)
    with pytest.raises(EngineBusy, match="version 2"):
        await preparations(places, 60.0).advance(engine, wish, [])
    assert [order.checksum for order in client.orders] == [OURS]
    client.says = ready.model_copy(update={"checksum": OURS})
    assert await preparations(places, 60.0).advance(engine, wish, []) is not None


async def test_a_newer_version_that_is_ordered_again_is_awaited_anew(
    client: Preparing, places: VersionPlaces, wish: Wish
) -> None:
    newer, engine = Preparation(name="v3-a", version=3, state=PreparationState.FETCHING), Engine(client)
    client.says = newer
    with pytest.raises(EngineBusy, match="version 3"):
        await preparations(places, 60.0).advance(engine, wish, [])
    client.says = newer.model_copy(update={"state": PreparationState.FAILED})
    with pytest.raises(EngineBusy, match="version 2"):
        await preparations(places, 60.0).advance(engine, wish, [])
    assert engine.newer is None
