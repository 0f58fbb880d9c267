"""Makes the whole files of a version from those of an ancestor and the deltas between them.

Each chunk of a tensor is read from the ancestor, taken through the deltas in order, hashed and written, so intermediate
versions are never written, and memory is a few MiB for each thread.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agentrl.errors import DamagedObject
from agentrl.storage.folder_manifest import MANIFEST
from agentrl.versions.delta_codec import chunks_of
from agentrl.versions.delta_reader import DeltaFile
from agentrl.versions.tensor_files import (
    Place,
    in_threads,
    layout_of,
    opened,
    read_at,
    require_digest,
    write_at,
)
from agentrl.versions.version_manifest import SIDECARS, VERSION_FILE, TensorFacts, VersionManifest

LEFT = (VERSION_FILE, MANIFEST)
"""Files that belong to the ancestor alone."""
Part = tuple[int, bytearray]
"""Where bytes of a tensor are in its file, and the bytes."""
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL


def make_whole(
    base: Path,
    base_manifest: VersionManifest,
    wanted: VersionManifest,
    deltas: Sequence[Sequence[Path]],
    target: Path,
    made: Callable[[], None] = lambda: None,
) -> None:
    """Write the whole files of `wanted` into the empty folder `target`, in the layout of `base`.

    `base` has the verified whole files of `base_manifest`. `deltas` are the files of each delta from it to `wanted`, in
    order. `made` is called after each tensor, by any thread. Tensors that changed are compared with their digests.
    Raises DamagedObject, which names the file, and OSError.
    """
    layout, before = layout_of(base, base_manifest), base_manifest.by_name
    if {name: _shape(tensor) for name, tensor in before.items()} != {t.name: _shape(t) for t in wanted.tensors}:
        raise DamagedObject(f"{wanted.name} has other tensors than {base_manifest.name}, so no delta makes it")
    for path in sorted(base.iterdir()):
        if path.name.endswith(SIDECARS) and path.name not in LEFT:
            shutil.copyfile(path, target / path.name)
    files = [[DeltaFile(path) for path in paths] for paths in deltas]
    with opened(base, layout.data_starts) as sources, opened(target, layout.data_starts, CREATE) as targets:
        for name, size in layout.data_starts.items():
            write_at(targets[name], 0, read_at(sources[name], 0, size))

        def make(tensor: TensorFacts) -> None:
            place, steps = layout.places[tensor.name], _steps(files, tensor.name)
            parts = _made(tensor, sources[place.file], place, steps)
            if steps or tensor.sha256 != before[tensor.name].sha256:
                parts = _verified(parts, tensor, target / place.file)
            for start, data in parts:
                write_at(targets[place.file], start, data)
            made()

        in_threads(make, wanted.tensors)


def _made(tensor: TensorFacts, source: int, place: Place, steps: Sequence[DeltaFile]) -> Iterator[Part]:
    """A tensor's chunks, taken from the ancestor's file through the deltas in order."""
    chains = [step.chunks(tensor) for step in steps]
    for part in chunks_of(place.size_bytes):
        start = place.start + part.start
        data = read_at(source, start, part.stop - part.start)
        for step, chunks in zip(steps, chains, strict=True):
            step.apply(next(chunks), memoryview(data), tensor.item_bytes)
        yield start, data


def _verified(parts: Iterator[Part], tensor: TensorFacts, where: Path) -> Iterator[Part]:
    """The chunks of a tensor. Raises DamagedObject after the last when they have another digest."""
    digest = hashlib.sha256()
    for start, data in parts:
        digest.update(data)
        yield start, data
    require_digest(tensor, digest.hexdigest(), where)


def _steps(deltas: Sequence[Sequence[DeltaFile]], name: str) -> list[DeltaFile]:
    """The delta files that change a tensor, in order."""
    return [file for files in deltas for file in files if name in file.names]


def _shape(tensor: TensorFacts) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape
