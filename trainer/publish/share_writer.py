"""Stores one rank's share of a version as it comes: its tensors' digests, its safetensors files and its delta file.

Shapes and types are known beforehand, so a file's header is written first and tensors are appended.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from agentrl.trainer.publish.engine_digests import DIGEST_CHARACTERS
from agentrl.trainer.publish.ownership import Output
from agentrl.trainer.publish.version_tensors import SAFETENSORS_TYPES
from agentrl.trainer.publish.weight_stream import Chunk, raw
from agentrl.versions.version_manifest import TensorFacts, VersionFile
from agentrl.versions.weights_folder import LENGTH_BYTES, TENSORS

FILE_BYTES = 4 << 30
"""Size at which a share goes on in another file."""
THREADS = min(4, os.cpu_count() or 1)
TYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}


class TensorFile(NamedTuple):
    """A safetensors file to write: its name, its header, and its tensors in order."""

    name: str
    header: bytes
    outputs: tuple[Output, ...]


def tensor_files(shares: Sequence[Sequence[Output]], file_bytes: int = FILE_BYTES) -> list[list[TensorFile]]:
    """The files of every share. A lone file has the name that every reader knows."""
    cut = [list(_cut(outputs, file_bytes)) for outputs in shares]
    count = sum(map(len, cut))
    numbers = iter(range(1, count + 1))
    return [[_file(next(numbers), count, outputs) for outputs in own] for own in cut]


def _cut(outputs: Iterable[Output], file_bytes: int) -> Iterator[list[Output]]:
    """The tensors in order, in files of about this size. A tensor that would not be aligned begins a file."""
    held: list[Output] = []
    end = 0
    for output in outputs:
        if held and (end + output.nbytes > file_bytes or end % output.dtype.itemsize):
            yield held
            held, end = [], 0
        held.append(output)
        end += output.nbytes
    if held:
        yield held


def _file(number: int, count: int, outputs: Sequence[Output]) -> TensorFile:
    name = TENSORS if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in outputs:
        start, end = end, end + output.nbytes
        entries[output.name] = {
            "dtype": TYPE_NAMES[output.dtype],
            "shape": output.shape,
            "data_offsets": (start, end),
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    return TensorFile(name, len(header).to_bytes(LENGTH_BYTES, "little") + header, tuple(outputs))


class Sink(Protocol):
    """Takes buckets of a share, one after another."""

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Take a bucket; it is not used after the return. Raises OSError."""


@dataclass(slots=True)
class Digests:
    """Digests of a share's tensors, and of the engine's tensors that they make up."""

    compared: Mapping[str, Sequence[str]]  # name in the engine → the version's tensors in it, in order
    _tensors: dict[Output, Any] = field(default_factory=dict)
    _engine: dict[str, Any] = field(default_factory=dict)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Digest a bucket in threads."""
        in_engine = {part: name for name, parts in self.compared.items() for part in parts}
        work: dict[int, tuple[Any, list[memoryview]]] = {}
        for output, _, data in chunks:
            found = [self._tensors.setdefault(output, hashlib.sha256())]
            if output.name in in_engine:
                found.append(self._engine.setdefault(in_engine[output.name], hashlib.sha256()))
            for digest in found:
                work.setdefault(id(digest), (digest, []))[1].append(raw(data))
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(_update, work.values()))

    @property
    def tensors(self) -> list[TensorFacts]:
        """The facts of the tensors."""
        return [
            TensorFacts(output.name, TYPE_NAMES[output.dtype], output.shape, digest.hexdigest())
            for output, digest in self._tensors.items()
        ]

    @property
    def engine(self) -> dict[str, str]:
        """The digests by the engine's names, as an engine reports them."""
        return {name: digest.hexdigest()[:DIGEST_CHARACTERS] for name, digest in self._engine.items()}


def _update(work: tuple[Any, list[memoryview]]) -> None:
    digest, buffers = work
    for buffer in buffers:
        digest.update(buffer)


class WholeFiles:
    """Writes a share's safetensors files. A context manager; `written` is complete after the block."""

    def __init__(self, folder: Path, files: Sequence[TensorFile]) -> None:
        self._folder = folder
        self._by_name = {output.name: file for file in files for output in file.outputs}
        self._open: tuple[TensorFile, Any, Any] | None = None
        self._close = ExitStack()
        self.written: list[VersionFile] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self._finish()
        finally:
            self._close.close()

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Append a bucket to the files. Raises OSError."""
        for output, _, data in chunks:
            wanted = self._by_name[output.name]
            if self._open is None or self._open[0] is not wanted:
                self._finish()
                self._begin(wanted)
            self._put(raw(data))

    def _begin(self, wanted: TensorFile) -> None:
        file = self._close.enter_context((self._folder / wanted.name).open("xb", buffering=0))
        self._open = (wanted, file, hashlib.sha256())
        self._put(memoryview(wanted.header))

    def _put(self, data: memoryview) -> None:
        assert self._open is not None
        _, file, digest = self._open
        digest.update(data)
        while data:
            data = data[file.write(data) :]

    def _finish(self) -> None:
        """Sync the file that is open, and note its facts."""
        if self._open is None:
            return
        wanted, file, digest = self._open
        os.fsync(file.fileno())
        self.written.append(VersionFile(wanted.name, file.tell(), digest.hexdigest()))
        self._open = None
        self._close.close()
