"""The processes that run reward functions.

    call ─► a free process, a new one, or wait ─► the process's reply
                                  │ late: that process alone is killed
                                  └ many calls or much memory: it is replaced when its calls are over

An idle process takes one plain function, or up to 64 `async def` functions at a time. Nothing here blocks the event
loop, so agents and heartbeats go on.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.domain.schemas import Json
from agentrl.processes.hosted_set import HostedSet
from agentrl.rollout.rewards.reward_process import RewardProcess

ASYNC_CALLS = 64
"""How many `async def` functions a process runs at the same time."""


class RewardPool:
    """Starts, uses, replaces and ends the processes."""

    def __init__(self, config: RewardConfig, field: str = "reward") -> None:
        self._config = config
        self._functions = {
            name: one.model_dump(include={"function", "args", "batched"}) | {"field": _field(config, name, field)}
            for name, one in config.functions.items()
        }
        self._processes = HostedSet[RewardProcess]()
        self._starting = 0
        self._changed = asyncio.Condition()
        self._first = asyncio.Lock()
        self._facts: Json | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self._processes.stop()

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self._processes)

    async def facts(self) -> Json:
        """The facts about each loaded function: `is_async`, `batched`, `wants_ids`. Raises UserError."""
        async with self._first:
            if self._facts is None:
                await self._release(await self._acquire(None))
        assert self._facts is not None
        return self._facts

    async def call(self, name: str, answers: list[Json], timeout_s: float) -> Json:
        """Call a function once. Raises CallFailed; UserError when the functions cannot be loaded."""
        await self.facts()
        process = await self._acquire(name)
        try:
            return await process.call(name, answers, timeout_s)
        finally:
            await asyncio.shield(self._release(process))

    async def _acquire(self, name: str | None) -> RewardProcess:
        """Reserve a place in a process; without `name`, in any idle one."""
        shared = name is not None and self._facts is not None and self._facts[name]["is_async"]
        async with self._changed:
            while True:
                self._processes.discard_retired()
                process = self._free(shared)
                if process is not None:
                    break
                if len(self._processes) + self._starting < self._config.processes:
                    self._starting += 1
                    break
                await self._changed.wait()
            if process is not None:
                return self._reserve(process, shared)
        try:
            process = await RewardProcess.start(self._functions, self._config.memory_mb)
        finally:
            self._starting -= 1
            async with self._changed:
                self._changed.notify_all()
        self._facts = process.ready
        self._processes.add(process)
        return self._reserve(process, shared)

    def _free(self, shared: bool) -> RewardProcess | None:
        usable = [process for process in self._processes if not process.retiring and not process.exclusive]
        if shared:
            busy = [process for process in usable if 0 < process.running < ASYNC_CALLS]
            if busy:
                return busy[0]
        return next((process for process in usable if not process.running), None)

    def _reserve(self, process: RewardProcess, shared: bool) -> RewardProcess:
        process.running += 1
        process.exclusive = not shared
        return process

    async def _release(self, process: RewardProcess) -> None:
        process.running -= 1
        process.exclusive = False
        most = self._config.recycle_after
        process.retiring |= bool(most and process.calls >= most) or process.rss_mb > self._config.memory_mb
        self._processes.discard_retired()
        async with self._changed:
            self._changed.notify_all()


def _field(config: RewardConfig, name: str, field: str) -> str:
    return f"{field}.function" if config.function is not None else f"{field}.components.{name}.function"
