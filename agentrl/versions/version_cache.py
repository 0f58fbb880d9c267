"""A host's versions: their whole files, and the deltas that it read. Processes of the host share them.

    NAME.whole    whole files as they were read; NAME.made: made from an ancestor's and deltas; NAME.delta: delta files

Each is an entry of a FolderCache with its `version.json`: it appears by a rename, is filled by one process while others
wait, is held by a lock while it is used, and is deleted when room is needed. Locks are taken in the order of versions,
an ancestor's first and a delta before the whole, so processes never wait for each other in a circle.

    has the version ──► use it                      a folder has its whole files ──► verify once, use in place
    else: the route with the fewest bytes (version_chain) ──► hold its base ──► read its deltas ──► make and verify
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from agentrl.errors import DamagedObject, StorageError
from agentrl.storage.folder_cache import FolderCache
from agentrl.storage.folder_manifest import FileFacts, facts_of
from agentrl.versions.tensor_files import verify
from agentrl.versions.version_chain import Route, route
from agentrl.versions.version_fetch import Fetcher
from agentrl.versions.version_manifest import VERSION_FILE, VersionManifest, named_manifest
from agentrl.versions.version_sources import FolderSource, Source
from agentrl.versions.version_stamps import STAMP, is_stamped, stamp_of, write_stamp
from agentrl.versions.whole_files import make_whole

WHOLE, MADE, DELTA = ".whole", ".made", ".delta"
IN_PLACE = "in-place"
MOST_STAMPS = 64
"""Stamps of folders in place that are kept."""


class VersionCache:
    """Versions below `root`, with at most `limit_bytes`: enough for two versions and the deltas between them."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root.expanduser()
        self._entries = FolderCache(root, limit_bytes, is_sound=_is_sound, durable=False)

    @contextmanager
    def whole(
        self, name: str, sources: Sequence[Source], checksum: str, received: Callable[[int], None] = lambda size: None
    ) -> Iterator[Path]:
        """Yield a folder with the verified whole files of a version, which stays until the block ends.

        `received` is called with the bytes of each piece that was read, and with 0 for each tensor that was made, by
        any thread; what it raises ends the work. Raises StorageError when no source has the version, all have failed,
        or the cache has no room.
        """
        with ExitStack() as held:
            yield self._whole(held, name, sources, checksum, received)

    def locate(self, name: str, file: str) -> Path | None:
        """The path of a version's file that this host can serve to others; None when it has none.

        Files that were made are not served: their digests are not those of the version's manifest.
        """
        for kind in (WHOLE, DELTA):
            path = self._root / f"{name}{kind}" / file
            if path.is_file():
                return path
        return None

    def _whole(
        self, held: ExitStack, name: str, sources: Sequence[Source], checksum: str, received: Callable[[int], None]
    ) -> Path:
        """A version by all sources, and when that fails by each alone: one of them may have given a wrong manifest."""
        if (folder := self._cached(held, name, checksum)) is not None:
            return folder
        problem: StorageError | None = None
        for some in [sources, *([source] for source in sources if len(sources) > 1)]:
            try:
                return self._from(held, name, some, checksum, received)
            except StorageError as error:
                problem = problem or error
        raise problem or StorageError(f"{name}: there is no source")

    def _from(
        self, held: ExitStack, name: str, sources: Sequence[Source], checksum: str, received: Callable[[int], None]
    ) -> Path:
        fetcher = Fetcher(sources, received)
        wanted = fetcher.required(name, checksum)
        if (folder := self._in_place(wanted, sources)) is not None:
            return folder
        way = self._route(wanted, fetcher)
        if way.deltas:
            try:
                return self._made(held, way, wanted, fetcher, sources)
            except StorageError:
                if wanted.whole is None:
                    raise
        if wanted.whole is None:
            raise self._vanished(wanted)
        return self._read(held, wanted, fetcher)

    def _route(self, wanted: VersionManifest, fetcher: Fetcher) -> Route:
        """The route to a version, from what the cache has now."""

        def find(name: str) -> VersionManifest | None:
            return self._own_manifest(name) or fetcher.manifest(name)

        def is_cached(manifest: VersionManifest) -> bool:
            own = self._own_manifest(manifest.name)
            return own is not None and own.checksum == manifest.checksum

        return route(wanted, find, is_cached)

    def _made(
        self, held: ExitStack, way: Route, wanted: VersionManifest, fetcher: Fetcher, sources: Sequence[Source]
    ) -> Path:
        """Take a route: hold its base, read its deltas and make the whole files of the last.

        When they do not make it, they are deleted from the cache: their sources may have better ones.
        """
        try:
            with ExitStack() as used:
                base = self._base(used, way.base, fetcher, sources)
                deltas = [self._deltas(used, manifest, fetcher) for manifest in way.deltas]

                def fill(draft: Path) -> None:
                    make_whole(base, way.base, wanted, deltas, draft, lambda: fetcher.received(0))
                    _seal(draft, msgspec.structs.replace(wanted, whole=None, delta=way.deltas[-1].delta))

                return self._entry(held, wanted, MADE, _bytes_in(base), fill)
        except DamagedObject:
            for manifest in way.deltas:
                self._entries.discard(f"{manifest.name}{DELTA}")
            self._entries.discard(f"{way.base.name}{WHOLE}")
            self._entries.discard(f"{way.base.name}{MADE}")
            raise

    def _base(self, used: ExitStack, base: VersionManifest, fetcher: Fetcher, sources: Sequence[Source]) -> Path:
        """The verified whole files of a version, from the cache, in place, or read."""
        found = self._cached(used, base.name, base.checksum) or self._in_place(base, sources)
        if found is None and base.whole is None:
            raise self._vanished(base)
        return found or self._read(used, base, fetcher)

    def _vanished(self, wanted: VersionManifest) -> StorageError:
        return StorageError(f"{wanted.name} was deleted from the cache {self._root} while it was wanted")

    def _cached(self, held: ExitStack, name: str, checksum: str) -> Path | None:
        """The entry with a version's whole files."""
        for kind in (WHOLE, MADE):
            folder = held.enter_context(self._entries.present(f"{name}{kind}"))
            if folder is not None and _manifest_in(folder).checksum == checksum:
                return folder
        return None

    def _own_manifest(self, name: str) -> VersionManifest | None:
        """The manifest of a version whose whole files the cache has."""
        for kind in (WHOLE, MADE):
            try:
                return _manifest_in(self._root / f"{name}{kind}")
            except (OSError, DamagedObject):
                continue
        return None

    def _read(self, held: ExitStack, wanted: VersionManifest, fetcher: Fetcher) -> Path:
        """Read the whole files of a version into the cache."""
        files, size = wanted.whole, wanted.whole_bytes
        assert files is not None
        assert size is not None

        def fill(draft: Path) -> None:
            fetcher.fill(wanted.name, files, draft)
            verify(draft, wanted)
            _seal(draft, wanted)

        return self._entry(held, wanted, WHOLE, size, fill)

    def _deltas(self, used: ExitStack, wanted: VersionManifest, fetcher: Fetcher) -> list[Path]:
        """Read the delta files of a version into the cache; returns their paths."""
        delta = wanted.delta
        assert delta is not None

        def fill(draft: Path) -> None:
            fetcher.fill(wanted.name, delta.files, draft)
            _seal(draft, wanted)

        folder = self._entry(used, wanted, DELTA, delta.size_bytes, fill)
        return [folder / file.name for file in (_manifest_in(folder).delta or delta).files]

    def _entry(
        self, held: ExitStack, wanted: VersionManifest, kind: str, size_bytes: int, fill: Callable[[Path], None]
    ) -> Path:
        """Hold an entry of a version. Raises DamagedObject when it is of a version with another checksum."""
        folder = held.enter_context(self._entries.entry(f"{wanted.name}{kind}", size_bytes, fill))
        if (found := _manifest_in(folder).checksum) != wanted.checksum:
            raise DamagedObject(f"{folder} has the checksum {found}, not {wanted.checksum}")
        return folder

    def _in_place(self, wanted: VersionManifest, sources: Sequence[Source]) -> Path | None:
        """The folder of a source on this host with the verified whole files of a version."""
        for source in sources if wanted.whole is not None else ():
            if isinstance(source, FolderSource) and source.in_place:
                folder = source.root / wanted.name
                if self._is_verified(folder, wanted):
                    return folder
        return None

    def _is_verified(self, folder: Path, wanted: VersionManifest) -> bool:
        """Whether a folder has a version's whole files. It is hashed once for all processes of the host."""
        names = [file.name for file in wanted.whole or ()]
        where = hashlib.sha256(f"{folder.absolute()} {wanted.checksum}".encode()).hexdigest()[:32]
        path = self._root / f"{IN_PLACE}-{where}{STAMP}"
        try:
            if is_stamped(path, stamp_of(folder, names)):
                return True
            with self._entries.alone(IN_PLACE):
                stamp = stamp_of(folder, names)
                if not is_stamped(path, stamp):
                    verify(folder, wanted)
                    write_stamp(path, stamp)
                    self._prune_stamps()
        except (OSError, DamagedObject):
            return False
        return True

    def _prune_stamps(self) -> None:
        stamps = sorted(self._root.glob(f"{IN_PLACE}-*{STAMP}"), key=lambda path: path.stat().st_mtime)
        for path in stamps[:-MOST_STAMPS]:
            path.unlink()


def _seal(draft: Path, manifest: VersionManifest) -> None:
    """Complete an entry whose files are verified."""
    (draft / VERSION_FILE).write_bytes(manifest.dumps())
    write_stamp(draft / STAMP, stamp_of(draft, _names(draft)))


def _is_sound(folder: Path) -> bool:
    """Whether an entry has its bytes. It is hashed when its stamp is not that of its files."""
    try:
        stamp = stamp_of(folder, _names(folder))
        if is_stamped(folder / STAMP, stamp):
            return True
        manifest = _manifest_in(folder)
        if folder.suffix == DELTA:
            for file in manifest.delta.files if manifest.delta else ():
                if facts_of(folder / file.name) != FileFacts(file.size_bytes, file.sha256):
                    return False
        else:
            verify(folder, manifest)
        write_stamp(folder / STAMP, stamp)
    except (OSError, DamagedObject):
        return False
    return True


def _manifest_in(folder: Path) -> VersionManifest:
    """The manifest of an entry. Raises OSError and DamagedObject."""
    return named_manifest((folder / VERSION_FILE).read_bytes(), folder.stem, str(folder))


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def _bytes_in(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in _names(folder))
