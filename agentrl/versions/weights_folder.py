"""The layout and checksum of a weights folder, which the trainer writes and the proxy checks. Imports no torch.

`v12-STEP_ID/` holds version 12: either the trained tensors (TENSORS) or a low-rank adapter in peft's format (ADAPTER).
A step id belongs to one lease, so each set of weights has its own name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

TENSORS = "model.safetensors"
"""The file of full tensors."""
ADAPTER = "adapter_model.safetensors"
"""The file of an adapter's tensors."""
T = TypeVar("T")
CHUNK = 1 << 20
LENGTH_BYTES = 8
TYPES = {"F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}
"""Names of safetensors types, as they enter the checksum."""


def folder_name(version: int, step_id: str) -> str:
    """The folder of the version that a step produced."""
    return f"v{version}-{step_id}"


def version_of(name: str) -> int | None:
    """The version in a folder's name; None for any other folder."""
    match = re.fullmatch(r"v(\d+)(-\w+)?", name)
    return int(match[1]) if match else None


def checksum(path: Path) -> str:
    """The `combined` checksum of a safetensors file.

    Raises OSError when the file cannot be read, ValueError when it is damaged or shorter than its header states.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is not a safetensors file")
        tensors = _tensors(path, file.read(length))

    def digest(tensor: _Tensor) -> bytes:
        return _digest(path, LENGTH_BYTES + length + tensor.start, tensor.size)

    return combined((tensor.head for tensor in tensors), in_threads(digest, tensors))


class Form(NamedTuple):
    """What a tensor is, without its values."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]


def tensor_names(folder: Path) -> set[str]:
    """The names of all tensors in a folder's safetensors files.

    Raises OSError when a file cannot be read, ValueError when one is damaged.
    """
    return set(tensor_forms(folder))


def tensor_forms(folder: Path) -> dict[str, Form]:
    """The types and shapes of all tensors in a folder's safetensors files. Reads only headers; raises as above."""
    found: dict[str, Form] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > path.stat().st_size:
                raise ValueError(f"{path} is not a safetensors file")
            header = json.loads(file.read(length))
        try:
            header.pop("__metadata__", None)
            found |= {name: Form(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has a damaged header: {error!r}") from error
    return found


def combined(heads: Iterable[str], digests: Iterable[bytes]) -> str:
    """The checksum of tensors in name order: SHA-256 over each tensor's `head` and the SHA-256 of its bytes.

    The inner digests can be computed in parallel.
    """
    whole = hashlib.sha256()
    for head, digest in zip(heads, digests, strict=True):
        whole.update(f"{head} {digest.hex()}\n".encode())
    return whole.hexdigest()


def head(name: str, dtype: str, shape: Iterable[int]) -> str:
    """The metadata of a tensor that enters the checksum. `dtype` is torch's name."""
    return f"{name} {dtype} {tuple(shape)}"


def in_threads(work: Callable[[T], bytes], over: Iterable[T]) -> list[bytes]:
    """Apply `work` to each item in threads. Reading and hashing release the interpreter's lock."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, over))


class _Tensor(NamedTuple):
    head: str
    start: int  # offset in the data section
    size: int


def _tensors(path: Path, header: bytes) -> list[_Tensor]:
    """The tensors of a header, by name."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        out = []
        for name in sorted(entries):
            dtype, (start, end) = entries[name]["dtype"], entries[name]["data_offsets"]
            if not 0 <= start <= end or {type(start), type(end)} != {int}:
                raise ValueError(f"{name} has invalid offsets")
            out.append(_Tensor(head(name, TYPES.get(dtype, dtype), entries[name]["shape"]), start, end - start))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a damaged header: {error!r}") from error
    return out


def _digest(path: Path, start: int, size: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while size:
            chunk = file.read(min(size, CHUNK))
            if not chunk:
                raise ValueError(f"{path} is truncated")
            size -= len(chunk)
            digest.update(chunk)
    return digest.digest()
