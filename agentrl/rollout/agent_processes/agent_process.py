"""The worker's end of one process that runs agents.

STARTING ──► SERVING ◄──► STALLED   an agent blocks its event loop: it answers no ping, and gets no new episodes
                │             │
                └► RETIRING ◄─┘     it gets no new episodes, and ends with its last one
                      │
                      └► ENDED      its episodes that still run fail
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, Self

from agentrl.domain.schemas import Json
from agentrl.processes.hosted import HostedProcess, ProcessDied
from agentrl.processes.template import Template
from agentrl.rollout.agent_processes.agent_messages import LONGEST_LINE_BYTES, read_result
from agentrl.rollout.episode import AgentFailed
from agentrl.rollout.score import Result

HOST = "agentrl.rollout.agent_processes.agent_host"
LOAD_TIMEOUT_S = 300.0
"""How long the import of the agent's module may take."""
PING_S = 0.5
STALLED_S = 2.0
"""A process that answers no ping for this long is stalled."""
LATE_S = 0.75
"""A process that answers no ping for this long is late: episodes rather go to others."""
CANCEL_S = 10.0
"""How long a cancelled episode may take to end before its process is killed."""


class AgentProcess(HostedProcess):
    """One process. `running` counts its episodes."""

    _unanswered_since: float | None = None  # the oldest ping without a pong
    _pinging: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: Json, template: Template | None = None) -> Self:
        """Start a process, which loads the agent. Raises UserError when it cannot be loaded, or NotStarted."""
        process = await cls.launch(
            HOST,
            {"config": config},
            longest_line=LONGEST_LINE_BYTES,
            doing="loading the agent",
            limit_s=LOAD_TIMEOUT_S,
            template=template,
        )
        process._pinging = asyncio.create_task(process._ping())
        return process

    @property
    def stalled(self) -> bool:
        """Whether an agent blocks the process."""
        return self._unanswered_s() > STALLED_S

    @property
    def late(self) -> bool:
        """Whether it may be stalled."""
        return self._unanswered_s() > LATE_S

    def _unanswered_s(self) -> float:
        return 0.0 if self._unanswered_since is None else time.monotonic() - self._unanswered_since

    async def run(self, data: Json, extra: Json) -> Result:
        """Run an episode. Raises AgentFailed. Cancellation ends the episode, at the latest with its process."""
        try:
            with self.request({"data": data, "extra": extra}) as (number, reply):
                try:
                    answer = await asyncio.shield(reply)
                except asyncio.CancelledError:
                    await asyncio.shield(self._cancel(number, reply))
                    raise
        except ProcessDied as died:
            raise AgentFailed(str(died)) from None
        if "error" in answer:
            raise AgentFailed(str(answer["error"]))
        return read_result(answer["result"])

    def received(self, message: Json) -> None:
        """The answer to a ping."""
        self._unanswered_since, self.rss_mb = None, float(message["rss_mb"])
        self.retiring |= message["slowed"]

    async def stop(self, why: str = "the worker ended its process") -> None:
        """Kill the process and everything that it started; its episodes fail with this reason."""
        if self._pinging is not None:
            self._pinging.cancel()
        await super().stop(why)

    async def _cancel(self, number: int, reply: asyncio.Future[dict[str, Any]]) -> None:
        self.send({"cancel": number})
        done, _ = await asyncio.wait([reply], timeout=CANCEL_S)
        if not done:
            await self.stop("another episode blocked its process, which was killed")

    async def _ping(self) -> None:
        for number in itertools.count():
            self._unanswered_since = self._unanswered_since or time.monotonic()
            self.send({"ping": number})
            await asyncio.sleep(PING_S)
