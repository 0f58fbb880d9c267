"""A weights folder as the trainer writes it and the proxy checks it; without torch.

`v12-STEP_ID/` holds version 12: the tensors that training changes, whole (TENSORS), or a low-rank adapter as peft
writes it (ADAPTER). A step id belongs to one lease, so two sets of weights never share a name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TENSORS = "model.safetensors"
"""The file of tensors in a weights folder."""
ADAPTER = "adapter_model.safetensors"
"""The same, of one that holds an adapter."""
CHUNK = 1 << 20
LENGTH_BYTES = 8
TYPES = {"F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}
"""Names of types as they enter the checksum."""


def folder_name(version: int, step_id: str) -> str:
    """The folder of the version that a step made."""
    return f"v{version}-{step_id}"


def version_of(name: str) -> int | None:
    """The version in a folder's name; None when it is not a version's folder."""
    match = re.fullmatch(r"v(\d+)(-\w+)?", name)
    return int(match[1]) if match else None


def checksum(path: Path) -> str:
    """SHA-256 over names, types, shapes and bytes of the tensors of a safetensors file, in the order of their names.

    Raises OSError when the file cannot be read, ValueError when it is damaged or shorter than its header says.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is no safetensors file")
        header = file.read(length)
        for entry, start, size in _entries(path, header):
            digest.update(entry)
            file.seek(LENGTH_BYTES + length + start)
            for chunk in _chunks(file, size):
                digest.update(chunk)
    return digest.hexdigest()


def _entries(path: Path, header: bytes) -> list[tuple[bytes, int, int]]:
    """What enters the checksum for each tensor, where its bytes start, and how many they are; by name."""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        out = []
        for name in sorted(tensors):
            dtype, (start, end) = tensors[name]["dtype"], tensors[name]["data_offsets"]
            out.append(
                (f"{name} {TYPES.get(dtype, dtype)} {tuple(tensors[name]['shape'])}\n".encode(), start, end - start)
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a damaged header: {error!r}") from error
    return out


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        chunk = file.read(min(size, CHUNK))
        if not chunk:
            raise ValueError(f"{file.name} is truncated")
        size -= len(chunk)
        yield chunk
