"""Lays out safetensors files before their tensors are known: names, headers, and the order of tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from agentrl.trainer.weights.ownership import Output
from agentrl.versions.tensor_header import LENGTH_BYTES
from agentrl.versions.weights_folder import TENSORS

FILE_BYTES = 512 << 20
"""Size at which a share goes on in another file. Hosts pass a version on file by file."""
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Types by their names in headers of safetensors files."""
TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}


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
