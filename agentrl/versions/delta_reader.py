"""Reads delta files, which come from outside, and applies them to the parent's tensors in place.

Every size is compared with the version's manifest before memory is used for it. An error names the file. The
tensors' digests are compared by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from agentrl.errors import DamagedObject
from agentrl.versions.delta_codec import HEADER, apply_chunk, chunks_of, packed_bytes
from agentrl.versions.delta_writer import END, END_MARK, MAGIC, NAME_LENGTH, TENSOR
from agentrl.versions.version_manifest import TensorFacts

READ_BYTES = 1 << 20


def apply_delta(path: Path, tensors: Mapping[str, TensorFacts], target: Callable[[str], memoryview]) -> list[str]:
    """Apply a delta file to the parent's tensors; returns the names of the tensors that it changes.

    `tensors` are those of the new version; `target(name)` is a tensor's writable memory with the parent's bytes. Raises
    DamagedObject for a file that is not a delta of them, OSError when it cannot be read. Tensors are then undefined.
    """
    changed: list[str] = []
    try:
        with path.open("rb", buffering=READ_BYTES) as file:
            if _exactly(file, len(MAGIC)) != MAGIC:
                raise ValueError("it is not a delta file")
            while (name := _next_name(file, len(changed))) is not None:
                facts = tensors.get(name)
                if facts is None or name in changed:
                    raise ValueError(f"it has the tensor {name[:200]!r}, which the version has not, or twice")
                _apply_tensor(file, facts, target(name))
                changed.append(name)
    except ValueError as error:
        raise DamagedObject(f"{path} is damaged: {error}") from error
    return changed


def _next_name(file: BinaryIO, before: int) -> str | None:
    """The name of the next tensor; None at the end of the file."""
    length = _exactly(file, NAME_LENGTH.size)
    (size,) = NAME_LENGTH.unpack(length)
    if size != END_MARK:
        return _exactly(file, size).decode()
    if END.unpack(length + _exactly(file, END.size - len(length))) != (END_MARK, before) or file.read(1):
        raise ValueError("its end is damaged")
    return None


def _apply_tensor(file: BinaryIO, facts: TensorFacts, target: memoryview) -> None:
    if TENSOR.unpack(_exactly(file, TENSOR.size)) != (facts.item_bytes, facts.size_bytes):
        raise ValueError(f"its tensor {facts.name!r} has another type or size than the version's")
    if len(target) != facts.size_bytes:
        raise ValueError(f"the parent's tensor {facts.name!r} has another size than the version's")
    for part in chunks_of(facts.size_bytes):
        header = _exactly(file, HEADER.size)
        packed = _exactly(file, packed_bytes(header, part.stop - part.start))
        apply_chunk(header, packed, target[part], facts.item_bytes)


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("it is truncated")
    return data
