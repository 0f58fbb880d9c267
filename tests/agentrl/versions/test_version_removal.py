"""Which versions stay because others are made from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agentrl.storage.object_store import ObjectStore
from agentrl.versions.version_manifest import VERSION_FILE
from agentrl.versions.version_removal import without_ancestors
from agentrl.versions.version_sources import ObjectSource
from tests.version_folders import changed, tensors, write_version


def test_a_damaged_manifest_in_the_storage_keeps_no_version_and_ends_no_trainer(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    contents = [tensors(rng, 20)]
    manifests = [write_version(tmp_path, "v1-a", contents[0])]
    for version in (2, 3, 4):
        contents.append(changed(rng, contents[-1]))
        parent = (manifests[-1], contents[-2]) if version != 3 else None
        manifests.append(write_version(tmp_path, f"v{version}-a", contents[-1], parent, whole=parent is None))
    names = [manifest.name for manifest in manifests]
    find = ObjectSource(ObjectStore(f"file://{tmp_path}")).manifest
    assert without_ancestors(names, {"v1-a", "v3-a"}, find) == set()
    (tmp_path / "v2-a" / VERSION_FILE).write_bytes(b"{}")
    assert without_ancestors(names, {"v1-a", "v3-a"}, find) == {"v1-a"}
