"""The safetensors files of a folder: where each tensor is in them, and whether the tensors have their digests.

Files are read with `pread`, never mapped: a file that another process truncates is then an error, not a crash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from agentrl.errors import DamagedObject
from agentrl.versions.delta_codec import chunks_of
from agentrl.versions.tensor_header import read_header
from agentrl.versions.version_manifest import TENSOR_FILE, TensorFacts, VersionManifest

THREADS = min(8, os.cpu_count() or 1)
T = TypeVar("T")


class Place(NamedTuple):
    """Where a tensor's bytes are: a file's name, and the position in it."""

    file: str
    start: int
    size_bytes: int


class Layout(NamedTuple):
    """The tensors of a folder's files. `data_starts` are the bytes of each file before its tensors."""

    places: Mapping[str, Place]
    data_starts: Mapping[str, int]


def layout_of(folder: Path, manifest: VersionManifest) -> Layout:
    """The layout of a folder, whose files must hold exactly the version's tensors, one after another without holes.

    Raises DamagedObject, which names the file.
    """
    places: dict[str, Place] = {}
    data_starts: dict[str, int] = {}
    facts = manifest.by_name
    for path in sorted(folder.glob(f"*{TENSOR_FILE}")):
        try:
            header = read_header(path)
        except ValueError as error:
            raise DamagedObject(str(error)) from error
        data_starts[path.name] = len(header.data)
        for entry in header.entries:
            name, wanted = entry.name, facts.get(entry.name)
            if wanted is None or name in places or (wanted.dtype, wanted.shape) != (entry.dtype, entry.shape):
                raise DamagedObject(f"{path}: tensor {name[:200]!r} is not as {manifest.name} has it, or there twice")
            places[name] = Place(path.name, entry.start, entry.size_bytes)
    if missing := facts.keys() - places.keys():
        raise DamagedObject(f"{folder} lacks {len(missing)} tensors of {manifest.name}, such as {min(missing)!r}")
    return Layout(places, data_starts)


def verify(folder: Path, manifest: VersionManifest) -> None:
    """Raise DamagedObject, which names the file, unless a folder's tensors have the manifest's digests."""
    layout = layout_of(folder, manifest)
    with opened(folder, layout.data_starts) as files:

        def check(tensor: TensorFacts) -> None:
            place = layout.places[tensor.name]
            digest = hashlib.sha256()
            for part in chunks_of(place.size_bytes):
                digest.update(read_at(files[place.file], place.start + part.start, part.stop - part.start))
            require_digest(tensor, digest.hexdigest(), folder / place.file)

        in_threads(check, manifest.tensors)


def require_digest(tensor: TensorFacts, found: str, where: Path) -> None:
    """Raise DamagedObject when a tensor has another digest."""
    if found != tensor.sha256:
        raise DamagedObject(f"{where}: tensor {tensor.name!r} has the SHA-256 {found}, not {tensor.sha256}")


@contextmanager
def opened(folder: Path, names: Iterable[str], flags: int = os.O_RDONLY) -> Iterator[dict[str, int]]:
    """Yield the descriptors of files, by name. Raises OSError."""
    files: dict[str, int] = {}
    try:
        for name in names:
            files[name] = os.open(folder / name, flags | os.O_CLOEXEC, 0o600)
        yield files
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def read_at(descriptor: int, start: int, size: int) -> bytearray:
    """Read exactly `size` bytes. Raises OSError, DamagedObject for a shorter file."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = os.preadv(descriptor, [view[done:]], start + done)
        if not count:
            raise DamagedObject("a file is shorter than when it was opened")
        done += count
    return data


def write_at(descriptor: int, start: int, data: bytes | bytearray) -> None:
    """Write all bytes. Raises OSError."""
    view, done = memoryview(data), 0
    while done < len(data):
        done += os.pwrite(descriptor, view[done:], start + done)


def in_threads(work: Callable[[T], None], over: Iterable[T], threads: int = THREADS) -> None:
    """Do `work` for each item in threads. The first error ends the rest that has not started."""
    with ThreadPoolExecutor(threads) as pool:
        try:
            for _ in pool.map(work, over):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
