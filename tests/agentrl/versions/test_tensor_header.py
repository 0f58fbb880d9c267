"""The head of a safetensors file: tensors in the order of their bytes, and damaged files refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl.versions.tensor_header import LENGTH_BYTES, read_header


def test_tensors_are_where_the_header_says(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.arange(4, dtype=torch.bfloat16), "empty": torch.ones(0)}
    save_file(tensors, path := tmp_path / "model.safetensors", {"format": "pt"})
    header, data = read_header(path), path.read_bytes()
    assert data.startswith(header.data)
    assert {entry.name: (entry.dtype, entry.shape) for entry in header.entries} == {
        "b": ("F32", (2, 3)),
        "a": ("BF16", (4,)),
        "empty": ("F32", (0,)),
    }
    for entry in header.entries:
        assert data[entry.start : entry.end] == bytes(tensors[entry.name].view(-1).view(torch.uint8).numpy())


def file_of(entries: Any, data: bytes = b"") -> bytes:
    header = json.dumps(entries).encode()
    return len(header).to_bytes(LENGTH_BYTES, "little") + header + data


def tensor(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a safetensors file"),
        (b"\xff" * 8, "is not a safetensors file"),
        (b"\x02" + b"\0" * 7 + b"[]", "damaged header"),
        (b"\x02" + b"\0" * 7 + b"{,", "damaged header"),
        (file_of({"a": {"dtype": "F32"}}), "damaged header"),
        (file_of({"a": tensor(4, 8)}, bytes(8)), "damaged header: the offsets of 'a'"),
        (file_of({"a": tensor(0, 8)}, bytes(8)), "damaged header: the offsets of 'a'"),
        (file_of({"a": tensor(0, 4), "b": tensor(0, 4)}, bytes(4)), "damaged header: the offsets of 'b'"),
        (file_of({"a": tensor(0, 4)}, bytes(3)), "bytes, not"),
        (file_of({"a": tensor(0, 4)}, bytes(5)), "bytes, not"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.safetensors .*{said}"):
        read_header(path)
