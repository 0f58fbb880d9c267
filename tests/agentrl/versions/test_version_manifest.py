"""The manifest of a version: what it refuses, and that it reads what it writes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from agentrl.errors import DamagedObject
from agentrl.versions.version_manifest import (
    Delta,
    TensorFacts,
    VersionFile,
    manifest_of,
    named_manifest,
    read_manifest,
)

SHA = hashlib.sha256(b"").hexdigest()
TENSORS = [TensorFacts("b", "F32", (2, 3), SHA), TensorFacts("a", "BF16", (), SHA)]
WHOLE = [VersionFile("model.safetensors", 100, SHA), VersionFile("config.json", 2, SHA)]
DELTA = Delta("v1-a", SHA, (VersionFile("delta-00001-of-00001.bin", 7, SHA),), 1, 7)


def test_it_reads_what_it_writes() -> None:
    manifest = manifest_of("v2-b", TENSORS, WHOLE, DELTA)
    assert read_manifest(manifest.dumps()) == manifest
    assert [tensor.name for tensor in manifest.tensors] == ["a", "b"]
    assert (manifest.version, manifest.whole_bytes, manifest.tensor_bytes) == (2, 102, 26)
    assert set(manifest.files) == {"model.safetensors", "config.json", "delta-00001-of-00001.bin"}
    assert (DELTA.size_bytes, DELTA.density) == (7, 1 / 7)


def test_a_density_without_elements() -> None:
    assert Delta("v1-a", SHA, DELTA.files, 0, 0).density == 0


def written(**changes: Any) -> bytes:
    return json.dumps(json.loads(manifest_of("v2-b", TENSORS, WHOLE, DELTA).dumps()) | changes).encode()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 2}, "<= 1"),
        ({"name": "v3-b"}, "not a folder of version 2"),
        ({"name": "../v2-b"}, "not a version folder's name"),
        ({"version": "2"}, "Expected `int`"),
        ({"checksum": "0" * 64}, "checksum is not that of the tensors"),
        ({"tensors": [["b", "F32", [2, 3], SHA], ["a", "BF16", [], SHA]]}, "order"),
        ({"tensors": [["a", "F99", [2], SHA]]}, "unknown type"),
        ({"tensors": [["a", "F32", [1 << 40, 1 << 40], SHA]]}, "more than"),
        ({"tensors": [["a", "F32", [-1], SHA]]}, ">= 0"),
        ({"tensors": [["a", "F32", [1], SHA, 5]]}, "length"),
        ({"whole": None, "delta": None}, "neither"),
        ({"whole": [["../model.safetensors", 1, SHA]]}, "not a file of a version folder"),
        ({"whole": [["version.json", 1, SHA]]}, "not a file of a version folder"),
        ({"whole": [["modeling.py", 1, SHA]]}, "neither of tensors nor"),
        ({"whole": [["a.json", 1, SHA], ["a.json", 1, SHA]]}, "twice"),
        ({"whole": []}, "length"),
        ({"more": 1}, "unknown field"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DamagedObject, match=says):
        read_manifest(written(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parent": "v2-b"}, "its own parent"),
        ({"parent": "/v1"}, "not a version folder's name"),
        ({"changed": 8}, "more changed elements"),
        ({"files": [["x.bin", 1, SHA]]}, "not named"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_refuses_a_delta(changes: dict[str, Any], says: str) -> None:
    delta = json.loads(written())["delta"] | changes
    with pytest.raises(DamagedObject, match=says):
        read_manifest(written(delta=delta))


@pytest.mark.parametrize(
    "data", [b"", b"[" * 200_000, b"{}", b"null", b"\xff", b"[1]"], ids=lambda data: repr(data[:4])
)
def test_it_refuses_garbage(data: bytes) -> None:
    with pytest.raises(DamagedObject, match=r"^HERE: version\.json is damaged"):
        named_manifest(data, "v2-b", "HERE")


def test_it_refuses_the_manifest_of_another_version() -> None:
    with pytest.raises(DamagedObject, match="that of v2-b"):
        named_manifest(written(), "v2-c", "HERE")
