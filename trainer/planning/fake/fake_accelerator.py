"""The fake accelerator: a device `gpu` whose tensors have shapes and no memory, and a process group without a network.

    tensors on `gpu`      fake: every operation gives the shape, type and device that a GPU would give
    tensors on the CPU    real; an operation that mixes both devices fails, as on a GPU
    collectives           return at once, as if all ranks had the same tensors

The trainer's own code runs on it unchanged, so tensors on the wrong device are found without a GPU, and the memory of a
step is measured without having it. fake_values.py says which values are known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_leaves

from agentrl.errors import MisplacedTensor
from agentrl.trainer import distributed
from agentrl.trainer.distributed import World
from agentrl.trainer.parallel.mesh import make_mesh
from agentrl.trainer.planning.fake import flash_kernel
from agentrl.trainer.planning.fake.device_guard import load_guard
from agentrl.trainer.planning.fake.fake_values import FakeValues
from agentrl.trainer.planning.fake.gpu_module import gpu_module

ROOT = Path(distributed.__file__).resolve().parent
MIXED = ("found two different devices", "found at least two devices")
"""Parts of torch's messages when tensors of two devices meet."""
NAME = "gpu"
"""The name of the device."""
aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor)


@cache
def register() -> torch.device:
    """Register the device with torch, once in a process. Raises UserError without a C++ compiler."""
    import torch.distributed._tools.fake_collectives
    from torch.testing._internal.distributed import fake_pg
    from torch.utils import backend_registration as registration

    load_guard()
    registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, gpu_module())  # type: ignore[no-untyped-call]
    registration.generate_methods_for_privateuse1_backend()
    torch._C._acc.register_python_privateuseone_hook(registration._DummyPrivateUse1Hook())
    flash_kernel.register()
    dist.Backend.register_backend("fake_gpu", fake_pg._create_fake_pg, extended_api=True, devices=["cpu", NAME])
    return torch.device(NAME, 0)


class FakeAccelerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, tensors on `gpu` are fake.

    `watch`, if given, is called after each operation on fake tensors with the operation, its arguments and its result.
    """

    def __init__(self, watch: Callable[[Any, Any, Any, Any], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = register()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._values = FakeValues(self._fake, self.device)
        self._watch = watch
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Self:
        """Enter, and replace the few of torch's functions that would look inside a fake tensor."""
        stack = ExitStack()
        self._entered.append(stack)
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes its tensor on the CPU, and then copies it
        stack.enter_context(_replaced(_fsdp_init, "_move_states_to_device", self._move_to_device))
        meta = ShardingPropagator._propagate_tensor_meta_non_cached
        stack.enter_context(_replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", self._unwatched(meta)))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        """Leave."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def _unwatched(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """DTensor learns shapes of whole tensors from fake ones, which are not the device's."""

        def unwatched(*args: Any) -> Any:
            watch, self._watch = self._watch, None
            try:
                return compute(*args)
            finally:
                self._watch = watch

        return unwatched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with fake tensors if an argument is one or the result is on `gpu`, else with real ones."""
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls its local tensors' operation
        if func is aten._pin_memory.default:
            return args[0]
        if not (tree_any(_is_fake, (args, kwargs)) or _on_gpu(kwargs.get("device"))):
            return func(*args, **kwargs)
        result = self._compute(func, args, kwargs)
        if self._watch:
            self._watch(func, args, kwargs, result)
        return result

    def _move_to_device(self, parameters: list[nn.Parameter], buffers: list[Tensor], device: torch.device) -> None:
        """FSDP's own function assigns `tensor.data`, which cannot turn a real tensor into a fake one."""
        for tensor in (*parameters, *buffers):
            if tensor.device != device and not tensor.is_meta:
                moved = tensor.detach().to(device)
                if isinstance(tensor, nn.Parameter):
                    moved = nn.Parameter(moved, tensor.requires_grad)
                self._fake.fake_tensor_converter.tensor_memo.clear()  # a tensor with references cannot be swapped
                torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default:
            return self._values.number(args[0])
        if func is aten._to_copy.default and not _is_fake(args[0]):
            return self._values.moved(args[0], kwargs.get("dtype"))
        if func is aten._to_copy.default and not _on_gpu(kwargs.get("device", args[0].device)):
            return self._values.copied(args[0], kwargs.get("dtype"))
        if func is aten.copy_.default and not _is_fake(args[0]):
            return args[0]  # a real tensor keeps what it has
        if func in INDEXING:
            args = self._values.known_indices(args)
        try:
            with self._fake:
                result = func(*args, **kwargs)
        except RuntimeError as error:
            if not any(words in str(error) for words in MIXED):
                raise
            raise MisplacedTensor(f"{func} of tensors {_devices((args, kwargs))} {_place()}") from error
        self._values.follow(func, args, kwargs, result)
        return result


def _devices(arguments: Any) -> str:
    """Shapes and devices of tensors."""
    tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    return ", ".join(f"{tuple(t.shape)} on {t.device.type}" for t in tensors)


def _place() -> str:
    """The innermost line of ours that runs, and the module of the model in whose forward it runs."""
    frames = [f for f in inspect.stack(0) if "/planning/" not in f.filename]
    ours = [f for f in frames if ROOT in Path(f.filename).resolve().parents]
    modules = [
        type(f.frame.f_locals["self"]).__name__
        for f in frames
        if f.function == "forward" and "self" in f.frame.f_locals
    ]
    found = ours[0] if ours else next((f for f in frames if "/torch/" not in f.filename), None)
    line = f"in {Path(found.filename).name}:{found.lineno} ({found.function})" if found else "in the backward pass"
    return line + (f", within {modules[0]}" if modules else "")


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def _on_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


@contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def fake_world(
    ranks: int = 1, replicas: int = 1, tensor: int = 1, rank: int = 0, *, context: int = 1, experts: int = 1
) -> Iterator[World]:
    """The world of one of `ranks` ranks, each with a fake accelerator, until the block ends. No group may be open."""
    device = register()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake_gpu", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = make_mesh(NAME, ranks, replicas=replicas, tensor=tensor, context=context, experts=experts)
        yield World(rank, ranks, device, mesh, dist.new_group(backend="fake_gpu"))
    finally:
        dist.destroy_process_group()
