"""Replicas whose engines prepare versions, and a lineage of versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from replica_fleet import ReplicaFleet

from agentrl.proxy.engines.delivery.version_places import VersionPlaces
from agentrl.testing import FakeEngine
from agentrl.versions.version_cache import VersionCache

from .prepared_fleet import PreparedFleet

ROOM = 1 << 30


@pytest.fixture
def places(tmp_path: Path) -> VersionPlaces:
    """The weights folder is on a disk that all share."""
    return VersionPlaces(
        weights=tmp_path / "weights",
        cache=VersionCache(tmp_path / "cache-of-proxy", ROOM),
        storage_url=None,
        admin_key="admin-key",
        address=lambda url: None,
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., FakeEngine]]:
    """Starts an engine with a cache of its own."""
    with ExitStack() as stack:
        count = 0

        def begin(**options: object) -> FakeEngine:
            nonlocal count
            count += 1
            settings = {"cache": tmp_path / f"cache-{count}", "cache_bytes": ROOM} | options
            return stack.enter_context(FakeEngine(**settings))  # type: ignore[arg-type]

        yield begin


@pytest.fixture
async def fleet(replicas: ReplicaFleet, places: VersionPlaces, start: Callable[..., FakeEngine]) -> PreparedFleet:
    """Four engines that serve the base weights at the replicas a and b."""
    replicas.places = places
    made = PreparedFleet(replicas, places.weights, start)
    await made.begin(4)
    return made
