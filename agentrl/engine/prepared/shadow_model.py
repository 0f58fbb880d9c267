"""A second set of a model's tensors, into which its own `load_weights` can load while the first set is in use.

    live:    module ── Parameter ── storage A            exchange(): the storages change places, or on a GPU,
    shadow:  module ── Parameter ── storage B            where graphs hold addresses, B is copied into A

The shadow has the live model's structure: modules of the same classes, tied parameters tied, views of one storage views
of one storage, weight loaders bound to its own modules. All else (configurations, process groups, kernels) is shared.
Imported inside SGLang's scheduler only; imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

CHUNK_BYTES = 16 << 20
"""Bytes that are copied or compared between two calls of a pace."""
HOST = torch.device("cpu")
COPY = "packed_weight"
"""The attribute of a layer with a second copy of its weights in a kernel's layout, or None."""
CONTAINERS = (dict, list, tuple, set)
Live = TypeVar("Live", bound=nn.Module)
Pace = Callable[[], None]
"""Called between pieces of work. Rests, so that decoding goes on, and raises to end the work."""


class UnlikeTensors(ValueError):
    """The shadow's tensors cannot take the place of the live ones."""


class Shadow(Generic[Live]):
    """The second set of tensors of a live model, on `device`. `model` is the structure to load into."""

    def __init__(self, live: Live, device: torch.device = HOST, *, pinned: bool = False) -> None:
        self._live = live
        self.device = device
        self.model: Live = _Copier(device, pinned).copy(live)
        self._exchanged: list[list[tuple[Tensor, Tensor]]] = []  # (live, shadow), by the storage of the live one

    def refresh(self, pace: Pace) -> None:
        """Copy the live values: a version that lacks a tensor keeps the live one."""
        shadows = reachable(self.model)
        for name, tensor in _one_per_storage(reachable(self._live)).items():
            if name in shadows:
                _copy_storage(shadows[name], tensor, pace)

    def check(self, pace: Pace) -> None:
        """Decide what `exchange` exchanges: the storages of parameters, and others that the load has changed.

        Raises UnlikeTensors when a tensor has no counterpart of its shape, type and strides.
        """
        live, shadow = reachable(self._live), reachable(self.model)
        if live.keys() != shadow.keys():
            raise UnlikeTensors(f"loading made or removed tensors: {sorted(live.keys() ^ shadow.keys())[:3]}")
        chosen: set[int] = set()
        for name, tensor in live.items():
            if _form(tensor) != _form(shadow[name]):
                raise UnlikeTensors(f"{name} is {_form(shadow[name])} after loading, but {_form(tensor)} in use")
            if isinstance(tensor, nn.Parameter) or not _equal(tensor, shadow[name]):
                chosen.add(_address(tensor))
            pace()
        if {_address(tensor) for tensor in live.values()} & {_address(other) for other in shadow.values()} - {0}:
            raise UnlikeTensors("loading made tensors that share memory with those in use")
        groups: dict[int, list[tuple[Tensor, Tensor]]] = {address: [] for address in chosen - {0}}
        for name, tensor in live.items():
            if _address(tensor) in groups:
                groups[_address(tensor)].append((tensor, shadow[name]))
        self._exchanged = list(groups.values())

    def exchange(self) -> None:
        """Make the loaded values those in use. Takes about a millisecond, or a copy from host memory to the GPU.

        Values are copied on a GPU, whose graphs hold addresses, and where something outside the model refers to a
        storage.
        """
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # a batch may still be computed, on another stream
        copied: list[tuple[Tensor, Tensor]] = []
        for pairs in self._exchanged:
            if pairs[0][0].device.type != "cpu" or _has_other_users(pairs):
                copied += pairs
            else:
                for tensor, other in pairs:
                    tensor.data, other.data = other.data, tensor.data
        if copied:
            with torch.no_grad():
                torch._foreach_copy_([t for t, _ in copied], [other for _, other in copied], non_blocking=True)
        for module, its_shadow in zip(self._live.modules(), self.model.modules(), strict=True):
            copies = getattr(module, COPY, None), getattr(its_shadow, COPY, None)
            if copies != (None, None):  # a copy of the old weights must not stay, even where the shadow has none
                setattr(module, COPY, copies[1])
                setattr(its_shadow, COPY, copies[0])
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


