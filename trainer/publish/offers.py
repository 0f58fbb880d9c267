"""Sends a version's tensors to engines directly: rank 0 talks to them, and all ranks bring the tensors.

    distributed   rank 0 gathers bucket after bucket from the ranks and broadcasts each; it never holds the model
    tensor        the ranks on rank 0's host write their shares to shared memory; rank 0 collects the payloads
    checkpoint_engine   every rank starts a process that sends its share of the version's files (engine_handles)

Rank 0 uses `broadcast` and `shared` around its request to the proxy. The other ranks call `help` with each word that
rank 0 shares meanwhile.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from agentrl.domain.schemas import Json
from agentrl.trainer.distributed import World
from agentrl.trainer.publish import tensor_broadcast, tensor_sharing
from agentrl.trainer.publish.engine_handles import Group, NoHandles, handles
from agentrl.trainer.publish.tensor_sharing import NoRoom, Payloads
from agentrl.trainer.weights.ownership import Output
from agentrl.trainer.weights.weight_stream import Stream
from agentrl.versions.version_stamps import BOOT_ID


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Rank 0's word that it gathers buckets. It then shares True before each of them, and False at the end."""


@dataclass(frozen=True, slots=True)
class Share:
    """Rank 0's word that ranks of its host write to shared memory. It shares None when the engines have read it."""

    members: Sequence[Json]


@dataclass(frozen=True, slots=True)
class Hand:
    """Rank 0's word that each rank starts a process of checkpoint-engine. It shares whether the engines have read."""

    group: Group
    name: str
    files: Sequence[Path]


class Offers:
    """The tensors of one version, for engines that receive them directly. `stream(owners)` brings them to ranks."""

    def __init__(self, world: World, stream: Callable[[Sequence[int]], Stream]) -> None:
        self._world, self._stream = world, stream

    @property
    def ranks(self) -> int:
        """Number of ranks of the trainer."""
        return self._world.size

    @contextmanager
    def broadcast(self, members: Sequence[Json], device: torch.device, timeout_s: float) -> Iterator[Json]:
        """Broadcast to all members while the block runs. Rank 0 only."""
        self._world.share(Broadcast())
        buckets = _Pulled(self._stream([0]), self._world)
        try:
            with tensor_broadcast.broadcast(
                buckets, buckets.outputs, members, device=device, timeout_s=timeout_s
            ) as transfer:
                yield transfer
        finally:
            buckets.close()

    @contextmanager
    def shared(self, members: Sequence[Json], timeout_s: float) -> Iterator[Json]:
        """Hold the tensors in shared memory until the block ends. Rank 0 only. Raises NoRoom when they do not fit."""
        self._world.share(Share(members))
        with self._share(members) as payloads:
            try:
                yield {"transport": "tensor", "payloads": payloads, "timeout_s": timeout_s}
            finally:
                self._world.share(None)

    @contextmanager
    def handed(self, folder: Path, members: Sequence[Json], group: Group) -> Iterator[Json]:
        """Let checkpoint-engine send the whole files of a version while the block runs. Rank 0 only.

        Raises NoHandles.
        """
        word = Hand(group, folder.name, sorted(folder.glob("*.safetensors")))
        self._world.share(word)
        engines = [member["url"] for member in members]
        about = {"transport": "checkpoint_engine", "engines": engines, "timeout_s": group.timeout_s}
        told = False
        try:
            with self._hand(word) as found:
                yield about | {"handles": found}
                told = True
                self._world.share(True)
        finally:
            if not told:
                self._world.share(False)

    def _hand(self, word: Hand) -> AbstractContextManager[Json]:
        rank = self._world.rank
        return handles(word.group, rank, word.name, word.files[rank :: self._world.size])

    def help(self, word: object) -> None:
        """Do this rank's part of what rank 0's word begins."""
        if isinstance(word, Broadcast):
            buckets = self._stream([0]).chunks(by_rows=False)
            while self._world.share(None):
                next(buckets)
        elif isinstance(word, Hand):
            self._help_to_hand(word)
        elif isinstance(word, Share):
            try:
                with self._share(word.members):
                    self._world.share(None)
            except NoRoom:
                return  # rank 0 raises it too

    def _help_to_hand(self, word: Hand) -> None:
        """Run this rank's process until rank 0 says that the engines have read, or have not."""
        heard = False
        try:
            with self._hand(word):
                heard, done = True, self._world.share(None)
                if not done:
                    raise NoHandles("the engines did not read")
        except NoHandles:
            if not heard:
                self._world.share(None)

    @contextmanager
    def _share(self, members: Sequence[Json]) -> Iterator[Payloads]:
        """Hold this rank's share in shared memory; yields the payloads of all ranks. Collective, as is NoRoom."""
        stream = self._stream(_on_the_leaders_host(self._world))
        buckets = ({c.output.name: c.data for c in chunks} for chunks in stream.chunks(by_rows=False))
        with tensor_sharing.shared(buckets, members) as (payloads, problem):
            everyones = self._world.everyones((payloads, problem))
            problems = [found for _, found in everyones if found]
            if problems:
                raise NoRoom(problems[0])
            yield {member["url"]: [b for of_rank, _ in everyones for b in of_rank[member["url"]]] for member in members}


class _Pulled(Iterator[dict[str, Tensor]]):
    """Buckets that are gathered when another thread asks for them, until they are closed."""

    def __init__(self, stream: Stream, world: World) -> None:
        pieces = stream.buckets(by_rows=False)[0]
        self.outputs: list[list[Output]] = [[o for piece in bucket for o in piece.unit.outputs] for bucket in pieces]
        self._chunks, self._world = stream.chunks(by_rows=False), world
        self._left = len(pieces)
        self._lock = threading.Lock()

    def __next__(self) -> dict[str, Tensor]:
        with self._lock:
            if self._left == 0:
                raise StopIteration
            self._left -= 1
            self._world.share(True)
            return {chunk.output.name: chunk.data for chunk in next(self._chunks)}

    def close(self) -> None:
        """Release the other ranks. A bucket that is being gathered is completed first."""
        with self._lock:
            self._left = 0
            self._world.share(False)


def _on_the_leaders_host(world: World) -> list[int]:
    """The ranks with the shared memory of rank 0. Collective."""
    hosts = world.everyones((BOOT_ID.read_text() if BOOT_ID.exists() else "", socket.gethostname()))
    return [rank for rank, host in enumerate(hosts) if host == hosts[0]]
