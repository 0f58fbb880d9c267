"""Where each tensor of a checkpoint is in a model's memory, so that others of its name and shape can be put there.

A model's own loader says it: while it loads the base weights, every copy from a tensor of the checkpoint into a
parameter is recorded. So fused matrices, padded vocabularies and shards of a rank need no rules of ours. A tensor that
the loader converts on its way has no place, and a model with one cannot be changed in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DIGEST_CHARACTERS = 16
"""How much of a SHA-256, in hexadecimal, is reported."""
UNUSED = ("lm_head.weight", "rotary_emb.inv_freq")
"""How names end that a loader may leave out: a tied head, and what it computes."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a checkpoint's tensor, and where it is in the model."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, from the tensor's first
    target: torch.Tensor


@dataclass(slots=True)
class Held:
    """A tensor of the checkpoint."""

    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)
    problem: str | None = None  # why it cannot be put in place


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the copies into a model's parameters while it is active. `beginning` names the tensor that comes next."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: dict[str, Held] = {}
        self._storages = storages_of(model)
        self._current: tuple[Held, torch.Tensor] | None = None

    def beginning(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors on to the loader, one after another."""
        for name, tensor in tensors:
            self._current = self.held.setdefault(name, Held(tuple(tensor.shape))), tensor
            yield name, tensor
        self._current = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a copy, and run the operation."""
        if func is torch.ops.aten.copy_.default and self._current is not None:
            self._record(*self._current, target=args[0], source=args[1])
        return func(*args, **(kwargs or {}))

    def _record(self, held: Held, tensor: torch.Tensor, *, target: torch.Tensor, source: torch.Tensor) -> None:
        if _storage(target) not in self._storages:
            return
        if _storage(source) != _storage(tensor) or not tensor.is_contiguous():
            held.problem = "its loader converts it"
            return
        offset = int(source.storage_offset() - tensor.storage_offset())
        held.parts.append(Part(tuple(source.shape), tuple(source.stride()), offset, target.detach()))


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The tensors of a model's checkpoint in its memory."""

    held: Mapping[str, Held]

    @classmethod
    def of(cls, recorder: Recorder, model: torch.nn.Module) -> HeldWeights:
        """What was recorded, of a model that is ready to compute."""
        live = storages_of(model)
        for one in recorder.held.values():
            if any(_storage(part.target) not in live for part in one.parts):
                one.problem, one.parts = "the server computes with a converted copy of it", []
        return cls(recorder.held)

    def problem(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Why tensors of these shapes cannot take the place of those in memory; None if they can."""
        if not shapes:
            return "it has no tensors"
        for name, shape in shapes.items():
            held = self.held.get(name)
            if held is None:
                return f"the model has no tensor {name}"
            if shape != held.shape:
                return f"{name} has shape {list(shape)}, the model's has {list(held.shape)}"
            if held.problem is not None:
                return f"{name} cannot be changed in place: {held.problem}"
            if not held.parts and not name.endswith(UNUSED):
                return f"{name} has no place of its own in the model"
        return None

    @torch.no_grad()
    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor, of which `problem` finds none, to its places."""
        whole = tensor.contiguous()
        for part in self.held[name].parts:
            part.target.copy_(_cut(whole, part))

    def differing(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the model has other values of a tensor."""
        whole = tensor.contiguous()
        pairs = [(part.target, _cut(whole, part)) for part in self.held[name].parts]
        return any(not torch.equal(target, cut.to(target.device, target.dtype)) for target, cut in pairs)

    def digests(self, model: torch.nn.Module) -> dict[str, str]:
        """Digests of what is in memory, by the checkpoint's names, and by the model's own names for its parameters."""
        own = model.named_parameters()
        found = {name.replace(".base_layer.", "."): _digest(parameter) for name, parameter in own}
        for name, held in self.held.items():
            if (parts := _in_order(held)) is not None:
                found[name] = _digest(*(part.target for part in parts))
        return found


def storages_of(model: torch.nn.Module) -> set[int]:
    """The addresses of the memory that a model's parameters and buffers have."""
    return {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _cut(whole: torch.Tensor, part: Part) -> torch.Tensor:
    return whole.as_strided(part.size, part.stride, whole.storage_offset() + part.offset)


def _in_order(held: Held) -> list[Part] | None:
    """The parts that follow one another in the checkpoint's tensor; None if they are something else."""
    parts, end = sorted(held.parts, key=lambda part: part.offset), None
    for part in parts:
        if (end is not None and part.offset != end) or not _is_contiguous(part):
            return None
        end = part.offset + torch.Size(part.size).numel()
    return parts or None


def _is_contiguous(part: Part) -> bool:
    expected = 1
    for size, stride in zip(reversed(part.size), reversed(part.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _digest(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:DIGEST_CHARACTERS]
