"""Values of fake integers: lengths, indices and masks that came from the CPU stay known, so that shapes are right.

integers that the trainer copies to `gpu`      keep their values, through operations on known integers
experts that a router chooses                  are balanced: the choices go round all experts
integers that ranks exchange                   are those that this rank sends, since experts are balanced
a mask that is not known                       is true everywhere
a number that is not known                     is 0, and true as a truth value
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

MOST = 2**24
"""Elements of the largest tensor whose values are kept."""
VALUE = "_agentrl_value"
"""The attribute of a fake tensor that holds its values."""
aten = torch.ops.aten


def _counted(values: Tensor, *bins: Any, **limits: Any) -> Tensor:
    """histc, which a CPU has for floating-point numbers only."""
    return torch.histc(values.double(), *bins, **limits).to(values.dtype)


OTHERWISE = {aten.histc.default: _counted}
"""Operations that a CPU computes in another way than a GPU."""


class FakeValues:
    """Knows the values of fake tensors. `fake` makes them."""

    def __init__(self, fake: FakeTensorMode, device: torch.device) -> None:
        self._fake, self._device = fake, device
        self._unknown = torch.utils.weak.WeakIdKeyDictionary()
        """Storages of values that an unknown tensor has overwritten."""

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, on the CPU; None when they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value: Tensor | None = getattr(tensor, VALUE, None)
        if value is None or value.untyped_storage() in self._unknown:
            return None
        return value

    def number(self, tensor: Tensor) -> Any:
        """The Python number of a tensor with one element."""
        value = self.of(tensor)
        return self._guess(tensor).item() if value is None else value.item()

    def copied(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The tensor on the CPU, in `dtype`."""
        value = self.of(tensor)
        return (self._guess(tensor) if value is None else value.clone()).to(dtype or tensor.dtype)

    def moved(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The CPU's tensor on `gpu`, in `dtype`."""
        dtype = dtype or tensor.dtype
        with self._fake:
            moved = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=self._device)
        if not dtype.is_floating_point and tensor.numel() <= MOST:
            setattr(moved, VALUE, tensor.to(dtype, copy=True))
        return moved

    def known_indices(self, args: Any) -> Any:
        """The arguments of an indexing operation, with the places of true values instead of masks."""
        source, indices, *others = args
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            else:
                value = self.of(index)
                places = (self._guess(index) if value is None else value).nonzero(as_tuple=True)
                found += [self.made(place) for place in places] if isinstance(index, FakeTensor) else places
        return (source, found, *others)

    def made(self, value: Tensor) -> Tensor:
        """A fake tensor of these values."""
        with self._fake:
            tensor = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self._device)
        setattr(tensor, VALUE, value)
        return tensor

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the values of an operation's result too, if they are integers and all arguments are known."""
        if func in (aten.topk.default, aten.sort.default, aten.sort.stable) and self.of(args[0]) is None:
            at = 2 if func is aten.topk.default else 1  # of `dim` among the arguments
            size = args[0].shape[args[at] if len(args) > at else kwargs.get("dim", -1)]
            index = result[1]
            setattr(index, VALUE, (torch.arange(index.numel()) % size).view(index.shape))
            return
        if func is torch.ops.c10d.alltoall_base_.default:
            received, sent = args[:2]
            if (value := self.of(sent)) is not None and not sent.dtype.is_floating_point:
                setattr(received, VALUE, value.clone().view(received.shape))
            return
        written = [
            a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
        ]
        results = [t for t in tree_leaves(result) if isinstance(t, FakeTensor)]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.dtype.is_floating_point or t.numel() > MOST for t in results) or not results:
            return
        if any(self.of(t) is None for t in inputs):
            for tensor in written:
                if isinstance(value := getattr(tensor, VALUE, None), Tensor):
                    self._unknown[value.untyped_storage()] = True
            return
        args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        values = tree_leaves(OTHERWISE.get(func, func)(*args, **kwargs))
        for tensor, value in zip(tree_leaves(result), values, strict=True):
            if isinstance(tensor, FakeTensor) and isinstance(value, Tensor):
                setattr(tensor, VALUE, value)

    @staticmethod
    def _guess(tensor: Tensor) -> Tensor:
        return (torch.ones if tensor.dtype == torch.bool else torch.zeros)(tensor.shape, dtype=tensor.dtype)
