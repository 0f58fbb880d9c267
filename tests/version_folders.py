"""Version folders for tests: small tensors, whole files and deltas, as a trainer writes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentrl.files import atomic_folder
from agentrl.versions.delta_writer import ChangedTensor, DeltaWriter, delta_name, joined
from agentrl.versions.version_manifest import (
    ITEM_BYTES,
    VERSION_FILE,
    TensorFacts,
    VersionFile,
    VersionManifest,
    manifest_of,
)


@dataclass(frozen=True)
class Values:
    """A tensor of a test."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def facts(self, name: str) -> TensorFacts:
        return TensorFacts(name, self.dtype, self.shape, hashlib.sha256(self.data).hexdigest())


Tensors = Mapping[str, Values]


def tensors(rng: np.random.Generator, elements: int = 500) -> dict[str, Values]:
    """Tensors of each size of elements, one of a single element and one of none."""
    shapes = {"w.bf16": ("BF16", (5, elements)), "w.f32": ("F32", (elements,)), "w.f8": ("F8_E4M3", (elements,))}
    shapes |= {"w.i64": ("I64", (3, elements)), "one": ("BF16", ()), "none": ("F32", (0, 4))}
    return {name: values(rng, *shape) for name, shape in shapes.items()}


def values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Values:
    return Values(dtype, shape, rng.bytes(int(np.prod(shape)) * ITEM_BYTES[dtype]))


def changed(rng: np.random.Generator, before: Tensors, density: float = 0.05) -> dict[str, Values]:
    """The tensors of the next version: about this share of elements has other bits."""
    after = {}
    for name, old in before.items():
        data = np.frombuffer(old.data, f"<u{ITEM_BYTES[old.dtype]}").copy()
        places = rng.random(len(data)) < density
        data[places] += rng.integers(1, 4, places.sum()).astype(data.dtype)
        after[name] = Values(old.dtype, old.shape, data.tobytes())
    return after


def safetensors(tensors: Tensors) -> bytes:
    """The content of a safetensors file."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        offsets = [at, at + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at += len(tensor.data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values())


def write_version(
    root: Path, name: str, tensors: Tensors, parent: tuple[VersionManifest, Tensors] | None = None, whole: bool = True
) -> VersionManifest:
    """Write a version folder with two tensor files and a configuration, a delta in two files, or both."""
    with atomic_folder(root / name, durable=False) as draft:
        files = None
        if whole:
            halves = [dict(list(tensors.items())[half::2]) for half in (0, 1)]
            content = {f"model-0000{n + 1}-of-00002.safetensors": safetensors(half) for n, half in enumerate(halves)}
            content["config.json"] = b"{}"
            files = [_written(draft, file, data) for file, data in content.items()]
        delta = None
        if parent is not None:
            manifest, before = parent
            parts = []
            for half in (0, 1):
                with DeltaWriter(draft / delta_name(half, 2)) as writer:
                    for tensor in list(tensors)[half::2]:
                        new = tensors[tensor]
                        writer.add(ChangedTensor(tensor, new.dtype, before[tensor].data, new.data))
                parts.append(writer.part())
            delta = joined(manifest.name, manifest.checksum, parts)
        made = manifest_of(name, (values.facts(tensor) for tensor, values in tensors.items()), files, delta)
        (draft / VERSION_FILE).write_bytes(made.dumps())
    return made


def read_tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of all tensors of a folder's safetensors files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = data[start + first : start + last]
    return found


def _written(folder: Path, file: str, data: bytes) -> VersionFile:
    (folder / file).write_bytes(data)
    return VersionFile(file, len(data), hashlib.sha256(data).hexdigest())
