"""What engines load: `weights/v12-STEP_ID/`, the tensors that training changes, under Hugging Face names.

SGLang's `/update_weights_from_disk` accepts a folder with a part of the tensors; every version holds the same part, so
an engine with the base weights and any one version on top is at that version. An adapter that is published as such is
written as by peft.

A step id belongs to one lease, so two trainers never write other tensors under one name, and a folder never changes
while an engine reads it. The store knows each version's folder; a folder goes when the store no longer needs it.
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
from agentrl.weights_folder import ADAPTER, TENSORS, checksum, combined, head, in_threads, version_of


class Published(NamedTuple):
    """A version's folder, made absolute, its tensors' checksum, and the tensors that engines may also be sent."""

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
    """Make `folder` from the trained parameters.

    Tensors get the names that the base model's files have for them, and the engines' `dtype`, to which engines would
    round them; vectors (norms, biases), which some engines keep in float32, stay as they are.
    A folder that is there already, with the same tensors, is left as it is: engines may be reading it.
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
    """The trained parameters, whole, in rank 0's memory; none on others. Collective."""
    trained = {}
    for name, p in policy.trainable():
        whole = full(p)
        if world.leads:
            trained[name] = whole
    return trained


def remove(root: Path, unneeded: Callable[[list[str]], set[str]]) -> None:
    """Delete those version folders in `root` that `unneeded` picks by name."""
    names = [path.name for path in root.glob("v*") if version_of(path.name) is not None]
    for name in unneeded(names):
        shutil.rmtree(root / name)


def export(run_dir: Path, policy: Policy, base_model: Path, adapter: AdapterConfig, world: World) -> None:
    """`model/`, a Hugging Face folder: the base model with what was trained in place. Collective; rank 0 writes.

    Tensors keep the type that the base model stores them in. Where an adapter was trained, `adapter/` holds it alone.
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
    """What the base model's files have otherwise, by their names."""
    return names.in_files(lora.merged(trained, base_model, names, adapter) if adapter.rank else trained)


def copy_sidecars(base_model: Path, folder: Path) -> None:
    """Configuration and tokenizer."""
    for path in base_model.iterdir():
        if path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _digest(tensors: dict[str, Tensor]) -> str:
    """`checksum` of the file that they will make."""
    named = sorted(tensors.items())
    heads = (head(name, str(tensor.dtype), tensor.shape) for name, tensor in named)
    return combined(heads, in_threads(bytes_digest, [[tensor] for _, tensor in named]))


def bytes_digest(tensors: Sequence[Tensor]) -> bytes:
    """SHA-256 of what they hold, one after another."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _holds(file: Path, digest: str) -> bool:
    try:
        return checksum(file) == digest
    except (OSError, ValueError):  # not there, or damaged
        return False
