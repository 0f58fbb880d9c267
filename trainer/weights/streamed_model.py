"""Writes a Hugging Face folder of a checkpoint's model, tensor by tensor: one whole tensor is in memory at a time.

    base model's file     header ──────────────────────────────► the same header
                          bytes of a tensor that is not trained ► the same bytes
    checkpoint            a trained tensor, in the file's type ──► in place of the base model's

The folder has the files of the base model: the same names, the same split, the same types. A fused parameter of the
model (a mixture's experts) is taken apart into the tensors of the files; an adapter is merged, or written by itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from agentrl.configs.trainer_config import AdapterConfig
from agentrl.errors import ModelFolderError
from agentrl.files import atomic_folder
from agentrl.trainer.checkpoints.checkpoint import Checkpoint
from agentrl.trainer.checkpoints.checkpoint_tensors import CheckpointTensors
from agentrl.trainer.models import loading, lora, tensor_files
from agentrl.trainer.models.tensor_naming import Names
from agentrl.trainer.weights.version_folders import copy_sidecars
from agentrl.versions.tensor_header import Entry, read_header

FACTS = "checkpoint.json"
"""The file in an exported folder that says from which checkpoint it was made."""
POLICY = "policy"
"""The part of a checkpoint that has the policy's parameters."""
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK = 8 << 20
TAKEN_APART = 2
"""Fused parameters whose parts stay in memory: files alternate between the two of a block."""


