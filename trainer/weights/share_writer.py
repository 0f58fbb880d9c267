"""Stores one rank's share of a version as it comes: its tensors' digests, its safetensors files and its delta file.

Shapes and types are known beforehand, so a file's header is written first and tensors are appended.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

from agentrl.trainer.weights.engine_digests import DIGEST_CHARACTERS
from agentrl.trainer.weights.ownership import Output
from agentrl.trainer.weights.tensor_file_layout import TYPE_NAMES, TensorFile
from agentrl.trainer.weights.weight_stream import Chunk, raw
from agentrl.versions.version_manifest import TensorFacts, VersionFile

THREADS = min(4, os.cpu_count() or 1)


class Sink(Protocol):
    """Takes buckets of a share, one after another."""

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Take a bucket; it is not used after the return. Raises OSError."""


@dataclass
class Digests:
    """Digests of a share's tensors, and of the engine's tensors that they make up."""

    in_engine: Mapping[str, str]  # tensor of the version → the engine's tensor that it is or is a part of
    _tensors: dict[Output, Any] = field(default_factory=dict)
    _fused: dict[str, Any] = field(default_factory=dict)  # of the engine's tensors that have several parts

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Digest a bucket in threads."""
        work: dict[int, tuple[Any, list[memoryview]]] = {}
        for output, _, data in chunks:
            found = [self._tensors.setdefault(output, hashlib.sha256())]
            name = self.in_engine.get(output.name)
            if name is not None and name in self._with_parts:
                found.append(self._fused.setdefault(name, hashlib.sha256()))
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
        own = {
            name: digest
            for output, digest in self._tensors.items()
            if (name := self.in_engine.get(output.name)) is not None and name not in self._with_parts
        }
        return {name: digest.hexdigest()[:DIGEST_CHARACTERS] for name, digest in (own | self._fused).items()}

    @cached_property
    def _with_parts(self) -> set[str]:
        return {name for name, count in Counter(self.in_engine.values()).items() if count > 1}


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
        self.written: dict[str, VersionFile] = {}  # by the names of their tensors

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
        facts = VersionFile(wanted.name, file.tell(), digest.hexdigest())
        self.written |= {output.name: facts for output in wanted.outputs}
        self._open = None
        self._close.close()
