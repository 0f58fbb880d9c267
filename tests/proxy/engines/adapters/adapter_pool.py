"""Records of a run whose versions are adapters, and steps of a pool over them."""

from __future__ import annotations

import time
from pathlib import Path

from agentrl.domain.tokens import TokenIds
from agentrl.proxy.calls.sampling.sample_segment import Sampled
from agentrl.proxy.calls.sampling.sampling import SampleRequest, sample
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.version_delivery import RecordedFolder
from agentrl.store.engine_rows import Member
from agentrl.store.fleet import News
from agentrl.store.training.publishes import Wanted
from agentrl.testing import FakeEngine


class Store(EngineRecords):
    """The records of a run's engines in memory, without a database."""

    def __init__(self, root: Path) -> None:
        self.version = 0
        self.pending: set[int] = set()
        self.root = root
        self.began: list[float] = []  # calls under way
        self.claimed: dict[str, str] = {}  # by others
        self.left: set[str] = set()  # in the middle of an update
        self.replica = "me"
        self.members: dict[str, Member] = {}

    @property
    def run_version(self) -> int:
        return self.version

    @property
    def lag(self) -> int:
        return 0

    async def wanted(self, reported: int | None) -> Wanted:
        return Wanted(self.version if reported not in self.pending else reported or 0)

    async def folder(self, version: int, recorded: RecordedFolder | None = None) -> str:
        folder = self.root / f"v{version}-step" if version else self.root
        folder.mkdir(exist_ok=True)
        return str(folder)

    async def save(self, engine: Engine) -> tuple[bool, Member | None]:
        state = {"state": engine.state.value, "version": engine.version, "changes": engine.seen + 1}
        self.members[engine.url] = Member(engine.url, **state)
        return True, self.members[engine.url]

    async def read_fleet(self) -> News:
        return News(at=0.0, version=self.version, leased=False, gone=0, whole=True, members=[], replicas={})

    async def undone(self, version: int) -> bool:
        return False

    async def claim(self, engine: Engine, seconds: float) -> str | None:
        return self.claimed.get(engine.url)

    async def release(self, engine: Engine, *, whole: bool) -> None:
        assert engine.url not in self.claimed

    async def is_whole(self, url: str) -> bool:
        return url not in self.left

    async def oldest_call(self) -> float | None:
        return min(self.began, default=None)


def states(pool: EnginePool) -> list[str]:
    return [engine.state.value for engine in pool.engines]


async def probe(pool: EnginePool) -> None:
    for engine in pool.engines:
        await pool.probe(engine)


async def publish(pool: EnginePool, store: Store, version: int) -> None:
    store.pending = {version}
    for engine in pool.engines:
        await pool.load(engine, version)
    store.version, store.pending = version, set()


async def answer(pool: EnginePool, session_id: str = "s") -> Sampled:
    sampled = Sampled()
    await sample(
        pool,
        sampled,
        lambda tokens: None,
        SampleRequest(
            session_id=session_id,
            rid="r" * 32,
            prompt_ids=TokenIds([1]),
            params={"max_new_tokens": 10, "temperature": 1.0, "stop_token_ids": [2]},
            deadline=time.monotonic() + 10,
        ),
    )
    return sampled


def spans(sampled: Sampled) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in sampled.spans]


def paths(fake: FakeEngine) -> list[str]:
    return [path for path, _ in fake.calls]
