"""The trainer's ranks: their process group (gloo on CPU, NCCL on CUDA), their mesh, and collective operations.

Without torchrun there is one rank. Ranks that split tensors among them are a tensor group: consecutive ranks with the
same data. Ranks that shard one replica of the model are consecutive too. Four ranks, on the left as two replicas of two
shards, on the right as two shards of two tensor ranks:

    rank              0  1  2  3          rank              0  1  2  3
    replica           0  0  1  1          data rank         0  0  1  1
    data rank         0  1  2  3          tensor rank       0  1  0  1
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from agentrl.errors import UserError

T = TypeVar("T")
HEARTBEAT_S = 60.0
"""How often rank 0 tells the other ranks that it still works: far below the time-out of collective calls."""
BEAT = "rank 0 is alive"
"""What it then shares."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3)."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """How the ranks share a model. `whole` and `split` are (shard,), or (replicate, shard) with several replicas."""

    whole: DeviceMesh  # shards tensors that a rank computes with whole: over all ranks of a replica
    split: DeviceMesh  # shards tensors that tensor parallelism has split: over the tensor groups of a replica
    tensor: DeviceMesh | None = None  # (tensor,): this rank's tensor group; none without tensor parallelism

    @property
    def tensor_size(self) -> int:
        """Ranks of a tensor group."""
        return self.tensor.size() if self.tensor else 1


@dataclass(frozen=True, slots=True)
class World:
    """This process among the trainer's ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: Mesh
    files: dist.ProcessGroup
    """A second group of all ranks, on the CPU, for checkpoints that are written in the background."""

    @property
    def data_rank(self) -> int:
        """The index of this rank's share of the data. A tensor group has one share."""
        return self.rank // self.mesh.tensor_size

    @property
    def data_size(self) -> int:
        """How many shares the data are cut into."""
        return self.size // self.mesh.tensor_size

    @property
    def counts(self) -> bool:
        """Whether sums include this rank: the first of its tensor group, whose ranks all have the same numbers."""
        return self.rank % self.mesh.tensor_size == 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which talks to the store, writes files and prints."""
        return self.rank == 0

    def share(self, value: Any) -> Any:
        """Rank 0's object, on every rank. Collective. Goes over gloo, so a wait for rank 0 keeps no kernel of NCCL
        waiting, whose watchdog would end the process.

        Raises RuntimeError when rank 0 has died, or has said nothing for gloo's time-out (30 minutes). Rank 0 gets it
        at its next word when another rank has died.
        """
        box = [value]
        while True:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
            if self.leads or box[0] != BEAT:
                return box[0]

    def from_leader(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 only; returns its result on every rank. It may take hours. Collective."""
        made: T = self.share(self._beating(work) if self.leads else None)
        return made

    def only_leader(self, work: Callable[[], T]) -> T | None:
        """Call `work` on rank 0 only, which gets its result; the others wait, for hours if need be. Collective."""
        made = self._beating(work) if self.leads else None
        self.share(None)
        return made

    def _beating(self, work: Callable[[], T]) -> T:
        """Call `work`, and tell the ranks that wait for it every HEARTBEAT_S that this one is alive."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT_S):
                self.share(BEAT)

        with ThreadPoolExecutor(1, thread_name_prefix="beats") as threads:
            beats = threads.submit(beat)
            try:
                made = work()
            finally:
                done.set()
            beats.result()  # raises when a rank has died meanwhile
        return made

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        dist.barrier(self.files)

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over data ranks, by name. Collective; every rank passes the same names."""
        names = sorted(values)
        sums = torch.tensor([values[n] if self.counts else 0.0 for n in names], dtype=torch.float64)
        dist.all_reduce(sums)  # a CPU tensor, so over gloo
        return dict(zip(names, sums.tolist(), strict=True))

    def gather(self, values: Tensor) -> Tensor:
        """Every data rank's 1-D tensor, one after another, on the CPU. Collective; lengths may differ."""
        return torch.cat(self.everyones(values.cpu())[:: self.mesh.tensor_size])

    def everyones(self, value: T) -> list[T]:
        """Every rank's object, by rank, on every rank. Collective."""
        found = [value] * self.size
        dist.all_gather_object(found, value)
        return found


@contextmanager
def join_world(
    device: Literal["auto", "cpu", "cuda"] = "auto", threads: int = 0, replicas: int = 1, tensor_parallel: int = 1
) -> Iterator[World]:
    """Start the process group, from torchrun's environment or with one rank, until the block ends.

    Each of `replicas` holds the whole model, sharded over consecutive ranks, such as those of one machine.
    `tensor_parallel` ranks are a tensor group. Raises UserError when the number of ranks is not a multiple of both.
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
        mesh = _mesh(kind, size, replicas, tensor_parallel)
        yield World(dist.get_rank(), size, chosen, mesh, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next tensors. Otherwise the kernel zeroes every large tensor page by page.

    That took a third of a training step on a CPU.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a sharded one, on the CPU. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _mesh(kind: str, size: int, replicas: int, tensor_parallel: int) -> Mesh:
    if size % (replicas * tensor_parallel):
        parts = f"{replicas} × {tensor_parallel}"
        raise UserError(f"{size} ranks are not a multiple of replicas × tensor of resources.trainer = {parts}")
    *copies, shards = (size,) if replicas == 1 else (replicas, size // replicas)
    names = ("replicate", "shard")[-1 - len(copies) :]
    whole = init_device_mesh(kind, (*copies, shards), mesh_dim_names=names)
    if tensor_parallel == 1:
        return Mesh(whole, whole)
    shape = (*copies, shards // tensor_parallel, tensor_parallel)
    cube = init_device_mesh(kind, shape, mesh_dim_names=(*names, "tensor"))
    return Mesh(whole, cube[names], cube["tensor"])


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
