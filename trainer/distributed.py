"""The trainer's ranks: their process group (gloo on CPU, NCCL on CUDA), and collective operations.

Without torchrun there is one rank. Consecutive ranks may have the same microbatch (parallel/mesh.py): they divide its
products or its tokens among them, and each of them then knows all of its results.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.domain.schemas import Float32
from agentrl.errors import AgentRLError
from agentrl.trainer.parallel.mesh import Mesh, make_mesh

T = TypeVar("T")
HEARTBEAT_S = 60.0
"""How often rank 0 tells the other ranks that it still works: far below the time-out of collective calls."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3)."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What rank 0 shares while it works: it is alive."""


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
        """The index of this rank's share of the data. Ranks with the same microbatches have one share."""
        return self.rank // self.mesh.sharing

    @property
    def data_size(self) -> int:
        """How many shares the data are cut into."""
        return self.size // self.mesh.sharing

    @property
    def counts(self) -> bool:
        """Whether sums include this rank: the first of those with its microbatches, which all have the same numbers."""
        return self.rank % self.mesh.sharing == 0

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
            if self.leads or not isinstance(box[0], Beat):
                return box[0]

    def broadcast(self, values: Float32 | None, size: int) -> Float32:
        """Rank 0's numbers, (size,), on every rank; the others pass None. Collective, over gloo."""
        box = torch.empty(size) if values is None else torch.from_numpy(values)
        dist.broadcast(box, src=0)
        found: Float32 = box.numpy()
        return found

    def share_bytes(self, value: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; the others pass None. Collective, over gloo."""
        size = torch.tensor([0 if value is None else len(value)])
        dist.broadcast(size, src=0)
        box = torch.empty(int(size), dtype=torch.uint8)
        if value:
            box[:] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        dist.broadcast(box, src=0)
        return value if value is not None else box.numpy().tobytes()

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
                self.share(Beat())

        with ThreadPoolExecutor(1, thread_name_prefix="beats") as threads:
            beats = threads.submit(beat)
            try:
                made = work()
            finally:
                done.set()
            beats.result()  # raises when a rank has died meanwhile
        return made

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective. Leaves `files` to the thread that writes a checkpoint."""
        dist.all_reduce(torch.zeros(1))  # a CPU tensor, so over gloo

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over data ranks, by name. Collective; every rank passes the same names."""
        names = sorted(values)
        sums = torch.tensor([values[n] if self.counts else 0.0 for n in names], dtype=torch.float64)
        dist.all_reduce(sums)  # a CPU tensor, so over gloo
        return dict(zip(names, sums.tolist(), strict=True))

    def gather(self, values: Tensor) -> Tensor:
        """Every data rank's 1-D tensor, one after another, on the CPU. Collective; lengths may differ."""
        return torch.cat(self.everyones(values.cpu())[:: self.mesh.sharing])

    def everyones_from(self, work: Callable[[], T]) -> list[T]:
        """Every rank's result of its own `work`, by rank, on every rank. It may take hours. Collective."""
        with ThreadPoolExecutor(1, thread_name_prefix="work") as threads:
            made = threads.submit(work)
            while not all(self.everyones(bool(wait([made], HEARTBEAT_S).done))):
                pass
            return self.everyones(made.result())

    def together(self, work: Callable[[], T]) -> T:
        """This rank's result of its own `work`, which is not collective. An AgentRLError of one rank is raised on all,
        so that none waits for it in the next collective call. Collective.
        """
        made, error = list[T](), None
        try:
            made.append(work())
        except AgentRLError as raised:
            error = raised
        first = next((one for one in self.everyones(error) if one is not None), None)
        if first is not None:
            raise first from error
        return made[0]

    def everyones(self, value: T) -> list[T]:
        """Every rank's object, by rank, on every rank. Collective."""
        found = [value] * self.size
        dist.all_gather_object(found, value)
        return found


@contextmanager
def join_world(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int = 0,
    replicas: int = 1,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    experts: int = 1,
) -> Iterator[World]:
    """Start the process group, from torchrun's environment or with one rank, until the block ends.

    Each of `replicas` holds the whole model, sharded over consecutive ranks, such as those of one machine.
    `tensor_parallel`, `context_parallel` and `experts` are sizes of groups (parallel/mesh.py). Raises UserError when
    the number of ranks is not a multiple of them.
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
        mesh = make_mesh(
            kind, size, replicas=replicas, tensor=tensor_parallel, context=context_parallel, experts=experts
        )
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


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
