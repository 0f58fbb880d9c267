"""Measures memory: the bytes of all storages on the CPU that operations make, as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is entered, `peak` is the largest number of bytes alive at once, `held` and later tensors included."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._alive = weakref.WeakSet[torch.UntypedStorage]()
        self.peak = 0
        for tensor in held:
            self._alive.add((tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage())
        self._original = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        resize = lambda storage, size: self._after(self._original(storage, size))  # noqa: E731
        torch.UntypedStorage.resize_ = resize  # type: ignore
        self._measure()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._original  # type: ignore
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._alive.add(tensor.untyped_storage())
        return self._after(result)

    def _after(self, result: Any) -> Any:
        self._measure()
        return result

    def _measure(self) -> None:
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive))
