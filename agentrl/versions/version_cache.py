"""A host's versions: their whole files, and the deltas that it read. Processes of the host share them.

    NAME.whole    whole files as they were read; NAME.made: made from an ancestor's and deltas; NAME.delta: delta files

Each is an entry of a FolderCache with its `version.json`: it appears by a rename, is filled by one process while others
wait, is held by a lock while it is used, and is deleted when room is needed. Locks are taken in the order of versions,
an ancestor's first and a delta before the whole, so processes never wait for each other in a circle.

    has the version ──► use it                      a folder has its whole files ──► verify once, use in place
    else: the route with the fewest bytes (version_chain) ──► hold its base ──► read its deltas ──► make and verify
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from agentrl.errors import CacheError, DamagedObject, StorageError
from agentrl.storage.folder_cache import FolderCache
from agentrl.versions.tensor_files import verify
from agentrl.versions.version_chain import Route, routes
from agentrl.versions.version_entries import (
    InPlace,
    announce,
    bytes_in,
    is_sound,
    manifest_in,
    own_manifest,
    seal,
)
from agentrl.versions.version_fetch import Fetcher
from agentrl.versions.version_manifest import NAME, VersionManifest
from agentrl.versions.version_relay import DELTA, MADE, WHOLE, VersionRelay
from agentrl.versions.version_sources import Source
from agentrl.versions.whole_files import make_whole

T = TypeVar("T")


class VersionCache:
    """Versions below `root`, with at most `limit_bytes`: enough for two versions and the deltas between them."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root.expanduser()
        self._entries = FolderCache(self._root, limit_bytes, is_sound=is_sound, durable=False)
        self._in_place = InPlace(self._root, self._entries)
        self._relay = VersionRelay(self._root)

    @contextmanager
    def whole(
        self, name: str, sources: Sequence[Source], checksum: str, received: Callable[[int], None] = lambda size: None
    ) -> Iterator[Path]:
        """Yield a folder with the verified whole files of a version, which stays until the block ends.

        `received` is called with the bytes of each piece that was read, and with 0 for each tensor that was made, by
        any thread; what it raises ends the work. Raises StorageError when no source has the version or all have failed,
        and CacheError when the cache has no room or the disk is full.
        """
        if not NAME.fullmatch(name):
            raise StorageError(f"{name[:200]!r} is not a version folder's name")
        with ExitStack() as held:
            with self._relay.reading(name):
                folder = self._cached(held, name, checksum) or self._whole(held, name, sources, checksum, received)
            yield folder

    def locate(self, name: str, file: str) -> Path | None:
        """The path of a version's file that this host can serve to others; None when it has none.

        A verified file is served while others of its version are read. Files that were made are not served: their
        digests are not those of the version's manifest.
        """
        for kind in (WHOLE, DELTA):
            path = self._root / f"{name}{kind}" / file
            if path.is_file():
                return path
        return self._relay.locate(name, file)

    def awaits(self, name: str, file: str) -> bool:
        """Whether this process is reading the version and may have the file soon."""
        return self._relay.awaits(name, file)

    def _whole(
        self, held: ExitStack, name: str, sources: Sequence[Source], checksum: str, received: Callable[[int], None]
    ) -> Path:
        """A version by all sources, and when that fails by each alone: one of them may have given a wrong manifest."""
        chosen = [sources, *([source] for source in sources if len(sources) > 1)]
        return _first(chosen, lambda some: self._fetched(held, name, checksum, Fetcher(some, received)))

    def _fetched(self, held: ExitStack, name: str, checksum: str, fetcher: Fetcher) -> Path:
        """A version in place, or by the best route, or by the second best when that fails."""
        wanted = fetcher.required(name, checksum)
        if (folder := self._in_place.verified(wanted, fetcher)) is not None:
            return folder

        def take(way: Route) -> Path:
            return self._made(held, way, wanted, fetcher) if way.deltas else self._base(held, way.base, fetcher)

        return _first(self._routes(wanted, fetcher), take)

    def _routes(self, wanted: VersionManifest, fetcher: Fetcher) -> list[Route]:
        """The routes to a version, from what the cache has now."""

        def find(name: str, checksum: str) -> VersionManifest | None:
            return own_manifest(self._root, name, checksum) or fetcher.manifest(name, checksum)

        def is_cached(manifest: VersionManifest) -> bool:
            return own_manifest(self._root, manifest.name, manifest.checksum) is not None

        return routes(wanted, find, is_cached)

    def _made(self, held: ExitStack, way: Route, wanted: VersionManifest, fetcher: Fetcher) -> Path:
        """Take a route: hold its base, read its deltas and make the whole files of the last.

        When they do not make it, they are deleted from the cache: their sources may have better ones.
        """
        try:
            with ExitStack() as used:
                for manifest in way.deltas:
                    used.enter_context(self._relay.reading(manifest.name, DELTA))
                base = self._base(used, way.base, fetcher)
                deltas = [self._deltas(used, manifest, fetcher) for manifest in way.deltas]

                def fill(draft: Path) -> None:
                    make_whole(base, way.base, wanted, deltas, draft, lambda: fetcher.received(0))
                    seal(draft, msgspec.structs.replace(wanted, whole=None, delta=way.deltas[-1].delta))

                return self._entry(held, wanted, MADE, bytes_in(base), fill)
        except DamagedObject:
            for manifest in way.deltas:
                self._entries.discard(f"{manifest.name}{DELTA}")
            for kind in (WHOLE, MADE):
                self._entries.discard(f"{way.base.name}{kind}")
            raise

    def _base(self, used: ExitStack, base: VersionManifest, fetcher: Fetcher) -> Path:
        """The verified whole files of a version, from the cache, in place, or read."""
        found = self._cached(used, base.name, base.checksum) or self._in_place.verified(base, fetcher)
        if found is not None:
            return found
        files, size = base.whole, base.whole_bytes
        if files is None or size is None:
            raise StorageError(f"{base.name} was deleted from the cache {self._root} while it was wanted")

        def fill(draft: Path) -> None:
            announce(draft, base)
            fetcher.fill(base.name, files, draft)
            verify(draft, base)
            seal(draft, base)

        with self._relay.reading(base.name, WHOLE):
            return self._entry(used, base, WHOLE, size, fill)

    def _cached(self, held: ExitStack, name: str, checksum: str) -> Path | None:
        """The entry with a version's whole files."""
        for kind in (WHOLE, MADE):
            with ExitStack() as tried:
                folder = tried.enter_context(self._entries.present(f"{name}{kind}"))
                if folder is not None and manifest_in(folder).checksum == checksum:
                    held.enter_context(tried.pop_all())
                    return folder
        return None

    def _deltas(self, used: ExitStack, wanted: VersionManifest, fetcher: Fetcher) -> list[Path]:
        """Read the delta files of a version into the cache; returns their paths."""
        delta = wanted.delta
        assert delta is not None

        def fill(draft: Path) -> None:
            announce(draft, wanted)
            fetcher.fill(wanted.name, delta.files, draft)
            seal(draft, wanted)

        folder = self._entry(used, wanted, DELTA, delta.size_bytes, fill)
        return [folder / file.name for file in (manifest_in(folder).delta or delta).files]

    def _entry(
        self, held: ExitStack, wanted: VersionManifest, kind: str, size_bytes: int, fill: Callable[[Path], None]
    ) -> Path:
        """Hold an entry of a version; one of another version with the same name, such as another run's, is replaced.

        Raises DamagedObject when a process uses that one.
        """
        name = f"{wanted.name}{kind}"
        with self._entries.present(name) as found:
            is_other = found is not None and manifest_in(found).checksum != wanted.checksum
        if is_other:
            self._entries.discard(name)
        folder = held.enter_context(self._entries.entry(name, size_bytes, fill))
        if (checksum := manifest_in(folder).checksum) != wanted.checksum:
            raise DamagedObject(f"{folder} has the checksum {checksum}, not {wanted.checksum}")
        return folder


def _first(ways: Iterable[T], take: Callable[[T], Path]) -> Path:
    """The result of the first way that works. If none does, raises the first one's error; a CacheError at once."""
    problem: StorageError | None = None
    for way in ways:
        try:
            return take(way)
        except CacheError:
            raise
        except StorageError as error:
            problem = problem or error
    assert problem is not None
    raise problem
