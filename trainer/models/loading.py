"""From a Hugging Face folder to a sharded model, without the whole of it in the memory of any rank.

build     on the meta device: names and shapes, no memory; only the buffers that no file holds are computed
          (then fully_shard decides which part of each tensor this rank owns)
fill      memory for those parts, and the parts from the safetensors files, tensor by tensor

Where files hold the tensors of a parameter one by one (tensor_naming.py), a rank reads those that its part is made of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from agentrl.errors import ModelFolderError
from agentrl.trainer.models import attention, tensor_naming
from agentrl.trainer.models.tensor_naming import Fused, Names

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 3
"""Names in a message."""


def build(folder: Path) -> tuple[Any, Names]:
    """The causal LM of `folder/config.json`, float32, parameters on the meta device, buffers on the CPU; and what the
    tensors of the folder's files are in it.

    Raises ModelFolderError when the folder's files lack a tensor or hold an unexpected one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"model folder {folder} has no config.json")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names = _checked_names(lm, folder)
    _compute_buffers(lm)
    return lm, names


def fill(root: nn.Module, lm: Any, folder: Path, names: Names, device: torch.device, computes: torch.device) -> None:
    """Give the meta parameters of `root` memory on `device`, and those of `lm` inside it the folder's weights.

    What has memory already (a new head, computed buffers) moves to the device that `computes`; parameters that FSDP
    shards stay where it has put them. What of `lm` is not in `root`, or was put there since it was built, keeps its
    values. Raises ModelFolderError when a tensor has another shape than the model, or differs from one that it is tied
    to.
    """
    shared = _shared_names(lm)

    def placed(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=device)
        return tensor if isinstance(tensor, DTensor) else tensor.to(computes)

    root._apply(placed)  # type: ignore[no-untyped-call]
    _tie(lm, shared)
    parameters = {stored_name(first): lm.get_parameter(first) for first, *_ in shared}
    targets = {name: tensor for name, tensor in (parameters | _stored_buffers(lm)).items() if not tensor.is_meta}
    read(_files(folder), names, targets, str(folder))


def read(files: Mapping[str, Path], names: Names, targets: Mapping[str, Tensor], what: str) -> None:
    """This rank's parts of `targets` from the files that hold tensors by the names in `names`.

    Raises ModelFolderError, which begins with `what`, when a tensor does not fit its target.
    """
    filled: set[Tensor] = set()
    for stored_as, source in _stored(files, {f for f, name in names.plain.items() if name in targets}):
        target = targets[names.plain[stored_as]]
        _read(source, target, f"{what}: {stored_as}", again=target in filled)
        filled.add(target)
    with _opened(files) as open_slice:
        for fused in names.fused:
            _make(fused, lambda name: open_slice(name)[...], targets, what)


def stored(folder: Path, names: Set[str]) -> Iterator[tuple[str, Any]]:
    """Those of the folder's tensors, as slices that read only what is asked of them, file by file."""
    yield from _stored(_files(folder), names)


def _stored(files: Mapping[str, Path], names: Set[str]) -> Iterator[tuple[str, Any]]:
    for path in sorted({path for name, path in files.items() if name in names}):
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
    return dict.fromkeys(tensor_names(folder / SINGLE), folder / SINGLE)


def tensor_names(path: Path) -> list[str]:
    """Of a safetensors file. Raises ModelFolderError when it cannot be read."""
    return [name for name, _ in _tensors(path)]


@contextmanager
def _opened(files: Mapping[str, Path]) -> Iterator[Callable[[str], Any]]:
    """A function from a tensor's name to a slice of it; files stay open until the end."""
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}

        def open_slice(name: str) -> Any:
            path = files[name]
            try:
                if path not in handles:
                    handles[path] = stack.enter_context(safe_open(path, framework="pt"))
                return handles[path].get_slice(name)
            except (OSError, SafetensorError) as error:
                raise ModelFolderError(f"{path} cannot be read: {error}") from error

        yield open_slice


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


def known_names(lm: Any) -> dict[str, str]:
    """Of parameters, and of buffers that files hold → what each goes by: of tied ones, the name of the first."""
    names: dict[Tensor, str] = {}
    tensors = dict(lm.named_parameters(remove_duplicate=False)) | _stored_buffers(lm)
    return {stored_name(name): names.setdefault(tensor, stored_name(name)) for name, tensor in tensors.items()}


def given(names: Names, files: Mapping[str, Path]) -> set[str]:
    """The model's tensors that the files hold; also names of files that are none."""
    with _opened(files) as open_slice:

        def shape_only(name: str) -> Tensor:
            return torch.empty(open_slice(name).get_shape(), device="meta")

        made = {name for fused in names.fused for name in fused.made(shape_only)}
    return made | set(names.plain.values())


def _checked_names(lm: Any, folder: Path) -> Names:
    files, known = _files(folder), known_names(lm)
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
    wrong = [f"{what} {_some(names)}" for what, names in (("without", missing), ("with", unexpected)) if names]
    if wrong:
        raise ModelFolderError(f"model folder {folder}: {type(lm).__name__} {' and '.join(wrong)}")
    return names


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@torch.no_grad()
def _read(source: Any, target: Tensor, what: str, *, again: bool) -> None:
    """This rank's part of `source` into `target`; with `again` it is there already and must be the same."""
    _check_shape(tuple(source.get_shape()), target, what)
    local, part = owned(target)
    if not local.numel():
        return
    if not again:
        local.copy_(source[part])
    elif not torch.equal(local, source[part].to(local)):
        raise ModelFolderError(f"{what} differs from the tensor that the model ties it to")


@torch.no_grad()
def _make(fused: Fused, whole: Callable[[str], Tensor], targets: Mapping[str, Tensor], what: str) -> None:
    """This rank's parts of the parameters that tensors of the files make up."""
    if fused.first in targets and fused.stacked:
        target = targets[fused.first]
        local, part = owned(target)
        lengths = {len(names) for names in fused.parts.values()}
        if lengths != {len(target)}:
            raise ModelFolderError(f"{what}: {fused.first} is {len(target)} tensors, not {sorted(lengths)[0]}")
        if local.numel():
            made = fused.made(whole, part[0])[fused.first]
            _check_shape((len(target), *made.shape[1:]), target, f"{what}: {fused.first}")
            local.copy_(made[(slice(None), *part[1:])])
        return
    for name, made in fused.made(whole).items():
        if name in targets:
            _check_shape(tuple(made.shape), targets[name], f"{what}: {name}")
            local, part = owned(targets[name])
            local.copy_(made[part])


def _check_shape(shape: tuple[int, ...], target: Tensor, what: str) -> None:
    if shape != tuple(target.shape):
        raise ModelFolderError(f"{what} has shape {shape}, the model has {tuple(target.shape)}")


def owned(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a tensor, and where in the whole it lies."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
