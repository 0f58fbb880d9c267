"""The processes that run a worker's agents, and the choice of one for each episode.

    episode ─► the process of its group, else the least busy one that is not stalled, else a new one, else wait

The sessions of a group run in one process if the run has reward functions, as these may score a group at once. A worker
starts at most `rollout.processes` processes that are not stalled, and at most twice as many in all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json
from agentrl.processes.hosted_set import HostedSet
from agentrl.processes.template import Template
from agentrl.rollout.agent import Agent
from agentrl.rollout.agent_processes.agent_process import HOST, PING_S, AgentProcess
from agentrl.rollout.rewards.scored_agent import agent_of
from agentrl.rollout.score import Result

PASSED_ON = ("base_url", "api_key", "is_eval", "is_baseline", "group_id", "group_size")
"""The data from which an agent's process makes its `extra`."""


class PlacedAgent:
    """An agent in a process that has been chosen for one episode."""

    def __init__(self, process: AgentProcess) -> None:
        self._process = process

    async def run(self, data: Json, **extra: Any) -> Result:
        """Run the episode."""
        return await self._process.run(data, {name: extra[name] for name in PASSED_ON if name in extra})


class AgentPool:
    """Starts, chooses, replaces and ends the processes."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._json = config.model_dump(mode="json", exclude={"database_url"})
        self._most, self._scored = config.rollout.processes, config.reward is not None
        self._processes = HostedSet[AgentProcess]()
        self._starting: list[str] = []  # the groups whose first episodes wait for new processes
        self._template: Template | None = None
        self._loading = asyncio.Lock()  # held while the template starts
        self._may_fork = True
        self._changed = asyncio.Condition()
        self._groups: dict[str, AgentProcess] = {}
        self._episodes = Counter[str]()  # running ones of each group

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self._processes.stop()
        if self._template is not None:
            await self._template.stop()

    @asynccontextmanager
    async def place(self, group_id: str) -> AsyncIterator[PlacedAgent]:
        """A place in a process for one episode of a group, until the block ends."""
        process = await self._reserve(group_id)
        try:
            yield PlacedAgent(process)
        finally:
            await asyncio.shield(self._release(process, group_id))

    async def _reserve(self, group_id: str) -> AgentProcess:
        async with self._changed:
            self._processes.discard_retired()
            while self._waits_for_its_group(group_id) or (
                (process := self._choice(group_id)) is None and not self._may_start()
            ):
                with contextlib.suppress(TimeoutError):  # a stalled process may go on at any time
                    await asyncio.wait_for(self._changed.wait(), PING_S)
            if process is not None:
                return self._taken(process, group_id)
            self._starting.append(group_id)
        try:
            process = await AgentProcess.start(self._json, await self._forkable())
            self._processes.add(process)
            return self._taken(process, group_id)
        finally:
            self._starting.remove(group_id)
            async with self._changed:
                self._changed.notify_all()

    async def _forkable(self) -> Template | None:
        """The process from which others are forked; None where that is impossible."""
        async with self._loading:
            if self._may_fork and (self._template is None or self._template.died):
                if self._template is not None:
                    await self._template.stop()
                self._template = await Template.start(HOST, {"config": self._json})
                self._may_fork = self._template is not None
        return self._template

    def _choice(self, group_id: str) -> AgentProcess | None:
        """The process for an episode; None if a new one should start, or all are stalled."""
        mine = self._groups.get(group_id)
        if mine is not None and not mine.retiring and self._scored:
            return mine
        usable = [process for process in self._processes if not process.retiring and not process.stalled]
        if self._may_start() and all(one.running for one in usable):
            return None
        return min(usable, key=lambda process: (process.late, process.running), default=None)

    def _waits_for_its_group(self, group_id: str) -> bool:
        """Whether a process is starting for another episode of a group that must share one."""
        return self._scored and group_id in self._starting

    def _may_start(self) -> bool:
        """Whether there is room for another process."""
        usable = sum(not process.retiring and not process.stalled for process in self._processes)
        starting, existing = len(self._starting), len(self._processes)
        return usable + starting < self._most and existing + starting < 2 * self._most

    def _taken(self, process: AgentProcess, group_id: str) -> AgentProcess:
        process.running += 1
        self._groups[group_id] = process
        self._episodes[group_id] += 1
        return process

    async def _release(self, process: AgentProcess, group_id: str) -> None:
        process.running -= 1
        self._episodes[group_id] -= 1
        if not self._episodes[group_id]:
            del self._episodes[group_id], self._groups[group_id]
        process.retiring |= process.rss_mb > self._config.rollout.process_memory_mb
        self._processes.discard_retired()
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def agents_of(config: RunConfig) -> AsyncIterator[Agent | AgentPool]:
    """The run's agent in this process, or the processes that run it, until the block ends. Raises UserError."""
    if config.rollout.processes:
        async with AgentPool(config) as pool:
            yield pool
    else:
        async with agent_of(config) as agent:
            yield agent
