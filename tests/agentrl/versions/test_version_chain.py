"""The route to a version: the fewest bytes from what a host has."""

from __future__ import annotations

import hashlib

import pytest

from agentrl.errors import StorageError
from agentrl.versions.version_chain import Find, route
from agentrl.versions.version_manifest import Delta, TensorFacts, VersionFile, VersionManifest, manifest_of

SHA = hashlib.sha256(b"").hexdigest()


def lineage(kinds: str, delta_bytes: int = 10, whole_bytes: int = 100) -> dict[str, VersionManifest]:
    """Versions from v1 on: `w` has whole files, `d` a delta, `b` both."""
    made: dict[str, VersionManifest] = {}
    before: VersionManifest | None = None
    for version, kind in enumerate(kinds, 1):
        tensors = [TensorFacts("w", "F32", (), hashlib.sha256(str(version).encode()).hexdigest())]
        whole = [VersionFile("model.safetensors", whole_bytes, SHA)] if kind in "wb" else None
        delta = None
        if kind in "db" and before is not None:
            file = VersionFile("delta-00001-of-00001.bin", delta_bytes, SHA)
            delta = Delta(before.name, before.checksum, (file,), 1, 1)
        before = manifest_of(f"v{version}-a", tensors, whole, delta)
        made[before.name] = before
    return made


def finder(versions: dict[str, VersionManifest]) -> Find:
    """Finds versions by their name, whatever their checksum, as a source may."""
    return lambda name, checksum: versions.get(name)


@pytest.mark.parametrize(
    ("kinds", "cached", "base", "deltas", "size"),
    [
        ("wddd", [], 1, [2, 3, 4], 130),
        ("wddd", [1], 1, [2, 3, 4], 30),
        ("wddd", [1, 3], 3, [4], 10),
        ("wddd", [4], 4, [], 0),
        ("wdbd", [], 3, [4], 110),
        ("wdbd", [2], 2, [3, 4], 20),
        ("w", [], 1, [], 100),
        ("wddddddddddddb", [1], 14, [], 100),
        ("wdddddddddddb", [3], 13, [], 100),
        ("wddddddddddb", [3], 3, [4, 5, 6, 7, 8, 9, 10, 11, 12], 90),
    ],
)
def test_the_route_has_the_fewest_bytes(kinds: str, cached: list[int], base: int, deltas: list[int], size: int) -> None:
    versions = lineage(kinds)
    wanted = list(versions.values())[-1]
    found = route(wanted, finder(versions), lambda manifest: manifest.version in cached)
    assert (found.base.version, [delta.version for delta in found.deltas]) == (base, deltas)
    assert (found.size_bytes, found.is_cached) == (size, base in cached)


def test_no_whole_files_anywhere() -> None:
    versions = lineage("wddd")
    del versions["v1-a"]
    with pytest.raises(StorageError, match=r"v4-a cannot be made: .* down to v2-a"):
        route(versions["v4-a"], finder(versions), lambda manifest: False)


def test_a_parent_with_another_checksum_ends_the_chain() -> None:
    versions = lineage("wd")
    other = manifest_of("v1-a", [TensorFacts("w", "F32", (), SHA)], [VersionFile("m.safetensors", 1, SHA)], None)
    with pytest.raises(StorageError, match="down to v2-a"):
        route(versions["v2-a"], finder({"v1-a": other}), lambda manifest: manifest is other)


def test_a_parent_that_is_not_older_ends_the_chain() -> None:
    """So a chain cannot be a circle."""
    versions = lineage("wd")
    child = versions["v2-a"]
    delta = Delta("v3-b", child.checksum, child.delta.files, 1, 1)
    circle = manifest_of("v2-a", child.tensors, None, delta)
    newer = manifest_of("v3-b", child.tensors, None, Delta("v2-a", child.checksum, child.delta.files, 1, 1))
    with pytest.raises(StorageError, match="down to v2-a"):
        route(circle, finder({"v3-b": newer, "v2-a": circle}), lambda manifest: False)
