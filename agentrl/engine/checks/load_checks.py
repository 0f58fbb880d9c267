"""Checks a folder against the base model before an engine loads it, since an engine may load it wrongly and not say so.

                       what an engine does with it                   here
    unknown tensor     ignored: the old weights stay in use          refused
    other shape        weights half replaced                         refused
    other adapter      used as it is, or a crash at its first use    refused (adapter_checks.py)

Only headers are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from agentrl.engine.checks.adapter_checks import check_adapter
from agentrl.errors import ModelFolderError
from agentrl.versions.tensor_header import Entry
from agentrl.versions.weights_folder import tensor_entries

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types that engines convert to their own."""
MOST_NAMED = 3
"""Tensors that a message names."""


class LoadChecks:
    """Checks folders for engines of one base model.

    While this host cannot read the base model's tensors, only what needs no comparison is checked.
    """

    def __init__(self, base_model: Path) -> None:
        self._base_model = base_model
        self._known: Mapping[str, Entry] = {}

    def checkpoint(self, folder: Path) -> None:
        """Raise ModelFolderError unless every tensor of a folder is one of the base model's, of its shape.

        A folder need not have all tensors: engines keep those that it lacks.
        """
        found = _entries(folder)
        if not found:
            raise ModelFolderError(f"{folder} has no safetensors files")
        if self._base:
            _compare(folder, found, self._base)

    def adapter(self, folder: Path) -> None:
        """Raise ModelFolderError unless a folder has a low-rank adapter for layers of the base model."""
        check_adapter(folder, _entries(folder), self._base)

    @property
    def _base(self) -> Mapping[str, Entry]:
        """The base model's tensors; none while they cannot be read."""
        if not self._known:
            with suppress(ModelFolderError):
                self._known = _entries(self._base_model)
        return self._known


def _compare(folder: Path, found: Mapping[str, Entry], base: Mapping[str, Entry]) -> None:
    unknown = sorted(found.keys() - base.keys())
    if unknown:
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        raise ModelFolderError(f"{folder}: the model has no tensor {', '.join(unknown[:MOST_NAMED])}{more}")
    for name, entry in sorted(found.items()):
        wanted = base[name]
        if entry.shape != wanted.shape:
            raise ModelFolderError(f"{folder}: {name} has shape {list(entry.shape)}, the model's {list(wanted.shape)}")
        if entry.dtype != wanted.dtype and not {entry.dtype, wanted.dtype} <= FLOATS:
            raise ModelFolderError(f"{folder}: {name} has type {entry.dtype}, the model's {wanted.dtype}")


def _entries(folder: Path) -> dict[str, Entry]:
    if not folder.is_dir():
        raise ModelFolderError(f"no such folder: {folder}")
    try:
        return tensor_entries(folder)
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder} cannot be read: {error}") from error
