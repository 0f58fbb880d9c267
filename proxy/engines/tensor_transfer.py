"""Sends a version's tensors to engines without its folder: the proxy's side of trainer/publish/tensor_broadcast.py,
tensor_sharing.py and engine_handles.py.

    distributed   every engine joins the trainer's process group, with the ranks that it is given, and receives buckets
    tensor        every engine maps the trainer's memory at the addresses in its payloads; only on the trainer's host
    checkpoint_engine   every rank of an engine reads from the process of checkpoint-engine on its GPU

The version's folder exists as well: an engine whose transfer fails reads it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.domain.schemas import Json
from agentrl.engine.engine_client import EngineClient
from agentrl.errors import EngineError, EngineRejected
from agentrl.proxy.recent import Recent

JOIN_TIMEOUT_S = 60.0
"""Limit for all members to join; the trainer's own limit is shorter."""
CLOSING_TIMEOUT_S = 10.0
"""Limit for closing a transfer that failed."""
Size = Annotated[int, Field(ge=0)]
Short = Annotated[str, Field(min_length=1, max_length=300)]


class _Transfer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: Annotated[float, Field(gt=0, le=86400)]
    """Limit for each bucket."""


class Bucket(BaseModel):
    """Tensors that are sent together, in this order. The three lists have one length."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Size]]

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError("names, dtypes and shapes must have the same length")
        return self


class Broadcast(_Transfer):
    """The trainer is rank 0 of `group`, which listens at host and port; `ranks` has the first rank of each engine."""

    transport: Literal["distributed"]
    group: Annotated[str, Field(min_length=1, max_length=100)]
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    backend: Literal["gloo", "nccl"]
    world_size: Annotated[int, Field(ge=2)]
    ranks: dict[str, Annotated[int, Field(ge=1)]]
    buckets: Annotated[list[Bucket], Field(min_length=1)]

    def reaches(self, url: str) -> bool:
        """Whether the engine is a member."""
        return url in self.ranks

    async def load(self, client: EngineClient, version: int | None, *, flush_cache: bool) -> None:
        """Receive all buckets. Raises EngineError; the weights are then undefined."""
        async with _closing(partial(client.leave_group, self.group)):  # it may join after the limit
            await client.join_group(
                self.group,
                host=self.host,
                port=self.port,
                rank=self.ranks[client.url],
                world_size=self.world_size,
                backend=self.backend,
                timeout_s=JOIN_TIMEOUT_S,
            )
            await client.begin_update()
            async with _closing(client.end_update):
                for bucket in self.buckets:
                    last = bucket is self.buckets[-1]
                    await client.receive_tensors(
                        self.group,
                        bucket.model_dump(),
                        version=version if last else None,
                        flush_cache=flush_cache and last,
                        timeout_s=self.timeout_s,
                    )


class Shared(_Transfer):
    """`payloads`: engine URL → buckets, each with a payload for every tensor rank."""

    transport: Literal["tensor"]
    payloads: dict[str, Annotated[list[list[str]], Field(min_length=1)]]

    def reaches(self, url: str) -> bool:
        """Whether the engine has payloads."""
        return url in self.payloads

    async def load(self, client: EngineClient, version: int | None, *, flush_cache: bool) -> None:
        """Load all payloads. Raises EngineError; the weights are then undefined.

        Each payload is sent to its engine once, even if that fails: a second use kills the engine if the trainer has
        freed the memory, else the trainer.
        """
        buckets = self.payloads[client.url]
        _mark_sent(client.url, buckets)
        await client.begin_update()
        async with _closing(client.end_update):
            for i, payloads in enumerate(buckets, 1):
                last = i == len(buckets)
                await client.take_tensors(
                    payloads,
                    version=version if last else None,
                    flush_cache=flush_cache and last,
                    timeout_s=self.timeout_s,
                )


_sent: Recent[bool] = Recent()


def _mark_sent(url: str, buckets: list[list[str]]) -> None:
    """Mark the payloads as sent to the engine. Raises EngineError if one of them was sent before."""
    payloads = [(rank, payload) for bucket in buckets for rank, payload in enumerate(bucket)]
    marks = [hashlib.sha256(f"{url} {rank} {payload}".encode()).hexdigest() for rank, payload in payloads]
    if any(mark in _sent for mark in marks):
        raise EngineError(f"{url} has already received a payload of this publish")
    for mark in marks:
        _sent[mark] = True


@asynccontextmanager
async def _closing(close: Callable[[float | None], Awaitable[None]]) -> AsyncIterator[None]:
    """Call `close` at the end; with a short limit if the block failed, because its time may be over.

    What the block raised is raised, also if closing fails too: an update that has no time left must end.
    """
    try:
        yield
    except BaseException:
        with suppress(EngineError):
            await close(CLOSING_TIMEOUT_S)
        raise
    await close(None)


class Handles(_Transfer):
    """`handles`: GPU → the socket of checkpoint-engine's process on it; `engines`: those with ranks on these GPUs.

    SGLang (0.5.23, /update_weights_from_ipc) takes all weights in one request, and each of its ranks the handle of its
    GPU. It has no begin and end of an update, and `timeout_s` bounds the whole.
    """

    transport: Literal["checkpoint_engine"]
    handles: Annotated[dict[Short, Short], Field(min_length=1, max_length=100_000)]
    engines: Annotated[list[str], Field(min_length=1, max_length=100_000)]

    def reaches(self, url: str) -> bool:
        """Whether the engine has ranks on these GPUs."""
        return url in self.engines

    async def load(self, client: EngineClient, version: int | None, *, flush_cache: bool) -> None:
        """Take all weights. Raises EngineError; the weights are then undefined."""
        await client.take_handles(self.handles, version=version, flush_cache=flush_cache, timeout_s=self.timeout_s)


Transfer = Annotated[Broadcast | Shared | Handles, Field(discriminator="transport")]


async def close_open_update(client: EngineClient) -> None:
    """Close an update that a failed transfer left open: engines refuse the next one otherwise."""
    try:
        await client.end_update()
    except EngineRejected:
        return


async def members(clients: Sequence[EngineClient], at_once: int, *, prepare: bool = False) -> list[Json]:
    """The engines that answer now, with the number of tensor ranks of each; `at_once` are asked at a time.

    With `prepare`, says which of them can prepare versions.
    """
    places = asyncio.Semaphore(at_once)

    async def member(client: EngineClient) -> Json | None:
        async with places:
            try:
                prepares = prepare and await client.preparation() is not None
                return {"url": client.url, "ranks": await client.tensor_ranks(), "prepares": prepares}
            except EngineError:
                return None

    found = await asyncio.gather(*(member(client) for client in clients))
    return [each for each in found if each is not None]


async def verify(client: EngineClient, expected: dict[str, str]) -> int:
    """Compare the digests of an engine's tensors with the trainer's, by name; returns how many were compared.

    Raises EngineError with the first name that differs. The parts on an engine of several ranks cannot be compared.
    """
    return compare(client.url, await client.checksums(), expected) if expected else 0


def compare(url: str, ranks: Sequence[dict[str, str]], expected: dict[str, str]) -> int:
    """`verify`, of digests that an engine has reported for each of its ranks."""
    found = ranks[0] if len(ranks) == 1 else {}
    common = sorted(expected.keys() & found.keys())
    for name in common:
        if found[name] != expected[name]:
            raise EngineError(
                f"{url} has other weights than the trainer: {name} has digest {found[name]}, not {expected[name]}"
            )
    return len(common)