def reachable(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that the model's modules refer to, by path: parameters and buffers first, then other attributes."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    modules = list(model.named_modules())
    for path, module in modules:
        for held in (module._parameters, module._buffers):
            _collect(held, path, found, seen)
    for path, module in modules:
        for name, value in vars(module).items():
            if name not in _REGISTRIES:
                _collect(value, f"{path}.{name}", found, seen)
    return found


def storage_bytes(tensors: dict[str, Tensor]) -> int:
    """The size of the storages behind tensors."""
    return sum(tensor.untyped_storage().nbytes() for tensor in _one_per_storage(tensors).values())


def fingerprint(model: nn.Module, pace: Pace) -> list[int]:
    """Sums over the bits of the model's parameters, by which an accidental change is noticed."""
    sums = []
    for tensor in model.parameters():
        for piece in _pieces(tensor):
            whole = piece[: len(piece) // 8 * 8].view(torch.int64)
            sums.append(int(whole.sum()) + int(piece[len(whole) * 8 :].sum()))
            pace()
    return sums


_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


def _collect(value: Any, path: str, found: dict[str, Tensor], seen: set[int]) -> None:
    if not isinstance(value, (Tensor, *CONTAINERS)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        found[path] = value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        _collect(item, f"{path}.{key}", found, seen)


class _Copier:
    """Copies modules, their tensors and what refers to them; everything else is shared."""

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self._device = device
        self._pinned = pinned
        self._made: dict[int, Any] = {}
        self._originals: list[Any] = []  # keeps ids in use
        self._storages: dict[int, torch.UntypedStorage] = {}  # by the address of the live storage

    def copy(self, value: Any) -> Any:
        """The counterpart of a value in the shadow."""
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            return self._remember(value, self._tensor(value))
        if isinstance(value, MethodType) and isinstance(value.__self__, (nn.Module, Tensor)):
            return MethodType(value.__func__, self.copy(value.__self__))
        if isinstance(value, functools.partial):
            arguments = [self.copy(item) for item in value.args]
            named = {name: self.copy(item) for name, item in value.keywords.items()}
            return functools.partial(self.copy(value.func), *arguments, **named)
        return self._container(value) if isinstance(value, CONTAINERS) else value

    def _remember(self, value: Any, made: Any) -> Any:
        self._originals.append(value)
        self._made[id(value)] = made
        return made

    def _module(self, module: nn.Module) -> nn.Module:
        made: nn.Module = self._remember(module, module.__class__.__new__(module.__class__))
        vars(made).update({name: self.copy(value) for name, value in vars(module).items()})
        return made

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            made = self._remember(value, _empty_like(value))
            dict.update(made, {key: self.copy(item) for key, item in value.items()})
            return made
        if type(value) is list:
            made = self._remember(value, [])
            made.extend(self.copy(item) for item in value)
            return made
        items = [self.copy(item) for item in value]
        if all(item is was for item, was in zip(items, value, strict=True)):
            return value if isinstance(value, tuple) else type(value)(value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return tensor
        made = torch.empty(0, dtype=tensor.dtype, device=self._beside(tensor))
        made.set_(self._storage(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())
        if type(tensor) is not Tensor:
            made = Tensor._make_subclass(type(tensor), made, False)
            vars(made).update({name: self.copy(value) for name, value in vars(tensor).items()})
        return made

    def _beside(self, tensor: Tensor) -> torch.device:
        """Where its counterpart is: tensors on the CPU exchange storages, so theirs are there too."""
        return HOST if tensor.device.type == "cpu" else self._device

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        live = tensor.untyped_storage()
        if live.data_ptr() not in self._storages:
            where = self._beside(tensor)
            empty = torch.empty(live.nbytes(), dtype=torch.uint8, device=where, pin_memory=self._pinned)
            self._storages[live.data_ptr()] = empty.untyped_storage()
        return self._storages[live.data_ptr()]


def _empty_like(value: dict[Any, Any]) -> Any:
    """An empty dictionary of the same kind, with its default."""
    made = value.copy()
    made.clear()
    return made


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.size(), tensor.stride()


def _address(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for an empty one."""
    return tensor.untyped_storage().data_ptr()


def _equal(tensor: Tensor, other: Tensor) -> bool:
    return torch.equal(tensor, other.to(tensor.device))


def _has_other_users(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether something else than these live tensors, which share a storage, refers to it."""
    storage = pairs[0][0].untyped_storage()  # one reference more
    return torch._C._storage_Use_Count(storage._cdata) > len(pairs) + 1


def _one_per_storage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first tensor of each storage."""
    first = {_address(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensors[name] for address, name in first.items() if address}


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor's storage, in pieces."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    for start in range(0, len(whole), CHUNK_BYTES):
        yield whole[start : start + CHUNK_BYTES]


def _copy_storage(target: Tensor, source: Tensor, pace: Pace) -> None:
    """Copy the whole storage behind a tensor."""
    for into, piece in zip(_pieces(target), _pieces(source), strict=True):
        into.copy_(piece)
        pace()
