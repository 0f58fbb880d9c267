"""The process group of the trainer: gloo on CPU, NCCL on CUDA, one rank without torchrun."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of mallopt(3)."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the trainer's ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # (shard,), or (replicate, shard) with several replicas

    @property
    def leads(self) -> bool:
        """Rank 0: the one that talks to the store, writes files and prints."""
        return self.rank == 0

    def share(self, value: Any) -> Any:
        """Rank 0's object, on every rank. Collective."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over ranks, by name. Collective; every rank passes the same names."""
        names = sorted(values)
        sums = torch.tensor([values[n] for n in names], dtype=torch.float64)
        dist.all_reduce(sums)  # a CPU tensor: the gloo half of the group
        return dict(zip(names, sums.tolist(), strict=True))

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's 1-D tensor, one after another, on the CPU. Collective; lengths may differ."""
        parts: list[Tensor] = [values] * self.size
        dist.all_gather_object(parts, values.cpu())
        return torch.cat(parts)


@contextmanager
def join_world(device: Literal["auto", "cpu", "cuda"] = "auto", threads: int = 0, replicas: int = 1) -> Iterator[World]:
    """Start the process group (from torchrun's environment, or alone), leave it at the end.

    Each of `replicas` holds the whole model, sharded over ranks that follow one another: those of one machine.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if threads:
        torch.set_num_threads(threads)
    if kind == "cpu":
        keep_freed_memory()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(chosen)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1)
    try:
        size = dist.get_world_size()
        yield World(dist.get_rank(), size, chosen, _mesh(kind, size, replicas))
    finally:
        dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Have glibc keep what tensors free, for the next ones: else every large one is zeroed by the kernel, page by page.

    That took a third of a training step on a CPU.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)


def _mesh(kind: str, size: int, replicas: int) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    if size % replicas:
        raise UserError(f"trainer.replicas: {replicas} replicas cannot share {size} ranks")
    return init_device_mesh(kind, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
