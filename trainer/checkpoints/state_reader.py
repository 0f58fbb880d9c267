"""Reads a checkpoint's `state/` folder with torch.distributed.checkpoint, and runs no code that its files name.

torch describes the tensors in a pickle, `.metadata`, and would call whatever a pickle names. Here a pickle may name the
classes below and torch's data types; anything else is refused. Tensors are read with `weights_only`.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta

from agentrl.errors import StoreError

_DESCRIPTION = "torch.distributed.checkpoint.metadata"
ALLOWED = frozenset(
    {
        *((_DESCRIPTION, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *((_DESCRIPTION, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
        (_DESCRIPTION, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }
)
"""Modules and names that a description of tensors needs. BytesStorageMetadata is none: torch unpickles such entries."""
MEMBER = ("builtins", "getattr")
"""How Python before 3.11.4 pickles a member of an enumeration, with the class and the member's name."""
PATH = frozenset({("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")})
"""How releases of Python pickle the folder in which a description was written, which is not used."""
DAMAGED = (
    *(AttributeError, EOFError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError),
    pickle.PickleError,
)
"""Errors of a pickle that is damaged."""


class StateReader(FileSystemReader):
    """Reads the tensors of a checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of the tensors. Raises StoreError when it is damaged or names code, and OSError."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            try:
                found = _Unpickler(file).load()
            except DAMAGED as error:
                raise StoreError(f"{self.path} is damaged: {error!r}") from error
        if not (isinstance(found, Metadata) and isinstance(found.state_dict_metadata, dict)):
            raise StoreError(f"{self.path} is damaged: its description is a {type(found).__name__} without tensors")
        found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    """Knows the classes of descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """The object that a pickle names; UnpicklingError for one that is not allowed, which is not imported."""
        if (module, name) in PATH:
            return _written_in
        if (module, name) == MEMBER:
            return _member
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _member(kind: object, name: str) -> object:
    """In place of `getattr`: a memory format's member."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for {name!r} of another class than memory formats")
    return _MEM_FORMAT_ENCODING[name]


def _written_in(*parts: object) -> None:
    """In place of a path."""
