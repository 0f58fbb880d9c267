"""Counts what makes the CPU wait for a GPU: numbers read from tensors, and operations whose shape depends on values."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
BY_VALUE = {
    ATEN._local_scalar_dense.default,
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN._unique2.default,
    ATEN.repeat_interleave.Tensor,
    ATEN.equal.default,
}
"""Operations that wait for a device."""
METHODS = ("cpu", "tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__")
"""Methods that do; on a CPU some of them run no operation."""


class _Watched(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func in (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default) else ()
        if func in BY_VALUE or any(index is not None and index.dtype == torch.bool for index in indices):
            self._note(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yields the waits of the block: what waits, and the line that calls it."""
    found: list[str] = []

    def note(what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/trainer/" in f.filename or "/transformers/" in f.filename]
        where = [f for f in frames if "/tests/" not in f.filename]
        found.append(f"{what} at {where[-1].filename}:{where[-1].lineno}" if where else what)

    def noted(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note(name)
            return original(self, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(patch.object(torch.Tensor, name, noted(name)))
        stack.enter_context(_Watched(note))
        yield found
