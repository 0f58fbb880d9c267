"""Loads a Hugging Face folder into a sharded model. No rank holds the whole model in memory.

    build    the model on the meta device: names and shapes without memory; computes the buffers that no file holds
             (then fully_shard decides which part of each tensor this rank owns)
    fill     allocates those parts and reads them from the safetensors files, tensor by tensor

Where files hold the tensors of a parameter one by one (tensor_naming.py), a rank reads those of its own part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.errors import ModelFolderError
from agentrl.trainer.attention import tree_attention
from agentrl.trainer.models import tensor_naming
from agentrl.trainer.models.rank_parts import read
from agentrl.trainer.models.tensor_files import files_of, opened
from agentrl.trainer.models.tensor_naming import Names

SHOWN = 3
"""How many names an error message shows."""


def build(folder: Path) -> tuple[Any, Names]:
    """The causal LM of `folder/config.json`, and the map from the names in the folder's files to its tensors.

    The LM is float32, with parameters on the meta device and buffers on the CPU. Raises ModelFolderError when the
    folder's files lack a tensor or hold an unexpected one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tree_attention.register()
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"model folder {folder} has no config.json")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names = _checked_names(lm, folder)
    _compute_buffers(lm)
    return lm, names


def fill(root: nn.Module, lm: Any, folder: Path, names: Names, device: torch.device, computes: torch.device) -> None:
    """Allocate the meta parameters of `root` on `device`, and read those of `lm`, inside it, from the folder.

    Tensors that have memory already (a new head, computed buffers) move to the device `computes`; parameters that FSDP
    shards stay where it has put them. Tensors of `lm` that are not in `root`, or that were added since it was built,
    keep their values. Raises ModelFolderError when a tensor has another shape than the model, or differs from one that
    it is tied to.
    """
    shared = _shared_names(lm)

    def placed(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=device)
        return tensor if isinstance(tensor, DTensor) else tensor.to(computes)

    root._apply(placed)  # type: ignore[no-untyped-call]
    for module in root.modules():
        for name, value in vars(module).items():
            if (
                isinstance(value, Tensor) and not value.is_meta
            ):  # neither parameter nor buffer: PyTorch does not move it
                setattr(module, name, value.to(computes))
    _tie(lm, shared)
    parameters = {stored_name(first): lm.get_parameter(first) for first, *_ in shared}
    targets = {name: tensor for name, tensor in (parameters | _stored_buffers(lm)).items() if not tensor.is_meta}
    read(files_of(folder), names, targets, str(folder))


def _compute_buffers(lm: Any) -> None:
    """Compute rotary frequencies and the like by transformers' own initialization, which skips the parameters here."""
    for parameter in lm.parameters():
        parameter._is_hf_initialized = True  # transformers has no public way to skip a parameter
    for module in lm.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    lm.initialize_weights()


def _shared_names(lm: nn.Module) -> list[list[str]]:
    """The names of each meta parameter. A tied parameter has more than one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            names.setdefault(parameter, []).append(name)
    return list(names.values())


def stored_name(name: str) -> str:
    """The name in a file of a parameter that may have an adapter beside it."""
    return name.replace(".base_layer.", ".")


def _tie(lm: nn.Module, shared: list[list[str]]) -> None:
    """Tie parameters again: put the first of each group under all of its names."""
    for first, *others in shared:
        for other in others:
            parent, _, leaf = other.rpartition(".")
            setattr(lm.get_submodule(parent), leaf, lm.get_parameter(first))


def _stored_buffers(lm: nn.Module) -> dict[str, Tensor]:
    """The buffers that files hold. The other buffers are computed."""
    held = lm.state_dict().keys()
    return {name: buffer for name, buffer in lm.named_buffers() if name in held}


def known_names(lm: Any) -> dict[str, str]:
    """Map each name of a parameter or stored buffer to the tensor's own name, which tied parameters share."""
    names: dict[Tensor, str] = {}
    tensors = dict(lm.named_parameters(remove_duplicate=False)) | _stored_buffers(lm)
    return {stored_name(name): names.setdefault(tensor, stored_name(name)) for name, tensor in tensors.items()}


def given(names: Names, files: Mapping[str, Path]) -> set[str]:
    """The names of the model's tensors that the files hold, and the names in the files that the model does not have."""
    with opened(files) as open_slice:

        def shape_only(name: str) -> Tensor:
            return torch.empty(open_slice(name).get_shape(), device="meta")

        made = {name for fused in names.fused for name in fused.made(shape_only)}
    return made | set(names.plain.values())


def _checked_names(lm: Any, folder: Path) -> Names:
    """Map the folder's tensors to the model's. Raises ModelFolderError for missing or unexpected tensors."""
    files, known = files_of(folder), known_names(lm)
    names = tensor_naming.match(lm, files, known)
    missing = sorted(set(known.values()) - given(names, files))
    computed = {name.rpartition(".")[2] for name, _ in lm.named_buffers() if name not in known}
    ignored = lm._keys_to_ignore_on_load_unexpected or ()
    unexpected = [
        stored_as
        for stored_as, name in sorted(names.plain.items())
        if name not in known
        and name.rpartition(".")[2] not in computed
        and not any(re.search(pattern, name) for pattern in ignored)
    ]
    wrong = [f"{what} {some(names)}" for what, names in (("without", missing), ("with", unexpected)) if names]
    if wrong:
        raise ModelFolderError(f"model folder {folder}: {type(lm).__name__} {' and '.join(wrong)}")
    return names


def some(names: list[str]) -> str:
    """The first names of a list, and how many more it has."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
