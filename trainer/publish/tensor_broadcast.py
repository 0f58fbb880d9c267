"""Sends a version's tensors to engines over a process group of its own, bucket by bucket.

The trainer is rank 0 of the group and the engines are the other ranks; proxy/engines/tensor_transfer.py is the proxy's
side. `broadcast` is a context manager around the request to the proxy: the request contains the yielded value, and the
tensors are sent while the proxy answers. The group ends with its version, so a failure leaves nothing to repair.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # its stubs leave them out

from agentrl.domain.schemas import Json
from agentrl.trainer.weights.ownership import Output
from agentrl.visible import say

JOIN_TIMEOUT_S = 45.0
"""How long the trainer waits until all engines have joined. Engines wait longer."""


@contextmanager
def broadcast(
    buckets: Iterable[Mapping[str, Tensor]],
    outputs: Sequence[Sequence[Output]],
    members: Sequence[Json],
    *,
    device: torch.device,
    timeout_s: float,
) -> Iterator[Json]:
    """Send to all members while the block runs. A member that does not receive reads the folder: no error is raised.

    `outputs` describes the `buckets`, which are taken one by one, in a thread, after all members have joined.
    """
    host, group = _address(), f"agentrl-{uuid4().hex[:12]}"
    world_size = 1 + sum(member["ranks"] for member in members)
    store = _rendezvous(host, world_size)
    port = store.port
    ranks, first = {}, 1
    for member in members:
        ranks[member["url"]] = first
        first += member["ranks"]
    sender = _Sender(store, group, world_size, buckets, device, timeout_s)
    del store  # the sender closes it
    sender.start()
    try:
        yield {
            "transport": "distributed",
            "group": group,
            "host": host,
            "port": port,
            "backend": sender.backend,
            "world_size": world_size,
            "ranks": ranks,
            "timeout_s": timeout_s,
            "buckets": [
                {
                    "names": [output.name for output in bucket],
                    "dtypes": [str(output.dtype).removeprefix("torch.") for output in bucket],
                    "shapes": [list(output.shape) for output in bucket],
                }
                for bucket in outputs
            ],
        }
    finally:
        sender.give_up.set()


class _Sender(threading.Thread):
    """A thread that joins the group and sends. It ends within its time-outs, even when no engine joins.

    At its end it closes the store, so engines that wait for another one to join end too, and read the folder.
    """

    def __init__(
        self,
        store: TCPStore,
        group: str,
        world_size: int,
        buckets: Iterable[Mapping[str, Tensor]],
        device: torch.device,
        timeout_s: float,
    ) -> None:
        super().__init__(name="weights-sender", daemon=True)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.give_up = threading.Event()
        self._store, self._group, self._size = store, group, world_size
        self._buckets, self._device, self._timeout_s = buckets, device, timeout_s

    def run(self) -> None:
        try:
            group = self._join()
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.timeout = timedelta(seconds=self._timeout_s)
            for bucket in self._buckets:
                for tensor in bucket.values():
                    sent = [tensor.contiguous().to(self._device)]
                    group.broadcast(sent, options).wait()  # type: ignore[union-attr]  # the stubs lack it
            self.give_up.wait()  # engines leave first
        except RuntimeError as error:  # from torch: an engine left, or did not join
            say(f"weights could not be sent to all engines: {str(error).splitlines()[0]}")
        finally:
            del self._store

    def _join(self) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
        # torch uses these prefixes for a group of this name, and engines join through torch
        kind = "cuda" if self.backend == "nccl" else "cpu"
        named = PrefixStore(f"{self._group}/", PrefixStore(self._group, self._store))
        store = PrefixStore(f"{kind}/", named)
        wait = timedelta(seconds=JOIN_TIMEOUT_S)
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait  # torch has no public way to set it
            return dist.ProcessGroupNCCL(store, 0, self._size, options)
        return dist.ProcessGroupGloo(store, 0, self._size, timeout=wait)


def _rendezvous(host: str, world_size: int) -> TCPStore:
    """The store through which the group's members find each other.

    It has no authentication, so it listens on `host` alone; torch by itself would listen on every interface.
    """
    with socket.create_server((host, 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _address() -> str:
    """The address at which other machines reach this one, or loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("10.255.255.255", 1))  # sends nothing
            return str(s.getsockname()[0])
        except OSError:
            return "127.0.0.1"
