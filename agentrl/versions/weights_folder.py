"""The layout and checksum of a weights folder, which the trainer writes and the proxy checks. Imports no torch.

`v12-STEP_ID/` holds version 12: either the trained tensors (TENSORS) or a low-rank adapter in peft's format (ADAPTER).
A step id belongs to one lease, so each set of weights has its own name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from agentrl.versions.tensor_header import Entry, read_header

TENSORS = "model.safetensors"
"""The file of full tensors."""
ADAPTER = "adapter_model.safetensors"
"""The file of an adapter's tensors."""
T = TypeVar("T")
CHUNK = 1 << 20
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

    Raises OSError when the file cannot be read, ValueError when it is damaged or not as long as its header states.
    """
    entries = sorted(read_header(path).entries)

    def digest(entry: Entry) -> bytes:
        return _digest(path, entry.start, entry.size_bytes)

    heads = (head(entry.name, TYPES.get(entry.dtype, entry.dtype), entry.shape) for entry in entries)
    return combined(heads, in_threads(digest, entries))


def tensor_names(folder: Path) -> set[str]:
    """The names of all tensors in a folder's safetensors files.

    Raises OSError when a file cannot be read, ValueError when one is damaged.
    """
    return set(tensor_entries(folder))


def tensor_entries(folder: Path) -> dict[str, Entry]:
    """All tensors in a folder's safetensors files, by name. Reads only their heads; raises as `tensor_names` does."""
    entries = (entry for path in folder.glob("*.safetensors") for entry in read_header(path).entries)
    return {entry.name: entry for entry in entries}


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
