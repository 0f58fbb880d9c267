"""Counts the memory of a device by what it holds, and keeps the peak of each part of a step.

A storage counts from the operation that makes it until nothing refers to it. FSDP also resizes storages in place.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


class Holds(StrEnum):
    """The contents of a storage."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    MOMENTS = "moments"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    GATHERED = "gathered"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory of a part of a step: bytes by what they hold at that moment."""

    held: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of all together."""
        return sum(self.held.values())


class MemoryTrace:
    """The live storages of one device."""

    def __init__(self) -> None:
        self.peaks: dict[str, Peak] = {}
        self.default: Holds | None = Holds.PARAMETERS  # what all new storages hold, where it is known
        self._shapes: set[torch.Size] = set()
        self._vocabulary = 0
        self._live: Counter[str] = Counter()
        self._sizes: dict[int, tuple[int, Holds]] = {}  # by id of the storage
        self._part = ""

    @property
    def total(self) -> int:
        """Bytes now."""
        return sum(self._live.values())

    def peak_now(self) -> Peak:
        """What is held now."""
        return Peak({what: size for what, size in self._live.items() if size})

    def learn(self, vocabulary: int, parameters: Iterable[Tensor]) -> None:
        """Tell logits and gradients from now on: a matrix as wide as the vocabulary holds logits, and a tensor of a
        parameter's shape that a backward pass makes is a gradient.
        """
        tensors = list(parameters)
        self.holds(tensors, Holds.PARAMETERS)
        self._vocabulary, self.default = vocabulary, None
        self._shapes = {shape for t in tensors for shape in (t.shape, local_of(t).shape) if len(shape) > 1}

    def enter(self, part: str) -> None:
        """From now on, peaks are those of `part`."""
        self._part = part
        self._note()

    def watch(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count the storages that an operation has made."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._add(tensor, self._guess(func, tensor))
        if func.namespace == "fsdp":
            self._of_fsdp(func, args, kwargs)
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self.holds(args[:2], Holds.GRADIENTS)
        self._note()

    def holds(self, tensors: Iterable[Any], what: Holds) -> None:
        """Say what the storages of some tensors hold."""
        for tensor in tensors:
            key = id(local_of(tensor).untyped_storage())
            if key in self._sizes:
                size, before = self._sizes[key]
                self._live[before] -= size
                self._live[what] += size
                self._sizes[key] = size, what

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Count changes of a storage's size until the block ends."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = original(storage, size)
            self._resized(storage)
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def _add(self, tensor: Tensor, what: Holds) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = size, what
            self._live[what] += size
            weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        size, what = self._sizes.pop(key)
        self._live[what] -= size

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (key := id(storage)) in self._sizes:
            before, what = self._sizes[key]
            self._live[what] += storage.nbytes() - before
            self._sizes[key] = storage.nbytes(), what
            self._note()

    def _of_fsdp(self, func: Any, args: Any, kwargs: Any) -> None:
        """FSDP's own operations gather weights and cut gradients."""
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if "chunk_cat" in func.name():
            self.holds(tree_leaves((given["tensors"], given["out"])), Holds.GRADIENTS)
        elif "split_with_sizes_copy" in func.name():
            self.holds(tree_leaves((given["all_gather_output"], given["out"])), Holds.GATHERED)
        elif "all_gather_copy_in" in func.name():
            self.holds([given["all_gather_output"]], Holds.GATHERED)

    def _guess(self, func: Any, tensor: Tensor) -> Holds:
        if self.default is not None:
            return self.default
        if self._vocabulary and tensor.dim() == 2 and tensor.shape[-1] == self._vocabulary:
            return Holds.LOGITS
        backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        if not backward:
            return Holds.ACTIVATIONS
        return Holds.GRADIENTS if tensor.shape in self._shapes else Holds.OTHER

    def _note(self) -> None:
        peak = self.peaks.get(self._part)
        if peak is None or self.total > peak.total:
            self.peaks[self._part] = self.peak_now()


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
