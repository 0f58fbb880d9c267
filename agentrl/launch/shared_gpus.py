"""GPUs that engines share with the trainer: no engine starts in the trainer's turn, which a dead trainer loses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from agentrl.placement.assignment import TRAINER
from agentrl.store import Database
from agentrl.store.training import memory_leases

POLL_S = 0.5


class SharedGpus:
    """A run's processes that share GPUs in turns. `engines`: their URLs by name; empty when no GPU is shared."""

    def __init__(self, database: Database, run_id: str, engines: Mapping[str, str], start_timeout_s: float) -> None:
        self._database = database
        self._run_id = run_id
        self._engines = engines
        self._start_timeout_s = start_timeout_s

    async def may_start(self, part: str) -> None:
        """Wait until a part may start: an engine not in the trainer's turn. The trainer then waits for the engine."""
        while part in self._engines:
            url, transact = self._engines[part], self._database.transact
            if await asyncio.to_thread(transact, memory_leases.may_start, self._run_id, url, self._start_timeout_s):
                return
            await asyncio.sleep(POLL_S)

    async def ended(self, part: str) -> None:
        """The process of a part has ended, with all of its children: its memory is free."""
        if part in self._engines:
            await asyncio.to_thread(self._database.transact, memory_leases.has_ended, self._run_id, self._engines[part])
        elif part == TRAINER and self._engines:
            await asyncio.to_thread(self._database.transact, memory_leases.trainer_ended, self._run_id, "train")
