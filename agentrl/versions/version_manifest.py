"""`version.json`: the tensors of a weight version, and the files that hold them. It comes from outside: it is bounded.

    {"format": 1, "name": "v12-ID", "version": 12, "checksum": HEX,
     "tensors": [[NAME, DTYPE, SHAPE, SHA256], …],        every tensor, by name
     "whole": [[FILE, BYTES, SHA256], …] | null,           files with all tensors, and the model's configuration
     "delta": {"parent": "v11-ID", "parent_checksum": HEX, "files": [[FILE, BYTES, SHA256], …],
               "changed": ELEMENTS, "elements": ELEMENTS} | null}

`checksum` is the `combined` checksum of the tensors (weights_folder), so it covers every tensor's digest. The files'
digests detect a damaged transfer early; what a reader uses is compared with the tensors' digests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from agentrl.errors import DamagedObject
from agentrl.versions.tensor_header import ITEM_BYTES, MOST_BYTES, Dimensions
from agentrl.versions.weights_folder import TYPES, combined, head, version_of

VERSION_FILE = "version.json"
FORMAT = 1
MANIFEST_BYTES = 256 << 20
"""Size of the largest manifest that is read."""
MOST_FILES = 100_000
MOST_TENSORS = 1_000_000
MOST_BESIDE = 1 << 30
"""Bytes that the files of a version may have beside twice those of its tensors."""
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
NAME = re.compile(r"v[0-9]{1,15}(-[A-Za-z0-9_]{1,128})?")
TENSOR_FILE = ".safetensors"
SIDECARS = (".json", ".txt", ".model", ".jinja")
"""Ends of the names of configuration and tokenizer files beside the tensors; none of them is code."""
DELTA_NAME = re.compile(r"delta-[0-9]{5}-of-[0-9]{5}\.bin")

Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Meta(ge=0, le=MOST_BYTES)]


class TensorFacts(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor's name, safetensors type (`BF16`), shape and the SHA-256 of its bytes."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    dtype: str
    shape: Dimensions
    sha256: Hex

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {self.name!r} has the unknown type {self.dtype[:40]!r}")
        if self.size_bytes > MOST_BYTES:
            raise ValueError(f"tensor {self.name!r} has more than {MOST_BYTES} bytes")

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.item_bytes

    @property
    def head(self) -> str:
        """The line of the tensor that enters the version's checksum."""
        return head(self.name, TYPES.get(self.dtype, self.dtype), self.shape)


