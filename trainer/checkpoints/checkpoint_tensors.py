"""Reads a checkpoint tensor by tensor in one process: without a GPU, without a process group, beside the trainer.

A tensor that several ranks wrote lies in pieces in their files; it is read piece by piece and is whole in memory.
"""

from __future__ import annotations

import io
from pathlib import Path
from pickle import PickleError

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from agentrl.errors import StoreError
from agentrl.trainer.checkpoints.checkpoint import STATE
from agentrl.trainer.checkpoints.state_reader import StateReader

DAMAGED = (EOFError, ValueError, AttributeError, ImportError, RuntimeError, KeyError, PickleError)
"""Errors of torch for files that are not what their names say."""


class CheckpointTensors:
    """The tensors of a checkpoint's part, by name. Methods raise StoreError for a damaged or deleted checkpoint."""

    def __init__(self, folder: Path, part: str) -> None:
        self._state = folder / STATE
        self._part = part
        try:
            metadata = StateReader(self._state).read_metadata()
        except OSError as error:
            raise self._lost(error) from error
        self._entries = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if key.startswith(f"{part}/") and isinstance(entry, TensorStorageMetadata)
        }
        self._places = {(index.fqn, tuple(index.offset or ())): place for index, place in metadata.storage_data.items()}

    @property
    def names(self) -> set[str]:
        """The names of the part's tensors."""
        return {key.removeprefix(f"{self._part}/") for key in self._entries}

    def read(self, name: str) -> Tensor:
        """A whole tensor, in memory."""
        key = f"{self._part}/{name}"
        entry = self._entries[key]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            target = whole
            for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(self._piece(key, tuple(chunk.offsets)))
        return whole

    def _piece(self, key: str, offset: tuple[int, ...]) -> Tensor:
        try:
            place = self._places[key, offset]
            with (self._state / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
            piece: Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except OSError as error:
            raise self._lost(error) from error
        except DAMAGED as error:
            raise StoreError(f"{self._state}: {key} is damaged: {error!r}") from error
        return piece

    def _lost(self, error: OSError) -> StoreError:
        return StoreError(f"{error.filename or self._state} cannot be read: {error.strerror}")
