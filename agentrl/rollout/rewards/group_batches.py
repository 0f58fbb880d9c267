"""Collects the answers of a group for a batched reward function.

A batch is called when each session of the group has given an answer or has ended, or after `wait_s`. Answers that come
later are a batch of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentrl.domain.schemas import Json

T = TypeVar("T")


@dataclass(slots=True)
class _Group(Generic[T]):
    size: int
    answers: list[tuple[Json, asyncio.Future[T]]] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self) -> None:
        """Set `complete` when no other answer can come."""
        if len(self.answered | self.ended) >= self.size:
            self.complete.set()


class GroupBatches(Generic[T]):
    """The batches of one component."""

    def __init__(self, call: Callable[[list[Json]], Awaitable[list[T]]], wait_s: float) -> None:
        self._call, self._wait_s = call, wait_s
        self._groups: dict[str, _Group[T]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def value(self, answer: Json, group_id: str, session_id: str, size: int) -> T:
        """The value of one answer, from the call of its batch. Raises what that call raises."""
        group = self._groups.setdefault(group_id, _Group(size))
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        group.answers.append((answer, future))
        group.answered.add(session_id)
        group.check()
        if len(group.answers) == 1:
            task = asyncio.create_task(self._run(group_id, group))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        return await future

    def left(self, group_id: str, session_id: str, size: int) -> None:
        """Record that a session has ended."""
        group = self._groups.setdefault(group_id, _Group(size))
        group.ended.add(session_id)
        group.check()
        if len(group.ended) >= group.size and not group.answers:
            del self._groups[group_id]

    async def _run(self, group_id: str, group: _Group[T]) -> None:
        """Wait for the group's answers, call the function, and hand out its values."""
        try:
            async with asyncio.timeout(self._wait_s):
                await group.complete.wait()
        except TimeoutError:
            pass  # the answers that have come are the batch
        batch, group.answers = group.answers, []
        if len(group.ended) >= group.size:
            self._groups.pop(group_id, None)
        waiting = [(answer, future) for answer, future in batch if not future.done()]  # done: its session was cancelled
        if not waiting:
            return
        try:
            values = await self._call([answer for answer, _ in waiting])
        except Exception as error:  # noqa: BLE001 - whatever it is, each session that waits must learn of it
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), value in zip(waiting, values, strict=True):
                if not future.done():
                    future.set_result(value)
