"""The engine pool's reads and writes of the store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.models import has_weights
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.weight_checks import WeightFolders
from agentrl.proxy.run_store import RunStore
from agentrl.store import engine_turns, runs
from agentrl.store.calls import running_calls
from agentrl.store.training import publishes


class EngineRecords:
    """Every method may raise StoreError."""

    def __init__(self, store: RunStore, base_model: str, folders: WeightFolders) -> None:
        self._store = store
        self._run_id = store.run_id
        self._base_model = base_model
        self._folders = folders

    async def wanted(self, reported: int | None) -> int:
        """The version that an engine which reports `reported` should serve: `publishes.version_to_serve`."""
        return await self._store.read(publishes.version_to_serve, self._run_id, reported)

    async def folder(self, version: int) -> str | None:
        """The folder with a version's tensors, checked against the trainer's checksum.

        None for a run that only records and has no weights of its own: engines keep theirs.
        """
        row = await self._store.read(runs.version, self._run_id, version)
        if row is None or row.path is None:
            return self._base_model if await asyncio.to_thread(_may_have_weights, Path(self._base_model)) else None
        return await self._folders.checked(version, row.path, row.checksum)

    async def save(self, engine: Engine) -> None:
        """Record an engine's state."""
        state = {"state": engine.state, "version": engine.version, "error": engine.error}
        await self._store.write(engine_turns.save, self._run_id, engine.url, **state)

    async def take(self, url: str, seconds: float) -> str | None:
        """Take the turn to change an engine's weights for `seconds`; returns None, or the replica that has it."""
        return await self._store.write(engine_turns.claim, self._run_id, url, self._store.replica, seconds)

    async def give_back(self, url: str, *, whole: bool) -> None:
        """End the turn; if the weights are not `whole`, another replica has to repair them."""
        await self._store.write(engine_turns.release, self._run_id, url, self._store.replica, whole)

    async def is_whole(self, url: str) -> bool:
        """Whether no replica is changing the engine's weights or has left them incomplete."""
        return await self._store.read(engine_turns.is_whole, self._run_id, url)

    async def drained(self) -> set[str]:
        """The engines that get no new calls."""
        return await self._store.read(engine_turns.drained, self._run_id)

    async def undone(self, version: int) -> bool:
        """Whether a version newer than this one was rolled back."""
        return await self._store.read(publishes.undone, self._run_id, version)

    async def oldest_call(self) -> float | None:
        """When the oldest running call of any replica began."""
        return await self._store.read(running_calls.oldest_running, self._run_id)


def _may_have_weights(folder: Path) -> bool:
    """Whether the base model has weights; a folder that this machine does not see may have them for the engines."""
    return has_weights(folder) or not folder.is_dir()
