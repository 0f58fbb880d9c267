"""Sends a version's tensors to engines without its folder; proxy/engines/tensor_transfer.py is the other side.

    broadcast   a process group for this one version: the trainer is rank 0, engines are the rest; bucket by bucket
    shared      buckets in shared memory, and for every rank of every engine a payload that says where they are

Both are context managers around the request to the proxy: what they yield goes into it, and while it is answered, the
tensors flow. Nothing of one version outlives it, so nothing has to be repaired after a failure.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]  # of multiprocessing.shared_memory
import base64
import io
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError
from agentrl.trainer.publish.weights import bytes_digest
from agentrl.visible import say
from agentrl.weights_folder import in_threads

JOIN_TIMEOUT_S = 45.0
"""For all engines to come: less than they wait."""
ALIGNMENT = 64
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Engines keep these as one, its rows one after another."""
PADDED = ("embed_tokens", "lm_head")
"""Engines pad the rows of these to a multiple of PADDING."""
PADDING = 64
Buckets = list[dict[str, Tensor]]


class NoRoom(AgentRLError):
    """The shared memory is full."""


def in_buckets(tensors: Mapping[str, Tensor], size: int) -> Buckets:
    """In order, as many together as `size` bytes hold; a larger one alone."""
    buckets: Buckets = []
    room = 0
    for name, tensor in tensors.items():
        if not buckets or tensor.nbytes > room:
            buckets.append({})
            room = size
        buckets[-1][name] = tensor
        room -= tensor.nbytes
    return buckets


def digests(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """What an engine of one rank on a CPU says of these tensors, by its names: of each the start of a SHA-256.

    Only of what it keeps as it is, or as one of FUSED of which all parts are here: `dtype` is the engine's, and what is
    sent in another type may be kept in either.
    """
    kept: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if any(part in name for part in PADDED) and len(tensor) % PADDING:
            continue
        if tensor.dtype != dtype:
            continue
        whole = next((fused for fused, parts in FUSED.items() if any(f".{p}." in name for p in parts)), None)
        if whole is None:
            kept[name] = [tensor]
            continue
        first, *_ = FUSED[whole]
        if f".{first}." in name:
            parts = [name.replace(f".{first}.", f".{part}.") for part in FUSED[whole]]
            if all(part in tensors for part in parts):
                kept[name.replace(f".{first}.", f".{whole}.")] = [tensors[part] for part in parts]
    return {name: found.hex()[:16] for name, found in zip(kept, in_threads(bytes_digest, kept.values()), strict=True)}


# -- over a process group ----------------------------------------------------------------------------------------------


@contextmanager
def broadcast(buckets: Buckets, members: Sequence[Json], *, device: torch.device, timeout_s: float) -> Iterator[Json]:
    """Send to all members while the block runs. Who cannot receive gets them otherwise: nothing is raised."""
    host, group = _address(), f"agentrl-{uuid4().hex[:12]}"
    world_size = 1 + sum(member["ranks"] for member in members)
    store = _rendezvous(host, world_size)
    ranks, first = {}, 1
    for member in members:
        ranks[member["url"]] = first
        first += member["ranks"]
    sender = _Sender(store, group, world_size, buckets, device, timeout_s)
    sender.start()
    try:
        yield {
            "transport": "distributed",
            "group": group,
            "host": host,
            "port": store.port,
            "backend": sender.backend,
            "world_size": world_size,
            "ranks": ranks,
            "timeout_s": timeout_s,
            "buckets": [
                {
                    "names": list(bucket),
                    "dtypes": [str(t.dtype).removeprefix("torch.") for t in bucket.values()],
                    "shapes": [list(t.shape) for t in bucket.values()],
                }
                for bucket in buckets
            ],
        }
    finally:
        sender.give_up.set()


class _Sender(threading.Thread):
    """Joins the group and sends, in a thread of its own: nobody may ever come. Ends by itself, within its time-outs."""

    def __init__(
        self, store: TCPStore, group: str, world_size: int, buckets: Buckets, device: torch.device, timeout_s: float
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
        except RuntimeError as error:  # of torch: an engine went away, or did not come
            say(f"weights could not be sent to all engines: {str(error).splitlines()[0]}")

    def _join(self) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
        # the keys under which members of a group that torch makes by this name find one another
        kind = "cuda" if self.backend == "nccl" else "cpu"
        named = PrefixStore(f"{self._group}/", PrefixStore(self._group, self._store))
        store = PrefixStore(f"{kind}/", named)
        wait = timedelta(seconds=JOIN_TIMEOUT_S)
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            return dist.ProcessGroupNCCL(store, 0, self._size, options)
        return dist.ProcessGroupGloo(store, 0, self._size, timeout=wait)


def _rendezvous(host: str, world_size: int) -> TCPStore:
    """Where the group's members find each other. It listens on `host` alone: torch would take every interface, and it
    has no key. It closes the socket's descriptor."""
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
    """Where other machines reach this one, else loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("10.255.255.255", 1))  # sends nothing
            return str(s.getsockname()[0])
        except OSError:
            return "127.0.0.1"


# -- through shared memory ---------------------------------------------------------------------------------------------


@contextmanager
def shared(buckets: Buckets, members: Sequence[Json], *, timeout_s: float) -> Iterator[Json]:
    """Lay the tensors out in shared memory until the block ends. Raises NoRoom when there is no room for them."""
    strategy: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]  # else only children could open it, and engines would die
    try:
        laid_out = [_laid_out(bucket) for bucket in buckets]
        payloads = {
            member["url"]: [[_pickled(tensors) for _ in range(member["ranks"])] for _, tensors in laid_out]
            for member in members
        }
    except RuntimeError as error:  # of torch
        raise NoRoom(f"no shared memory for the weights: {str(error).splitlines()[0]}") from error
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    try:
        yield {"transport": "tensor", "payloads": payloads, "timeout_s": timeout_s}
    finally:
        for memory, _ in laid_out:
            _forget(memory)


def _laid_out(bucket: dict[str, Tensor]) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """Copies, one after another in one piece of shared memory, which has one user more than it seems."""
    starts, end = [], 0
    for tensor in bucket.values():
        starts.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8)
    memory.share_memory_()  # type: ignore[no-untyped-call]
    memory.untyped_storage()._shared_incref()  # type: ignore[no-untyped-call]
    found = []
    for start, (name, tensor) in zip(starts, bucket.items(), strict=True):
        place = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        found.append((name, place))
    return memory, found


def _forget(memory: Tensor) -> None:
    """Take the memory's name away: who has mapped it keeps it, and the last of them gives it back.

    torch would do so when the last user is gone; a payload that nobody read would count as one for ever.
    """
    _, name, _ = memory.untyped_storage()._share_filename_cpu_()
    _posixshmem.shm_unlink(name.decode())


def _pickled(tensors: list[tuple[str, Tensor]]) -> str:
    """Where they are. For one reader: each pickle counts as a user of the memory until it is read."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()
