"""The part of each tensor that this rank owns: where it lies in the whole, and how it is read from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from agentrl.errors import ModelFolderError
from agentrl.trainer.models.tensor_files import opened, stored_in
from agentrl.trainer.models.tensor_naming import Fused, Names


def read(files: Mapping[str, Path], names: Names, targets: Mapping[str, Tensor], what: str) -> None:
    """Read this rank's parts of `targets` from `files`; `names` says which tensors of the files they are.

    Raises ModelFolderError, which begins with `what`, when a tensor does not fit its target.
    """
    filled: set[Tensor] = set()
    for stored_as, source in stored_in(files, {f for f, name in names.plain.items() if name in targets}):
        target = targets[names.plain[stored_as]]
        _read(source, target, f"{what}: {stored_as}", again=target in filled)
        filled.add(target)
    with opened(files) as open_slice:
        for fused in names.fused:
            _make(fused, lambda name: open_slice(name)[...], targets, what)


@torch.no_grad()
def _read(source: Any, target: Tensor, what: str, *, again: bool) -> None:
    """Copy this rank's part of `source` into `target`. With `again` the part is there already and must be the same."""
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
    """Copy this rank's parts of parameters that several tensors of the files make up."""
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
