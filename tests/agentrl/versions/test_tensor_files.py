"""Safetensors files of a version: what is in them, and what is refused, always by the file's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import DamagedObject
from agentrl.versions.tensor_files import in_threads, layout_of, read_at, verify
from agentrl.versions.version_manifest import VersionManifest
from agentrl.versions.weights_folder import checksum
from tests.version_folders import safetensors, tensors, write_version

FILE = "model-00001-of-00002.safetensors"


@pytest.fixture
def version(tmp_path: Path) -> VersionManifest:
    return write_version(tmp_path, "v1-a", tensors(np.random.default_rng(0), 40))


def test_the_tensors_of_a_folder(version: VersionManifest, tmp_path: Path) -> None:
    layout = layout_of(tmp_path / "v1-a", version)
    assert layout.places.keys() == version.by_name.keys()
    assert {place.file for place in layout.places.values()} == layout.data_starts.keys()
    for name, place in layout.places.items():
        assert place.size_bytes == version.by_name[name].size_bytes
    verify(tmp_path / "v1-a", version)


def test_the_checksum_is_that_of_one_file_with_all_tensors(tmp_path: Path, version: VersionManifest) -> None:
    """The manifest's checksum does not depend on how tensors are cut into files."""
    (tmp_path / "one.safetensors").write_bytes(safetensors(tensors(np.random.default_rng(0), 40)))
    assert checksum(tmp_path / "one.safetensors") == version.checksum


def test_a_changed_byte_is_found(version: VersionManifest, tmp_path: Path) -> None:
    path = tmp_path / "v1-a" / FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedObject, match=rf"{FILE}: tensor .* has the SHA-256"):
        verify(tmp_path / "v1-a", version)


def test_a_missing_file_is_found(version: VersionManifest, tmp_path: Path) -> None:
    (tmp_path / "v1-a" / FILE).unlink()
    with pytest.raises(DamagedObject, match=r"lacks .* tensors of v1-a"):
        verify(tmp_path / "v1-a", version)


def test_every_truncation_is_found(version: VersionManifest, tmp_path: Path) -> None:
    path = tmp_path / "v1-a" / FILE
    content = path.read_bytes()
    for size in range(0, len(content), 97):
        path.write_bytes(content[:size])
        with pytest.raises(DamagedObject, match=FILE):
            layout_of(tmp_path / "v1-a", version)


def without_a_tensor(header: dict[str, Any]) -> None:
    del header["w.f8"]


def with_a_type(header: dict[str, Any]) -> None:
    header["w.f8"]["dtype"] = "I8"


def with_a_shape(header: dict[str, Any]) -> None:
    header["w.f8"]["shape"] = [2, 20]


def with_an_overlap(header: dict[str, Any]) -> None:
    header["w.f8"]["data_offsets"] = [0, 40]


def with_a_name(header: dict[str, Any]) -> None:
    header["other"] = header.pop("w.f8")


def with_negative_offsets(header: dict[str, Any]) -> None:
    header["w.f8"]["data_offsets"] = [-40, 0]


@pytest.mark.parametrize(
    "change", [without_a_tensor, with_a_type, with_a_shape, with_an_overlap, with_a_name, with_negative_offsets]
)
def test_a_wrong_header_is_refused(
    version: VersionManifest, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path = tmp_path / "v1-a" / FILE
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    with pytest.raises(DamagedObject, match="v1-a"):
        layout_of(tmp_path / "v1-a", version)


@pytest.mark.parametrize("header", [b"", b"[]", b"[" * 100_000, b'{"w": 1}', b"\xff"], ids=range(5))
def test_garbage_is_refused(version: VersionManifest, tmp_path: Path, header: bytes) -> None:
    (tmp_path / "v1-a" / FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedObject, match=FILE):
        layout_of(tmp_path / "v1-a", version)


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    with (tmp_path / "file").open("rb") as file, pytest.raises(DamagedObject, match="shorter"):
        read_at(file.fileno(), 2, 5)


def test_the_first_error_of_threads_is_raised() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 1:
            raise KeyError(item)
        done.append(item)

    with pytest.raises(KeyError):
        in_threads(work, range(1000), threads=1)
    assert len(done) < 1000
