"""The engine pool's reads and writes of the store."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from agentrl.engine.chunks import BASE, Adapter
from agentrl.errors import EngineError
from agentrl.models import has_weights
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.version_delivery import RecordedFolder
from agentrl.proxy.engines.weight_checks import WeightFolders
from agentrl.proxy.run_store import RunStore
from agentrl.store import engine_claims, fleet, runs
from agentrl.store.calls import running_calls
from agentrl.store.engine_rows import Member
from agentrl.store.fleet import News
from agentrl.store.training import memory_leases, publishes
from agentrl.store.training.publishes import Wanted
from agentrl.versions.weights_folder import tensor_names

WHOLE_EVERY_S = 60.0
"""How often all engines are read, not only those that changed."""


class EngineRecords:
    """Reads and writes the engines' rows. Every method may raise StoreError.

    `members` are the engines of the run as of the last `read_fleet`.
    """

    def __init__(self, store: RunStore, base_model: str, folders: WeightFolders) -> None:
        self.replica = store.replica
        self.members: dict[str, Member] = {}
        self._news: News | None = None
        self._right: set[int] = set()  # versions that engines with them should serve, as read since `_news`
        self._whole_at = 0.0
        self._store = store
        self._run_id = store.run_id
        self._base_model = base_model
        self._folders = folders

    @property
    def trainer_epoch(self) -> int:
        """The newest trainer's epoch, as of the last `read_fleet`."""
        return 0 if self._news is None else self._news.epoch

    @property
    def run_version(self) -> int | None:
        """The run's version, as of the last `read_fleet`."""
        return None if self._news is None else self._news.version

    @property
    def lag(self) -> int:
        """Number of versions that an engine may be behind the run."""
        return self._store.limits.lag

    async def kept(self, version: int) -> set[int]:
        """The versions that engines may keep when the run moves to `version`."""
        return await self._store.read(publishes.within_lag, self._run_id, version, self.lag) if self.lag else set()

    async def target(self) -> tuple[int, RecordedFolder] | None:
        """The run's version and its folder, if engines that are behind may change to it."""
        found = await self._store.read(publishes.target, self._run_id)
        return None if found is None else (found[0], RecordedFolder(found[1], found[2]))

    async def wanted(self, reported: int | None) -> Wanted:
        """The version and adapters that an engine should hold if it reports `reported`: `publishes.version_to_serve`.

        An engine that reports the run's version, as of the last `read_fleet`, needs no query, unless a trainer has the
        engines' GPU memory. While a version is published, one query between two reads answers for all engines with it.
        """
        news, right = self._news, self._right
        if reported is not None and news is not None and not news.leased and reported in (news.version, *right):
            return Wanted(reported)
        found = await self._store.read(publishes.version_to_serve, self._run_id, reported, self.lag)
        if found.expired:
            await self._store.write(memory_leases.expire, self._run_id, self.replica)
        if reported is not None and found == Wanted(reported):
            right.add(reported)
        return found

    async def base_for(self, version: int) -> str | None:
        """The folder that an engine without weights must load before it loads `version`.

        None if the folder of `version` has all tensors. A trainer that trains some of the layers writes only those.
        """
        row = await self._store.read(runs.version, self._run_id, version)
        if row is None or row.path is None:
            return None
        return None if await asyncio.to_thread(_is_whole, Path(row.path), Path(self._base_model)) else self._base_model

    async def recorded(self, version: int) -> RecordedFolder:
        """The folder of a version as the store has it."""
        row = await self._store.read(runs.version, self._run_id, version)
        return RecordedFolder(None, None) if row is None else RecordedFolder(row.path, row.checksum)

    async def folder(self, version: int, recorded: RecordedFolder | None = None) -> str | None:
        """The folder with a version's tensors, checked against the trainer's checksum: `recorded`, or it is read.

        None for a run that only records and has no weights of its own: engines keep theirs.
        """
        recorded = recorded or await self.recorded(version)
        if recorded.path is None:
            return self._base_model if await asyncio.to_thread(_may_have_weights, Path(self._base_model)) else None
        return await self._folders.checked(version, recorded.path, recorded.checksum)

    async def adapter(self, version: int) -> tuple[Adapter | None, str | None]:
        """The adapter of a version, and its parent folder; the base weights have none."""
        row = await self._store.read(runs.version, self._run_id, version)
        if version == BASE or row is None or row.path is None:
            return None, None
        return Adapter(Path(row.path).name, version), str(Path(row.path).parent)

    async def save(self, engine: Engine) -> tuple[bool, Member | None]:
        """Record an engine's state, unless its row has changed since we looked: `fleet.save`."""
        known = engine.url, engine.seen, engine.joined
        saw = self.replica, engine.state.value, engine.version, engine.error, engine.backend
        recorded, row = await self._store.write(fleet.save, self._run_id, *known, *saw)
        if row is not None:
            self.members[row.url] = row
        return recorded, row

    async def claim(self, engine: Engine, seconds: float) -> str | None:
        """Claim an engine, to change its weights, for `seconds`; returns None, or the replica that has claimed it.

        Raises EngineError for an engine that has left the run.
        """
        asked = self._run_id, engine.url, engine.joined, self.replica, seconds
        claimed, row = await self._store.write(engine_claims.claim, *asked)
        engine.take(row, written=claimed)
        if row is None:
            raise EngineError(f"{engine.url} has left the run")
        return None if claimed else row.updater

    async def release(self, engine: Engine, *, whole: bool) -> None:
        """End the claim; if the weights are not `whole`, another replica has to repair them."""
        released, row = await self._store.write(engine_claims.release, self._run_id, engine.url, self.replica, whole)
        engine.take(row, written=released)

    async def is_whole(self, url: str) -> bool:
        """Whether the engine's weights are complete: no replica is changing them or has left them incomplete."""
        return await self._store.read(engine_claims.is_whole, self._run_id, url)

    async def read_fleet(self) -> News:
        """Bring `members` up to date; returns what was read. Reads all engines now and then, in case it missed one."""
        whole_due = time.monotonic() - self._whole_at > WHOLE_EVERY_S
        since = None if whole_due else self._news
        news = await self._store.read(fleet.news, self._run_id, since, self._store.limits.heartbeat_timeout_s)
        found = {row.url: row for row in news.members}
        kept = {} if news.whole else self.members
        for url, row in found.items():
            known = self.members.get(url)
            kept[url] = known if known is not None and known.changes > row.changes else row
        self.members, self._news, self._right = kept, news, set()
        self._whole_at = time.monotonic() if news.whole else self._whole_at
        return news

    async def drop_lost(self) -> None:
        """Take engines out of the run that are dead and whose lease is over."""
        await self._store.write(fleet.drop_lost, self._run_id, self.replica)

    async def undone(self, version: int) -> bool:
        """Whether a version newer than this one was rolled back."""
        return await self._store.read(publishes.undone, self._run_id, version)

    async def oldest_call(self) -> float | None:
        """The time at which the oldest running call of any replica began (seconds since the epoch), or None."""
        return await self._store.read(running_calls.oldest_running, self._run_id)


def _is_whole(folder: Path, base: Path) -> bool:
    """Whether a version's folder has all tensors of the base model. False when this machine does not see both."""
    try:
        return tensor_names(base) <= tensor_names(folder) != set()
    except (OSError, ValueError):
        return False


def _may_have_weights(folder: Path) -> bool:
    """Whether the base model has weights. True for a folder that only the engines may see."""
    return has_weights(folder) or not folder.is_dir()