def write(
    folder: Path,
    found: Checkpoint,
    base_model: Path,
    adapter: AdapterConfig,
    run: str,
    *,
    part: str = POLICY,
    merged: bool = True,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face folder, which appears whole; replaces an older one. `part` is
    the checkpoint's part to read.

    With an adapter and not `merged`, writes the adapter alone, in peft's format. Raises StoreError for a checkpoint
    that is damaged or was deleted meanwhile, ModelFolderError for a base model that does not fit, and OSError.
    """
    if adapter.rank and not merged:
        tensors = CheckpointTensors(found.folder, part)
        lora.write(folder, {name: tensors.read(name) for name in sorted(tensors.names)}, base_model, adapter)
        return
    write_mean(folder, [(found, 1.0)], base_model, adapter, run, part=part)


def write_mean(
    folder: Path,
    found: Sequence[tuple[Checkpoint, float]],
    base_model: Path,
    adapter: AdapterConfig,
    run: str,
    *,
    part: str = POLICY,
) -> None:
    """Write the weighted mean of checkpoints of one run as a Hugging Face folder, as `write`. Adapters are merged
    first, so it is the mean of the matrices that engines would compute with.
    """
    _, names = loading.build(base_model)
    of_each = [Trained(CheckpointTensors(one.folder, part), names, base_model, adapter) for one, _ in found]
    trained = Mean(of_each, [weight for _, weight in found])
    facts = [facts_of(one, run) | ({} if part == POLICY else {"part": part}) for one, _ in found]
    means = [fact | {"weight": weight} for fact, weight in zip(facts, trained.weights, strict=True)]
    with atomic_folder(folder) as draft:
        copy_sidecars(base_model, draft)
        index = base_model / tensor_files.INDEX
        if index.is_file():
            shutil.copyfile(index, draft / index.name)
        for file in sorted(set(tensor_files.files_of(base_model).values())):
            copy_file(file, draft / file.name, trained)
        (draft / FACTS).write_text(json.dumps(facts[0] if len(facts) == 1 else {"mean_of": means}, indent=1))


def facts_of(found: Checkpoint, run: str) -> dict[str, Any]:
    """The facts of a checkpoint in its exported folder."""
    record = found.record
    facts = {"run": run, "step": record.step, "step_id": record.batch.step_id, "version": record.version}
    return {**facts, "digest": found.digest}


class Trained:
    """A checkpoint's tensors by the names of the base model's files."""

    def __init__(self, tensors: CheckpointTensors, names: Names, base_model: Path, adapter: AdapterConfig) -> None:
        self._tensors, self._names, self._base_model, self._adapter = tensors, names, base_model, adapter
        has = tensors.names
        self._plain = {stored: name for stored, name in names.plain.items() if name in has}
        self._fused = {
            stored: fused.first
            for fused in names.fused
            if fused.first in has
            for of_pattern in fused.parts.values()
            for stored in of_pattern
        }
        self._adapted = {
            stored: name.removesuffix(".weight")
            for stored, name in names.plain.items()
            if f"{name.removesuffix('.weight')}{lora.A}" in has
        }
        self._apart: dict[str, dict[str, Tensor]] = {}
        known = {*self._plain.values(), *self._fused.values()}
        known |= {f"{layer}{end}" for layer in self._adapted.values() for end in (lora.A, lora.B)}
        if unknown := sorted(has - known):
            raise ModelFolderError(f"{base_model} has no tensor for {unknown[0]} of the checkpoint")

    def __contains__(self, stored: str) -> bool:
        return stored in self._plain or stored in self._fused or stored in self._adapted

    def read(self, stored: str) -> Tensor:
        """A trained tensor, float32."""
        if stored in self._plain:
            return self._tensors.read(self._plain[stored])
        if stored in self._fused:
            return self._part(self._fused[stored], stored)
        layer = self._adapted[stored]
        pair = {f"{layer}{end}": self._tensors.read(f"{layer}{end}") for end in (lora.A, lora.B)}
        return lora.merged(pair, self._base_model, self._names, self._adapter)[f"{layer}.weight"]

    def _part(self, first: str, stored: str) -> Tensor:
        if first not in self._apart:
            while len(self._apart) >= TAKEN_APART:
                self._apart.pop(next(iter(self._apart)))
            self._apart[first] = self._names.in_files({first: self._tensors.read(first)})
        return self._apart[first][stored]


class Mean:
    """The weighted mean of the tensors of several checkpoints, which have the same names."""

    def __init__(self, of: Sequence[Trained], weights: Sequence[float]) -> None:
        self._of = of
        self.weights = [weight / sum(weights) for weight in weights]

    def __contains__(self, stored: str) -> bool:
        return stored in self._of[0]

    def read(self, stored: str) -> Tensor:
        """The mean of a trained tensor, float32: Σ_i w_i θ_i with Σ_i w_i = 1. In memory are two tensors, and of fused
        experts TAKEN_APART parameters of each checkpoint.
        """
        if len(self._of) == 1:
            return self._of[0].read(stored)
        total = self._of[0].read(stored).float() * self.weights[0]
        for one, weight in zip(self._of[1:], self.weights[1:], strict=True):
            total.add_(one.read(stored).float(), alpha=weight)
        return total


def copy_file(source: Path, target: Path, trained: Mean) -> None:
    """Copy a safetensors file with the trained tensors in place of the base model's. Raises ModelFolderError."""
    try:
        header = read_header(source)
    except ValueError as error:
        raise ModelFolderError(str(error)) from error
    with source.open("rb") as base, target.open("wb") as out:
        out.write(header.data)
        for entry in header.entries:
            if entry.name in trained:
                out.write(_bytes_of(trained.read(entry.name), entry, source))
            else:
                for chunk in _chunks(base, entry, source):
                    out.write(chunk)


def _bytes_of(tensor: Tensor, entry: Entry, path: Path) -> memoryview:
    """The bytes of a tensor in the file's type. Raises ModelFolderError for another shape, and for a type that training
    does not write.
    """
    if entry.dtype not in TYPES:
        raise ModelFolderError(f"{path}: {entry.name} has type {entry.dtype}, which cannot be written")
    if tuple(tensor.shape) != entry.shape:
        raise ModelFolderError(f"{path}: {entry.name} has shape {entry.shape}, the checkpoint {tuple(tensor.shape)}")
    stored = tensor.to(TYPES[entry.dtype]).contiguous().flatten().view(torch.uint8)
    data: memoryview = stored.numpy().data
    return data


def _chunks(file: BinaryIO, entry: Entry, path: Path) -> Iterator[bytes]:
    """The bytes of a tensor of a file. Raises ModelFolderError when the file ends before."""
    file.seek(entry.start)
    left = entry.size_bytes
    while left:
        chunk = file.read(min(CHUNK, left))
        if not chunk:
            raise ModelFolderError(f"{path} is truncated")
        left -= len(chunk)
        yield chunk
