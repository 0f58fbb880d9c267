"""Where version files are on this host, and where engines read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json
from agentrl.engine.prepared.version_host import cache_spec
from agentrl.environment import is_loopback
from agentrl.own_address import local_address
from agentrl.storage.object_store import ObjectStore
from agentrl.versions.read_tokens import read_token
from agentrl.versions.transports.mooncake_source import MooncakeSpec, mooncake_spec
from agentrl.versions.version_cache import VersionCache
from agentrl.versions.version_files import Shelf, WeightsFolder
from agentrl.versions.version_manifest import VERSION_FILE
from agentrl.versions.version_sources import FolderSource, ObjectSource, Source

READ_FOR_S = 3600
"""How long an engine may read a version with the token that it got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPlaces:
    """The places of a run's version files, as one proxy knows them."""

    weights: Path
    """The run's weights folder on this host; a trainer without a shared disk sends versions to it."""
    cache: VersionCache
    storage_url: str | None
    admin_key: str = field(repr=False)
    address: Callable[[str], str | None]
    """The URL of this proxy as the engine of a URL reaches it; None when it does not."""
    mooncake: MooncakeSpec | None = None
    """The run's Mooncake store."""
    reads_memory: bool = False
    """Engines' hosts read from each other's memory where they can."""

    @property
    def serves_many(self) -> bool:
        """Whether all engines may read at once from a place that is no engine."""
        return self.storage_url is not None or self.mooncake is not None

    @property
    def shelves(self) -> list[Shelf]:
        """Where this host's version files are."""
        return [WeightsFolder(self.weights), self.cache]

    def sources(self, folder: Path, engine_url: str, peers: Sequence[Json]) -> list[Json]:
        """Where an engine reads a version, the best first: Mooncake, its `folder`, other engines, storage, this proxy.

        Where there is a Mooncake store, the folder is not used in place: each engine would read all of it.
        """
        sources: list[Json] = [{"kind": "folder", "root": str(folder.parent)}]
        if self.mooncake is not None:
            sources = [self.mooncake.model_dump(mode="json"), sources[0] | {"in_place": False}]
        for peer in peers:
            sources += [peer | {"kind": "nixl"}, peer] if self.reads_memory else [peer]
        if self.storage_url is not None:
            sources.append({"kind": "storage", "url": self.storage_url})
        if (url := self.address(engine_url)) is not None:
            token = read_token(self.admin_key, folder.name, until())
            sources.append({"kind": "http", "url": f"{url}/versions", "token": token})
        return sources

    def own_sources(self, folder: Path) -> list[Source]:
        """Where this host reads a version. Raises UserError for a storage that cannot be opened."""
        sources: list[Source] = [FolderSource(root) for root in dict.fromkeys((folder.parent, self.weights))]
        if self.storage_url is not None:
            sources.append(ObjectSource(ObjectStore(self.storage_url)))
        return sources

    def may_have(self, folder: Path) -> bool:
        """Whether the version of `folder` may have a manifest. True for a folder that only engines may see."""
        return (folder / VERSION_FILE).is_file() or not folder.is_dir()


def until() -> int:
    """When a read token that is made now ends, in seconds of the epoch."""
    return int(time.time()) + READ_FOR_S


def places_of(config: RunConfig, admin_key: str, listens: tuple[str, int] | None) -> VersionPlaces:
    """The places of a run. `listens`: the host and port at which this proxy listens, if they are known."""
    return VersionPlaces(
        weights=(config.run_dir / "weights").absolute(),
        cache=cache_spec(config.storage).open(),
        storage_url=config.storage.weights_url(config.name),
        admin_key=admin_key,
        address=lambda engine_url: config.proxy.public_url or _address(engine_url, listens),
        mooncake=mooncake_spec(config.publish.mooncake, config.name),
        reads_memory=config.publish.peers == "nixl",
    )


def _address(engine_url: str, listens: tuple[str, int] | None) -> str | None:
    """The URL of a proxy that listens there, as seen from the host of an engine."""
    if listens is None:
        return None
    host, port = listens
    towards = urlsplit(engine_url).hostname or ""
    if is_loopback(host) and not is_loopback(towards):
        return None
    if host in ("0.0.0.0", "::", ""):
        try:
            host = local_address(towards)
        except OSError:  # a name that this host does not know: the engine has other sources
            return None
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
