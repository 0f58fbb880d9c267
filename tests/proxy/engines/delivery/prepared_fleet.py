"""A run whose versions are folders with whole files or deltas, and engines that prepare them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from replica_fleet import ReplicaFleet
from serving import add_version

from agentrl.domain.schemas import Json
from agentrl.proxy.engines import publishing
from agentrl.proxy.engines.version_delivery import BY_FOLDER, Delivery
from agentrl.store import runs
from agentrl.testing import FakeEngine
from agentrl.versions.version_manifest import VersionManifest
from tests.version_folders import Tensors, changed, tensors, write_version


@dataclass
class PreparedFleet:
    """Two replicas, a and b, and their engines. Versions are written below `root` and recorded as of `recorded`."""

    replicas: ReplicaFleet
    root: Path
    start: Callable[..., FakeEngine]
    recorded: Path | None = None
    engines: list[FakeEngine] = field(default_factory=list)
    manifests: list[VersionManifest] = field(default_factory=list)
    contents: list[Tensors] = field(default_factory=list)
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    async def begin(self, n_engines: int, **options: Any) -> None:
        """Start the replicas and their engines."""
        for name in ("a", "b"):
            self.replicas.add(name, silent_s=0.0)
        for _ in range(n_engines):
            await self.join(**options)
        await self.settle()
        self.engines.sort(key=lambda engine: engine.url)

    async def join(self, **options: Any) -> FakeEngine:
        """Let an engine join the run."""
        engine = self.start(**options)
        self.engines.append(engine)
        await self.replicas.join(engine.url)
        return engine

    async def settle(self) -> None:
        """Run rounds until every engine that answers serves the run's version, at both replicas."""
        async with asyncio.timeout(60):
            while True:
                await self.replicas.round()
                states = {state for engine in self.engines for state in self.replicas.states(engine.url)}
                if states <= {"serving"}:
                    return
                await asyncio.sleep(0.01)

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    def write(self, *, whole: bool = True) -> int:
        """Write the next version, as a delta too where it has a parent; returns its number."""
        version = len(self.manifests) + 1
        content = changed(self.draw, self.contents[-1]) if self.contents else tensors(self.draw, 40)
        parent = (self.manifests[-1], self.contents[-1]) if self.contents else None
        manifest = write_version(self.root, f"v{version}-a", content, parent, whole)
        self.manifests.append(manifest)
        self.contents.append(content)
        folder = (self.recorded or self.root) / manifest.name
        add_version(self.replicas.database, self.replicas.run_id, version, folder, manifest.checksum)
        return version

    def publish(
        self, version: int, name: str = "a", delivery: Delivery = BY_FOLDER, epoch: int | None = None
    ) -> asyncio.Task[Json]:
        pool, store = self.replicas.pools[name], self.replicas.stores[name]
        return asyncio.create_task(publishing.publish(store, pool, version, epoch, delivery))

    def digests(self, version: int) -> dict[str, str]:
        """The digests of a version's tensors."""
        return {tensor.name: tensor.sha256 for tensor in self.manifests[version - 1].tensors}

    def has(self, engine: FakeEngine, version: int) -> bool:
        """Whether an engine serves exactly a version's tensors."""
        return (engine.version, engine.paused, engine.content) == (str(version), False, self.digests(version))

    @property
    def run_version(self) -> int:
        return int(self.replicas.database.query(runs.get, self.replicas.run_id).current_version)


def paths(engine: FakeEngine) -> list[str]:
    """The routes of the requests that changed an engine, in their order."""
    return [path for path, _ in engine.calls]
