"""The checksum of a safetensors file: what it covers, and what it says of damage."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.versions.weights_folder import checksum

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.zeros((), dtype=torch.float16),
    "d": torch.zeros((0, 2)),
}


def saved(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> Path:
    save_file(tensors, path, metadata=metadata or None)
    return path


def test_the_checksum_is_the_digest_of_names_types_shapes_and_bytes(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    for name in sorted(TENSORS):
        tensor = TENSORS[name]
        own = hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {own}\n".encode())
    assert checksum(saved(tmp_path / "x", TENSORS)) == digest.hexdigest()


def test_the_checksum_ignores_only_order_and_metadata(tmp_path: Path) -> None:
    reference = checksum(saved(tmp_path / "x", TENSORS))
    assert checksum(saved(tmp_path / "y", dict(reversed(TENSORS.items())), format="pt")) == reference
    for changes in ({"b": TENSORS["b"] + 1}, {"b": TENSORS["b"].reshape(3, 2)}, {"c": TENSORS["c"].bfloat16()}):
        assert checksum(saved(tmp_path / "z", TENSORS | changes)) != reference


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a":1}',
        b'{"a":{}}',
        b"\xff\xfe",
        b'{"a":{"dtype":"F32","data_offsets":1}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4.0]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
    ],
)
def test_a_damaged_header_is_told(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="x has a damaged header"):
        checksum(tmp_path / "x")


@pytest.mark.parametrize("keep", [0, 5, 30, -1])
def test_a_file_that_was_cut_short_is_damaged(tmp_path: Path, keep: int) -> None:
    path = saved(tmp_path / "x", TENSORS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"."):
        checksum(path)
