"""From a Hugging Face folder to a sharded model, without the whole of it in the memory of any rank.

build     on the meta device: names and shapes, no memory; only the buffers that no file holds are computed
          (then fully_shard decides which rows of each tensor this rank owns)
fill      memory for those rows, and the rows from the safetensors files, tensor by tensor
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from agentrl.errors import ModelFolderError
from agentrl.trainer import attention

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 3
"""Names in a message."""


def build(folder: Path) -> Any:
    """The causal LM of `folder/config.json`, float32, parameters on the meta device, buffers on the CPU.

    Raises ModelFolderError when the folder's files lack a tensor or hold an unexpected one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"model folder {folder} has no config.json")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
    _check_names(lm, folder)
    _compute_buffers(lm)
    return lm


def fill(root: nn.Module, lm: Any, folder: Path, device: torch.device) -> None:
    """Give the meta parameters of `root` memory on `device`, and those of `lm` inside it the folder's weights.

    What of `lm` is not in `root`, or was put there since it was built, is left alone. Raises ModelFolderError when a
    tensor has another shape than the model, or differs from one that it is tied to.
    """
    shared = _shared_names(lm)
    root._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )
    _tie(lm, shared)
    parameters = {stored_name(name): lm.get_parameter(names[0]) for names in shared for name in names}
    targets = {name: tensor for name, tensor in (parameters | _stored_buffers(lm)).items() if not tensor.is_meta}
    filled: set[Tensor] = set()
    for name, source in stored(folder, targets.keys()):
        _read(source, targets[name], f"{folder}: {name}", again=targets[name] in filled)
        filled.add(targets[name])


def stored(folder: Path, names: Set[str]) -> Iterator[tuple[str, Any]]:
    """Those of the folder's tensors, as slices that read only what is asked of them, file by file."""
    files = _files(folder)
    for path in sorted(set(files.values())):
        yield from _tensors(path, [name for name, file in files.items() if file == path and name in names])


def _compute_buffers(lm: Any) -> None:
    """Rotary frequencies and the like: transformers' own initialisation, with the parameters exempt from it."""
    for parameter in lm.parameters():
        parameter._is_hf_initialized = True
    for module in lm.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    lm.initialize_weights()


def _shared_names(lm: nn.Module) -> list[list[str]]:
    """The names of each meta parameter: more than one where weights are tied."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            names.setdefault(parameter, []).append(name)
    return list(names.values())


def stored_name(name: str) -> str:
    """In a file, of a parameter that has an adapter beside it."""
    return name.replace(".base_layer.", ".")


def _tie(lm: nn.Module, shared: list[list[str]]) -> None:
    """One parameter under all of its names again."""
    for first, *others in shared:
        for other in others:
            parent, _, leaf = other.rpartition(".")
            setattr(lm.get_submodule(parent), leaf, lm.get_parameter(first))


def _files(folder: Path) -> dict[str, Path]:
    """Where each tensor is."""
    if (folder / INDEX).is_file():
        return {name: folder / file for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()}
    if not (folder / SINGLE).is_file():
        raise ModelFolderError(f"model folder {folder} has neither {SINGLE} nor {INDEX}")
    return {name: folder / SINGLE for name, _ in _tensors(folder / SINGLE)}


def _tensors(path: Path, names: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
    """The named tensors of a file, or all, as slices that read only what is asked of them."""
    try:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys() if names is None else names:
                yield name, tensors.get_slice(name)
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error


def _stored_buffers(lm: nn.Module) -> dict[str, Tensor]:
    """Buffers that files hold; the others are computed."""
    held = lm.state_dict().keys()
    return {name: buffer for name, buffer in lm.named_buffers() if name in held}


def _check_names(lm: Any, folder: Path) -> None:
    files, shared, buffers = _files(folder), _shared_names(lm), _stored_buffers(lm)
    known = {name for names in shared for name in names} | buffers.keys()
    computed = {name.rpartition(".")[2] for name, _ in lm.named_buffers() if name not in buffers}
    ignored = lm._keys_to_ignore_on_load_unexpected or ()
    missing = [names[0] for names in shared if files.keys().isdisjoint(names)] + sorted(buffers.keys() - files.keys())
    unexpected = [
        name
        for name in sorted(files.keys() - known)
        if name.rpartition(".")[2] not in computed and not any(re.search(pattern, name) for pattern in ignored)
    ]
    wrong = [f"{what} {_some(names)}" for what, names in (("without", missing), ("with", unexpected)) if names]
    if wrong:
        raise ModelFolderError(f"model folder {folder}: {type(lm).__name__} {' and '.join(wrong)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@torch.no_grad()
def _read(source: Any, target: Tensor, what: str, *, again: bool) -> None:
    """This rank's part of `source` into `target`; with `again` it is there already and must be the same."""
    if tuple(source.get_shape()) != tuple(target.shape):
        raise ModelFolderError(f"{what} has shape {tuple(source.get_shape())}, the model has {tuple(target.shape)}")
    local, part = owned(target)
    if not local.numel():
        return
    if not again:
        local.copy_(source[part])
    elif not torch.equal(local, source[part].to(local)):
        raise ModelFolderError(f"{what} differs from the tensor that the model ties it to")


def owned(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a tensor, and where in the whole it lies."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
