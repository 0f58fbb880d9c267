"""Hands a version's tensors to engines on this machine in shared memory.

Each bucket is one piece of shared memory, and every rank of every engine gets a payload that says where the tensors lie
in it; proxy/engines/tensor_transfer.py is the proxy's side. `shared` is a context manager around the request to the
proxy. The memory's name exists while the block runs: an engine that has mapped the memory keeps it, and the kernel
frees it with the last mapping. If the trainer is killed, torch's shared memory manager deletes the names.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing.reductions import reduce_storage

from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError

Bucket = dict[str, Tensor]
Payloads = dict[str, list[list[str]]]
"""URL of a member → for each bucket, one payload for each of the member's ranks."""
ALIGNMENT = 64
"""Bytes to which tensors in shared memory are aligned."""
SHARED_MEMORY = Path("/dev/shm")
"""The folder in which Linux keeps the files of shm_open(3)."""


class NoRoom(AgentRLError):
    """There is not enough shared memory for the weights."""


@contextmanager
def shared(buckets: Iterable[Bucket], members: Sequence[Json]) -> Iterator[tuple[Payloads, str]]:
    """Copy the tensors into shared memory until the block ends.

    Yields the payloads, and why there are none if they do not fit. All buckets are taken in any case, since other ranks
    wait for this one's parts of theirs.
    """
    payloads: Payloads = {member["url"]: [] for member in members}
    with ExitStack() as files:
        problem = ""
        with _shared_by_name():
            for bucket in buckets:
                if not bucket or problem:
                    continue
                try:
                    copies = _copied(bucket, files)
                except RuntimeError as error:  # from torch
                    problem = f"no shared memory for the weights: {str(error).splitlines()[0]}"
                    continue
                for member in members:
                    payloads[member["url"]].append([_pickled(copies) for _ in range(member["ranks"])])
        if problem:
            files.close()
        yield payloads, problem


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Let any process open the memory that torch shares; by default only child processes can."""
    before: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


def _copied(bucket: Bucket, files: ExitStack) -> list[tuple[str, Tensor]]:
    """Copies of a bucket's tensors, one after another in one piece of shared memory that `files` deletes."""
    starts, end = [], 0
    for tensor in bucket.values():
        starts.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8)
    memory.share_memory_()  # type: ignore[no-untyped-call]
    files.callback(_owned_file(memory).unlink)
    copies = []
    for start, (name, tensor) in zip(starts, bucket.items(), strict=True):
        copy = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        copies.append((name, copy))
    return copies


def _owned_file(memory: Tensor) -> Path:
    """The file of the shared memory. From now on the caller has to delete it, since torch does not.

    torch counts the memory's users and deletes the file with the last of them, but an unread payload stays a user
    forever. `reduce_storage` names the file and counts one more user, so torch never deletes it.
    """
    _, (_, _, name, _) = reduce_storage(memory.untyped_storage())  # type: ignore[no-untyped-call]
    return SHARED_MEMORY.joinpath(name.decode().lstrip("/"))


def _pickled(tensors: list[tuple[str, Tensor]]) -> str:
    """Pickle the tensors' names and places for one reader: torch counts a pickle as a user until it is read."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()
