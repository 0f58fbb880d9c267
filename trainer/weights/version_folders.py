"""Completes version folders. Rank 0 only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from agentrl.files import settle
from agentrl.storage.folder_manifest import facts_of
from agentrl.versions.version_manifest import (
    SIDECARS,
    VERSION_FILE,
    Delta,
    TensorFacts,
    VersionFile,
    VersionManifest,
    manifest_in,
    manifest_of,
)

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
