"""Deletes version folders that nothing reads any more, and finds them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from agentrl.errors import DamagedObject
from agentrl.versions.version_manifest import VersionManifest, manifest_in
from agentrl.versions.weights_folder import version_of


def version_names(root: Path) -> list[str]:
    """The names of the version folders in `root`."""
    return [path.name for path in root.glob("v*") if version_of(path.name) is not None]


def remove(root: Path, unneeded: Callable[[list[str]], set[str]]) -> None:
    """Delete the version folders in `root` that `unneeded` selects by name, except ancestors of the others."""
    names = version_names(root)
    for name in without_ancestors(names, unneeded(names), lambda name: manifest_in(root / name)):
        shutil.rmtree(root / name)


def without_ancestors(
    names: Iterable[str], unneeded: set[str], find: Callable[[str], VersionManifest | None]
) -> set[str]:
    """The unneeded versions from which no other version is made: those whose deltas lead back to one stay.

    A version whose manifest is damaged (`find` raises DamagedObject) cannot be made, so it keeps none.
    """
    kept = set[str]()
    for name in names:
        if name in unneeded:
            continue
        with suppress(DamagedObject):
            at = find(name)
            while at is not None and at.whole is None and at.delta is not None and at.delta.parent not in kept:
                kept.add(at.delta.parent)
                at = find(at.delta.parent)
    return unneeded - kept
