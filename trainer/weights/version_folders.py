"""Completes version folders, and finds those that may be deleted. Rank 0 only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agentrl.errors import DamagedObject
from agentrl.files import settle
from agentrl.storage.folder_manifest import facts_of
from agentrl.versions.version_manifest import (
    SIDECARS,
    VERSION_FILE,
    Delta,
    TensorFacts,
    VersionFile,
    VersionManifest,
    manifest_of,
    read_manifest,
)
from agentrl.versions.weights_folder import version_of

INDEX = "model.safetensors.index.json"
"""The file that maps tensors to files, in folders with several files."""


def complete(
    draft: Path,
    folder: Path,
    base_model: Path,
    tensors: Sequence[TensorFacts],
    whole: dict[str, VersionFile] | None,
    delta: Delta | None,
) -> VersionManifest:
    """Add the manifest to a draft that has all shares, beside whole files also what a model folder needs; rename it.

    `whole` maps tensors to their files. Raises OSError.
    """
    files = None
    if whole is not None:
        copy_sidecars(base_model, draft)
        _write_index(draft, whole, sum(tensor.size_bytes for tensor in tensors))
        sidecars = [path for path in draft.iterdir() if path.suffix in SIDECARS]
        files = [*set(whole.values()), *map(_facts, sidecars)]
    manifest = manifest_of(folder.name, tensors, files, delta)
    (draft / VERSION_FILE).write_bytes(manifest.dumps())
    settle(draft, folder)
    return manifest


def _write_index(draft: Path, whole: dict[str, VersionFile], size_bytes: int) -> None:
    names = {tensor: file.name for tensor, file in sorted(whole.items())}
    if len(set(names.values())) > 1:
        (draft / INDEX).write_text(json.dumps({"metadata": {"total_size": size_bytes}, "weight_map": names}))


def _facts(path: Path) -> VersionFile:
    facts = facts_of(path)
    return VersionFile(path.name, facts.size_bytes, facts.sha256)


def copy_sidecars(base_model: Path, folder: Path) -> None:
    """Copy the configuration and the tokenizer."""
    for path in base_model.iterdir():
        if path.suffix in SIDECARS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def manifest_in(folder: Path) -> VersionManifest | None:
    """The manifest of a folder; None where there is none, or a damaged one."""
    try:
        return read_manifest((folder / VERSION_FILE).read_bytes())
    except (OSError, DamagedObject):
        return None


def undamaged(folder: Path) -> VersionManifest | None:
    """The manifest of a folder with whole files that have their digests; None for any other. Reads all of them."""
    manifest = manifest_in(folder)
    if manifest is None or manifest.whole is None:
        return None
    try:
        fits = all(_facts(folder / file.name) == file for file in manifest.whole)
    except OSError:
        return None
    return manifest if fits else None


def remove(root: Path, unneeded: Callable[[list[str]], set[str]]) -> None:
    """Delete the version folders in `root` that `unneeded` selects by name, except ancestors of the others."""
    names = [path.name for path in root.glob("v*") if version_of(path.name) is not None]
    for name in without_ancestors(names, unneeded(names), lambda name: manifest_in(root / name)):
        shutil.rmtree(root / name)


def without_ancestors(
    names: Iterable[str], unneeded: set[str], find: Callable[[str], VersionManifest | None]
) -> set[str]:
    """The unneeded versions from which no other version is made: those whose deltas lead back to one stay."""
    kept = set[str]()
    for name in names:
        if name in unneeded:
            continue
        at = find(name)
        while at is not None and at.whole is None and at.delta is not None and at.delta.parent not in kept:
            kept.add(at.delta.parent)
            at = find(at.delta.parent)
    return unneeded - kept
