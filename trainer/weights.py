"""What engines load: `weights/v12/`, the tensors that training changes, under Hugging Face names.

SGLang's `/update_weights_from_disk` accepts a folder with a part of the tensors; every version holds the same part, so
an engine with the base weights and any one version on top is at that version. The file is a hard link to the
checkpoint's where there is one: nothing is written twice.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.trainer.checkpoint import full
from agentrl.trainer.distributed import World
from agentrl.trainer.files import atomic_folder, remove_all_but_newest
from agentrl.trainer.model import Policy

KEEP = 3
WEIGHTS = "model.safetensors"


def publishable(root: Path, version: int, tensors: Path, base_model: Path, *, keep: int = KEEP) -> tuple[Path, str]:
    """Make `root/vN` from a safetensors file; the folder and the SHA-256 of its tensors. Keeps the newest `keep`."""
    folder = root / f"v{version}"
    with atomic_folder(folder) as staging:
        _link(tensors, staging / WEIGHTS)
        _copy_sidecars(base_model, staging)
    remove_all_but_newest(sorted(root.glob("v[0-9]*"), key=_number), keep)
    return folder.resolve(), checksum(folder / WEIGHTS)


def save_trainable(policy: Policy, path: Path, world: World) -> None:
    """Write the trained parameters. Collective; rank 0 writes."""
    tensors = {name: full(p) for name, p in policy.trainable()}
    if world.leads:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)


def checksum(path: Path) -> str:
    """SHA-256 over names, types, shapes and bytes of the tensors, in the order of their names."""
    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor: Tensor = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def export(folder: Path, policy: Policy, base_model: Path, world: World) -> None:
    """A whole Hugging Face folder: base model with the trained parameters in place. Collective; rank 0 writes.

    Tensors keep the type that the base model stores them in.
    """
    trained = {name: full(p) for name, p in policy.trainable()}
    if not world.leads:
        return
    with atomic_folder(folder) as staging:
        _copy_sidecars(base_model, staging)
        index = base_model / "model.safetensors.index.json"
        if index.is_file():
            shutil.copyfile(index, staging / index.name)
        for shard in sorted(base_model.glob("*.safetensors")):
            with safe_open(shard, framework="pt") as tensors:
                merged = {}
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    base: Tensor = tensors.get_tensor(name)
                    merged[name] = trained[name].to(base.dtype) if name in trained else base
                save_file(merged, staging / shard.name, metadata={"format": "pt"})


def _copy_sidecars(base_model: Path, folder: Path) -> None:
    """Configuration and tokenizer."""
    for path in base_model.iterdir():
        if path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _number(folder: Path) -> int:
    match = re.fullmatch(r"v(\d+)", folder.name)
    return int(match[1]) if match else -1
