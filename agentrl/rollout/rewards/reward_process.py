"""The pool's end of one process that runs reward functions."""

from __future__ import annotations

import asyncio
from typing import Self

from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError
from agentrl.processes.hosted import HostedProcess, NotStarted, ProcessDied

HOST = "agentrl.rollout.rewards.reward_host"
LOAD_TIMEOUT_S = 120.0
"""How long the import of the functions' modules may take."""
LATE_S = 1.0
"""How much later than an `async def` function its process is ended, which has not cancelled it in time."""
LONGEST_REPLY_BYTES = 16 * 2**20


class CallFailed(AgentRLError):
    """One call of a reward function failed: it raised, timed out or crashed, or returned no finite number.

    `final` means that another attempt would not help.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class RewardProcess(HostedProcess):
    """One process. `running` counts its calls; `ready` are the facts about each function."""

    exclusive = False
    """Whether a plain function runs."""
    calls = 0

    @classmethod
    async def start(cls, functions: Json, memory_mb: int) -> Self:
        """Start a process, which loads the functions. Raises UserError when one cannot be loaded, or CallFailed."""
        setup = {"functions": functions, "memory_mb": memory_mb}
        doing = "importing the reward functions"
        try:
            return await cls.launch(HOST, setup, longest_line=LONGEST_REPLY_BYTES, doing=doing, limit_s=LOAD_TIMEOUT_S)
        except NotStarted as problem:
            raise CallFailed(str(problem)) from None

    async def call(self, name: str, answers: list[Json], timeout_s: float) -> Json:
        """Call a function: `{"values", "answers", "stats"}`. Raises CallFailed. A late call ends the process."""
        is_async = self.ready[name]["is_async"]
        self.calls += 1
        try:
            with self.request({"name": name, "answers": answers, "timeout_s": timeout_s}) as (_, reply):
                async with asyncio.timeout(timeout_s + (LATE_S if is_async else 0.0)):
                    answer = await reply
        except TimeoutError:
            await self.stop("another call blocked its process, which was killed")
            raise CallFailed(f"ran longer than {timeout_s:g} s") from None
        except ProcessDied as died:
            raise CallFailed(str(died)) from None
        except asyncio.CancelledError:
            if not is_async:
                self.retiring = True
                await asyncio.shield(self.stop())
            raise
        if "timed_out" in answer:
            raise CallFailed(f"ran longer than {timeout_s:g} s")
        self.rss_mb = float(answer.get("rss_mb", 0.0))
        if "error" in answer:
            raise CallFailed(str(answer["error"]), final=bool(answer.get("final")))
        return answer
