"""Writes the weights that engines load, `weights/v12-STEP_ID/`, and the whole model at the end of a run, `model/`.

A version's folder holds the tensors that training changes, under Hugging Face names. SGLang's
`/update_weights_from_disk` accepts a folder with some of the tensors. Every version holds the same ones, so an engine
that loads a version over the base weights, or over another version, is at that version. A published adapter has peft's
format.

A step id belongs to one lease, so two trainers never write different tensors under one name, and a folder never changes
while an engine reads it. The store knows each version's folder. The trainer deletes folders that it no longer needs.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.configs.trainer_config import AdapterConfig, LoraConfig
from agentrl.files import atomic_folder
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models import lora
from agentrl.trainer.models.policy import Body, Policy
from agentrl.trainer.models.tensor_naming import Names
from agentrl.versions.weights_folder import ADAPTER, TENSORS, checksum, combined, head, in_threads, version_of


class Published(NamedTuple):
    """A version's absolute folder, its checksum, and the tensors to send to engines directly."""

    path: Path
    checksum: str
    tensors: dict[str, Tensor]


def publishable(
    folder: Path,
    trained: dict[str, Tensor],
    base_model: Path,
    names: Names,
    adapter: LoraConfig,
    dtype: torch.dtype = torch.float32,
) -> Published:
    """Write `folder` from the trained parameters.

    Tensors get the names of the base model's files and the engines' `dtype`, to which engines would round them.
    Vectors (norms, biases) keep their type, because some engines keep them in float32. A folder that already holds the
    same tensors stays unchanged: engines may be reading it.
    """
    if adapter.publish == "adapter":
        path, digest = _publishable_adapter(folder, lora.for_engines(trained, base_model), base_model, adapter)
        return Published(path, digest, {})
    merged = _as_stored(trained, base_model, names, adapter)
    tensors = {name: tensor.to(dtype) if tensor.ndim > 1 else tensor for name, tensor in merged.items()}
    digest = _digest(tensors)
    if not _holds(folder / TENSORS, digest):
        with atomic_folder(folder) as draft:
            save_file(tensors, draft / TENSORS)
            copy_sidecars(base_model, draft)
    return Published(folder.resolve(), digest, tensors)


def _publishable_adapter(
    folder: Path, tensors: dict[str, Tensor], base_model: Path, adapter: AdapterConfig
) -> tuple[Path, str]:
    digest = _digest(lora.stored(tensors))
    if not _holds(folder / ADAPTER, digest):
        lora.write(folder, tensors, base_model, adapter)
    return folder.resolve(), digest


def trainable(policy: Body, world: World) -> dict[str, Tensor]:
    """The whole trained parameters, in rank 0's memory; no tensors on other ranks. Collective."""
    trained = {}
    for name, p in policy.trainable():
        whole = full(p)
        if world.leads:
            trained[name] = whole
    return trained


def remove(root: Path, unneeded: Callable[[list[str]], set[str]]) -> None:
    """Delete the version folders in `root` that `unneeded` selects by name."""
    names = [path.name for path in root.glob("v*") if version_of(path.name) is not None]
    for name in unneeded(names):
        shutil.rmtree(root / name)


def export(run_dir: Path, policy: Policy, base_model: Path, adapter: AdapterConfig, world: World) -> None:
    """Write `model/`, a Hugging Face folder of the base model with the trained tensors. Collective; rank 0 writes.

    Tensors keep the type of the base model's files. A trained adapter is also written by itself, to `adapter/`.
    """
    trained = trainable(policy, world)
    if not world.leads:
        return
    if adapter.rank:
        lora.write(run_dir / "adapter", trained, base_model, adapter)
    changed = _as_stored(trained, base_model, policy.names, adapter)
    with atomic_folder(run_dir / "model") as draft:
        copy_sidecars(base_model, draft)
        index = base_model / "model.safetensors.index.json"
        if index.is_file():
            shutil.copyfile(index, draft / index.name)
        for shard in sorted(base_model.glob("*.safetensors")):
            with safe_open(shard, framework="pt") as tensors:
                merged = {}
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    base: Tensor = tensors.get_tensor(name)
                    merged[name] = changed[name].to(base.dtype) if name in changed else base
                save_file(merged, draft / shard.name, metadata={"format": "pt"})


def _as_stored(trained: dict[str, Tensor], base_model: Path, names: Names, adapter: AdapterConfig) -> dict[str, Tensor]:
    """The trained tensors by the names of the base model's files, with an adapter merged."""
    return names.in_files(lora.merged(trained, base_model, names, adapter) if adapter.rank else trained)


def copy_sidecars(base_model: Path, folder: Path) -> None:
    """Copy the configuration and the tokenizer."""
    for path in base_model.iterdir():
        if path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _digest(tensors: dict[str, Tensor]) -> str:
    """The `checksum` of the file that holds these tensors."""
    named = sorted(tensors.items())
    heads = (head(name, str(tensor.dtype), tensor.shape) for name, tensor in named)
    return combined(heads, in_threads(bytes_digest, [[tensor] for _, tensor in named]))


def bytes_digest(tensors: Sequence[Tensor]) -> bytes:
    """SHA-256 of the tensors' bytes, one tensor after another."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _holds(file: Path, digest: str) -> bool:
    try:
        return checksum(file) == digest
    except (OSError, ValueError):  # missing or damaged
        return False
