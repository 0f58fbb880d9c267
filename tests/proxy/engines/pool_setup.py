"""A pool of engines without a database, and waiting for its states."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.errors import StoreError
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.version_delivery import RecordedFolder
from agentrl.store.engine_rows import Member
from agentrl.store.fleet import News
from agentrl.store.training.publishes import Wanted


class Store(EngineRecords):
    """The records of a run's engines in memory, without a database."""

    def __init__(self, folder: Path) -> None:
        self.version = 0
        self.pending: set[int] = set()
        self.root = str(folder)
        self.replica = "me"
        self.members: dict[str, Member] = {}
        self.was_undone = False
        self.claimed: dict[str, str] = {}
        self.fails = 0

    @property
    def lag(self) -> int:
        return 0

    @property
    def run_version(self) -> int | None:
        return None

    async def kept(self, version: int) -> set[int]:
        return set()

    async def wanted(self, reported: int | None) -> Wanted:
        return Wanted(self.version if reported not in self.pending else reported or 0)

    async def folder(self, version: int, recorded: RecordedFolder | None = None) -> str:
        if self.fails:
            self.fails -= 1
            raise StoreError("away")
        return self.root

    async def save(self, engine: Engine) -> tuple[bool, Member | None]:
        row = self.members.get(engine.url, Member(engine.url))
        if row.changes > engine.seen:
            return False, row
        saw = {"state": engine.state.value, "version": engine.version, "seen_by": self.replica}
        self.members[engine.url] = replace(row, changes=row.changes + 1, **saw)
        return True, self.members[engine.url]

    async def claim(self, engine: Engine, seconds: float) -> str | None:
        self.claimed[engine.url] = self.claimed.get(engine.url) or "me"
        return None if self.claimed[engine.url] == "me" else self.claimed[engine.url]

    async def release(self, engine: Engine, *, whole: bool) -> None:
        assert self.claimed.pop(engine.url) == "me"
        if not whole:
            self.claimed[engine.url] = ""  # free for all

    async def is_whole(self, url: str) -> bool:
        return url not in self.claimed

    async def read_fleet(self) -> News:
        return News(at=0.0, version=self.version, leased=False, gone=0, whole=True, members=[], replicas={})

    def drain(self, *urls: str) -> None:
        for url, row in self.members.items():
            self.members[url] = replace(row, changes=row.changes + 1, draining=url in urls)

    async def undone(self, version: int) -> bool:
        return self.was_undone


def states(pool: EnginePool) -> list[str]:
    return [engine.state.value for engine in pool.engines]


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def soon(seconds: float = 10) -> float:
    return time.monotonic() + seconds