class VersionFile(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file of a version folder: its name, size and the SHA-256 of its bytes."""

    name: str
    size_bytes: Size
    sha256: Hex

    def __post_init__(self) -> None:
        if not FILE_NAME.fullmatch(self.name) or self.name == VERSION_FILE:
            raise ValueError(f"{self.name[:200]!r} is not a file of a version folder")


Files = Annotated[tuple[VersionFile, ...], Meta(min_length=1, max_length=MOST_FILES)]


class Delta(Struct, frozen=True, forbid_unknown_fields=True):
    """What changed since the version `parent`: `changed` of `elements` elements differ."""

    parent: str
    parent_checksum: Hex
    files: Files
    changed: Size
    elements: Size

    def __post_init__(self) -> None:
        require_name(self.parent)
        if self.changed > self.elements:
            raise ValueError("delta has more changed elements than elements")
        if any(not DELTA_NAME.fullmatch(file.name) for file in self.files):
            raise ValueError("delta has a file that is not named delta-NNNNN-of-NNNNN.bin")
        _require_unique("delta", self.files)

    @property
    def size_bytes(self) -> int:
        """Bytes of the delta's files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def density(self) -> float:
        """Share of elements that differ from the parent's."""
        return self.changed / self.elements if self.elements else 0.0


class VersionManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """A weight version and its files. `whole` or `delta` is set, or both."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]
    name: str
    version: Size
    checksum: Hex
    tensors: Annotated[tuple[TensorFacts, ...], Meta(max_length=MOST_TENSORS)]
    whole: Files | None
    delta: Delta | None

    def __post_init__(self) -> None:
        require_name(self.name)
        if version_of(self.name) != self.version:
            raise ValueError(f"{self.name} is not a folder of version {self.version}")
        if self.whole is None and self.delta is None:
            raise ValueError(f"{self.name} has neither whole files nor a delta")
        names = [tensor.name for tensor in self.tensors]
        if any(one >= other for one, other in pairwise(names)):
            raise ValueError("tensors are not in the order of their names")
        if self.checksum != checksum_of(self.tensors):
            raise ValueError("checksum is not that of the tensors")
        if any(not file.name.endswith((TENSOR_FILE, *SIDECARS)) for file in self.whole or ()):
            raise ValueError("whole has a file that is neither of tensors nor of a model's configuration")
        _require_unique("whole", self.whole or ())
        sizes = (self.whole_bytes or 0, self.delta.size_bytes if self.delta is not None else 0)
        if max(sizes) > 2 * self.tensor_bytes + MOST_BESIDE:
            raise ValueError("its files are much larger than its tensors")
        if self.delta is not None and self.delta.parent == self.name:
            raise ValueError(f"{self.name} is its own parent")

    def dumps(self) -> bytes:
        """The content of `version.json`."""
        return msgspec.json.encode(self)

    @property
    def whole_bytes(self) -> int | None:
        """Bytes of the whole files; None without them."""
        return None if self.whole is None else sum(file.size_bytes for file in self.whole)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def files(self) -> dict[str, VersionFile]:
        """All files, by name, without `version.json`."""
        return {file.name: file for file in (*(self.whole or ()), *(self.delta.files if self.delta else ()))}

    @property
    def by_name(self) -> dict[str, TensorFacts]:
        """The tensors, by name."""
        return {tensor.name: tensor for tensor in self.tensors}


def manifest_of(
    name: str, tensors: Iterable[TensorFacts], whole: Sequence[VersionFile] | None, delta: Delta | None
) -> VersionManifest:
    """The manifest of a version whose tensors and files are known, from any number of writers. Raises ValueError."""
    version = version_of(name)
    if version is None:
        raise ValueError(f"{name!r} is not a version folder's name")
    in_order = tuple(sorted(tensors, key=lambda tensor: tensor.name))
    files = None if whole is None else tuple(sorted(whole, key=lambda file: file.name))
    return VersionManifest(FORMAT, name, version, checksum_of(in_order), in_order, files, delta)


def checksum_of(tensors: Sequence[TensorFacts]) -> str:
    """The `combined` checksum of tensors that are in the order of their names."""
    return combined((tensor.head for tensor in tensors), (bytes.fromhex(tensor.sha256) for tensor in tensors))


def read_manifest(data: bytes) -> VersionManifest:
    """A manifest of `dumps`. Raises DamagedObject for anything else."""
    if len(data) > MANIFEST_BYTES:
        raise DamagedObject(f"{VERSION_FILE} has {len(data)} bytes; {MANIFEST_BYTES} are the most")
    try:
        return msgspec.json.decode(data, type=VersionManifest)
    except (ValueError, RecursionError) as error:
        raise DamagedObject(f"{VERSION_FILE} is damaged: {error}") from error


def manifest_in(folder: Path) -> VersionManifest | None:
    """The manifest of a folder; None where there is none, or a damaged one."""
    try:
        return read_manifest((folder / VERSION_FILE).read_bytes())
    except (OSError, DamagedObject):
        return None


def named_manifest(data: bytes, name: str, where: str) -> VersionManifest:
    """The manifest of the version `name` in `data`. Raises DamagedObject, which says where it was read."""
    try:
        manifest = read_manifest(data)
    except DamagedObject as error:
        raise DamagedObject(f"{where}: {error}") from error
    if manifest.name != name:
        raise DamagedObject(f"{where}: {VERSION_FILE} is that of {manifest.name}")
    return manifest


def require_name(name: str) -> None:
    """Raise ValueError unless `name` is a version folder's name."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:200]!r} is not a version folder's name")


def _require_unique(what: str, files: Sequence[VersionFile]) -> None:
    if len({file.name for file in files}) != len(files):
        raise ValueError(f"{what} names a file twice")
