"""Where a host reads version files: a folder, object storage, another host, or memory that hosts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field, TypeAdapter

from agentrl.configs.publish_config import storage_url
from agentrl.configs.section import Section
from agentrl.errors import DamagedObject, StorageError
from agentrl.storage.object_store import ObjectStore
from agentrl.versions.http_source import HTTPSource
from agentrl.versions.transports.mooncake_source import MooncakeSource, MooncakeSpec
from agentrl.versions.transports.nixl_source import NIXLSource, NIXLSpec
from agentrl.versions.version_manifest import MANIFEST_BYTES, VERSION_FILE, VersionManifest, named_manifest

PART_BYTES = 8 << 20
"""Bytes that are read from a storage at once."""


class Source(Protocol):
    """Version folders that can be read. Names and files come from manifests or have been validated."""

    def manifest(self, name: str) -> VersionManifest | None:
        """A version's manifest; None when the source does not have it. Raises StorageError."""
        ...

    def read(self, name: str, file: str, start: int, end: int) -> Iterator[bytes]:
        """The bytes `start` to `end` of a file, in pieces. Raises StorageError when they do not all come."""
        ...


class FolderSpec(Section):
    """A folder of version folders. `in_place`: whole files are used where they are, otherwise copied."""

    kind: Literal["folder"] = "folder"
    root: Path
    in_place: bool = True


class StorageSpec(Section):
    """Version folders below a URL of object storage."""

    kind: Literal["storage"] = "storage"
    url: str


class HTTPSpec(Section):
    """A host that serves version files below `url` (`URL/NAME/FILE`), and the token that reads them."""

    kind: Literal["http"] = "http"
    url: str
    token: str = Field(repr=False)


AnySpec = FolderSpec | StorageSpec | HTTPSpec | NIXLSpec | MooncakeSpec
SourceSpec = Annotated[AnySpec, Field(discriminator="kind")]
SOURCE_SPECS: TypeAdapter[list[SourceSpec]] = TypeAdapter(Annotated[list[SourceSpec], Field(max_length=64)])
"""Reads and writes lists of sources as JSON."""


def open_source(spec: AnySpec) -> Source:
    """The source of a specification. Raises UserError for a storage that cannot be opened."""
    if isinstance(spec, FolderSpec):
        return FolderSource(spec.root, spec.in_place)
    if isinstance(spec, StorageSpec):
        return ObjectSource(ObjectStore(storage_url(spec.url)))
    if isinstance(spec, MooncakeSpec):
        return MooncakeSource(spec)
    if isinstance(spec, NIXLSpec):
        return NIXLSource(spec.url, spec.token)
    return HTTPSource(spec.url, spec.token)


class FolderSource:
    """Version folders below `root`."""

    def __init__(self, root: Path, in_place: bool = True) -> None:
        self.root = root
        self.in_place = in_place

    def __str__(self) -> str:
        return str(self.root)

    def manifest(self, name: str) -> VersionManifest | None:
        """See `Source`."""
        path = self.root / name / VERSION_FILE
        try:
            with path.open("rb") as file:
                data = file.read(MANIFEST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        return named_manifest(data, name, str(path))

    def read(self, name: str, file: str, start: int, end: int) -> Iterator[bytes]:
        """See `Source`."""
        path = self.root / name / file
        try:
            with path.open("rb") as opened:
                opened.seek(start)
                while start < end:
                    piece = opened.read(min(PART_BYTES, end - start))
                    if not piece:
                        raise DamagedObject(f"{path} is truncated")
                    start += len(piece)
                    yield piece
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error


class ObjectSource:
    """Version folders below a URL of object storage."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __str__(self) -> str:
        return self._store.url

    def manifest(self, name: str) -> VersionManifest | None:
        """See `Source`."""
        data = self._store.read(f"{name}/{VERSION_FILE}", MANIFEST_BYTES)
        return None if data is None else named_manifest(data, name, f"{self}/{name}")

    def read(self, name: str, file: str, start: int, end: int) -> Iterator[bytes]:
        """See `Source`."""
        for first in range(start, end, PART_BYTES):
            last = min(first + PART_BYTES, end)
            piece = self._store.read_range(f"{name}/{file}", first, last)
            if len(piece) != last - first:
                raise DamagedObject(f"{self}/{name}/{file} is truncated")
            yield piece
