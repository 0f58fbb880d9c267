"""Writes the whole model at the end of a run, `model/`, and adapters, by themselves."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from torch import Tensor

from agentrl.configs.trainer_config import AdapterConfig
from agentrl.errors import ModelFolderError
from agentrl.files import atomic_folder
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models import lora
from agentrl.trainer.models.policy import Body, Policy
from agentrl.trainer.weights.gathering import placement
from agentrl.trainer.weights.published import Published
from agentrl.trainer.weights.version_folders import INDEX, copy_sidecars
from agentrl.trainer.weights.version_tensors import as_in, units
from agentrl.trainer.weights.version_writer import pump
from agentrl.trainer.weights.weight_stream import Chunk, Stream, raw
from agentrl.versions.tensor_header import read_header
from agentrl.versions.weights_folder import ADAPTER, checksum, combined, head, in_threads

BUCKET_BYTES = 256 << 20
"""Bytes of the exported model that rank 0 has at once, twice."""


def trainable(policy: Body, world: World) -> dict[str, Tensor]:
    """The whole trained parameters, in rank 0's memory; no tensors on other ranks. For an adapter. Collective."""
    trained = {}
    for name, p in policy.trainable():
        whole = full(p)
        if world.leads:
            trained[name] = whole
    return trained


def adapter_version(folder: Path, trained: dict[str, Tensor], base_model: Path, adapter: AdapterConfig) -> Published:
    """Write a version that is an adapter in peft's format, from its parameters.

    A folder that already holds the same tensors stays unchanged: engines may be reading it.
    """
    tensors = lora.for_engines(trained, base_model)
    digest = _checksum(lora.stored(tensors))
    if not _holds(folder / ADAPTER, digest):
        lora.write(folder, tensors, base_model, adapter)
    return Published(folder.resolve(), digest, written_bytes=(folder / ADAPTER).stat().st_size)


def export(run_dir: Path, policy: Policy, base_model: Path, adapter: AdapterConfig, world: World) -> None:
    """Write `model/`, a Hugging Face folder of the base model with the trained tensors. Collective; rank 0 writes.

    Tensors keep the type of the base model's files. A trained adapter is also written by itself, to `adapter/`.
    """
    if adapter.rank:
        trained = trainable(policy, world)
        world.only_leader(lambda: lora.write(run_dir / "adapter", trained, base_model, adapter))
    parameters = dict(policy.trainable())
    made = units(parameters, base_model, policy.names, adapter, as_in(base_model))
    stream = Stream(made, parameters, placement(parameters, world), world, [0], BUCKET_BYTES)
    with atomic_folder(run_dir / "model") if world.leads else nullcontext() as draft:
        places = world.only_leader(partial(_copied, base_model, draft)) or {}
        pump(stream.chunks(), partial(_overwrite, places))


def _copied(base_model: Path, draft: Path | None) -> dict[str, tuple[Path, int]]:
    """Copy the base model. Returns for each tensor its file, and where in it the tensor begins."""
    assert draft is not None, "rank 0 has a draft"
    copy_sidecars(base_model, draft)
    if (base_model / INDEX).is_file():
        shutil.copyfile(base_model / INDEX, draft / INDEX)
    files = [Path(shutil.copyfile(file, draft / file.name)) for file in sorted(base_model.glob("*.safetensors"))]
    return {name: place for file in files for name, place in _places(file).items()}


def _places(file: Path) -> dict[str, tuple[Path, int]]:
    """For each tensor of a file that was copied: the file, and where the tensor begins. Raises ModelFolderError."""
    try:
        return {entry.name: (file, entry.start) for entry in read_header(file).entries}
    except ValueError as error:
        raise ModelFolderError(str(error)) from error


def _overwrite(places: Mapping[str, tuple[Path, int]], chunks: list[Chunk]) -> None:
    """Replace a bucket's bytes in the copied files."""
    for output, start, data in chunks:
        file, first = places[output.name]
        with file.open("r+b", buffering=0) as opened:
            opened.seek(first + start)
            left = raw(data)
            while left:
                left = left[opened.write(left) :]


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """The checksum of the file that holds these tensors."""
    named = sorted(tensors.items())
    heads = (head(name, str(tensor.dtype), tensor.shape) for name, tensor in named)
    return combined(heads, in_threads(lambda one: hashlib.sha256(raw(one[1])).digest(), named))


def _holds(file: Path, digest: str) -> bool:
    try:
        return checksum(file) == digest
    except (OSError, ValueError):  # missing or damaged
        return False
