"""Versions as adapters: published while engines sample on, named by each call, unloaded when no call is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving import add_version

from agentrl.domain.tokens import TokenIds
from agentrl.engine.sglang_client import EngineClient
from agentrl.errors import EngineError
from agentrl.proxy.calls.sampling.sample_segment import Sampled
from agentrl.proxy.calls.sampling.sampling import SampleRequest, sample
from agentrl.proxy.engines import adapters
from agentrl.proxy.engines.adapters import Adapters
from agentrl.proxy.engines.engine_records import EngineRecords
from agentrl.proxy.engines.engine_state import Engine, EngineState
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.version_delivery import RecordedFolder
from agentrl.store.engine_rows import Member
from agentrl.store.fleet import News
from agentrl.store.training.publishes import Wanted
from agentrl.testing import FakeEngine, Reply


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


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def fakes() -> Iterator[list[FakeEngine]]:
    with FakeEngine() as one, FakeEngine() as two:
        yield [one, two]


@pytest.fixture
async def make(store: Store) -> AsyncIterator[Callable[..., EnginePool]]:
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:

        def build(*fakes: FakeEngine) -> EnginePool:
            clients = [stack.enter_context(closing(EngineClient(fake.url, http))) for fake in fakes]
            return EnginePool(clients, store, adapters=Adapters(store.oldest_call))

        yield build


@pytest.fixture
async def pool(make: Callable[..., EnginePool], fakes: list[FakeEngine]) -> EnginePool:
    """Both engines serve."""
    pool = make(*fakes)
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    return pool


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


async def test_base_weights_need_no_adapter(pool: EnginePool, fakes: list[FakeEngine]) -> None:
    assert spans(await answer(pool)) == [(0, 0, 4)]
    assert "lora_path" not in (fakes[0].requests + fakes[1].requests)[0]
    assert [fake.calls for fake in fakes] == [[], []]


async def test_a_publish_pauses_no_engine_and_calls_keep_their_adapter(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    pool = make(fakes[0])
    await probe(pool)
    await publish(pool, store, 1)
    fakes[0].enqueue(Reply([5, 6, 7, 2], hold_after=2))
    under_way = asyncio.create_task(answer(pool))
    await fakes[0].until(lambda: fakes[0].holding == 1)
    await publish(pool, store, 2)
    assert spans(await answer(pool)) == [(2, 0, 4)]
    fakes[0].release()
    assert spans(await under_way) == [(1, 0, 4)]
    assert [request["lora_path"] for request in fakes[0].requests] == ["v1-step", "v2-step"]
    assert paths(fakes[0]) == ["/load_lora_adapter"] * 2


async def test_another_replica_follows_once_the_run_has_moved(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    ours, theirs = make(fakes[0]), make(fakes[0])
    await probe(ours)
    await publish(theirs, store, 1)
    await probe(ours)
    store.pending = {2}
    await theirs.load(theirs.engines[0], 2)
    await probe(ours)
    assert ours.engines[0].version == 1
    assert spans(await answer(ours)) == [(1, 0, 4)]
    store.version, store.pending = 2, set()
    await probe(ours)
    assert spans(await answer(ours)) == [(2, 0, 4)]
    assert paths(fakes[0]) == ["/load_lora_adapter"] * 2


async def test_a_restarted_engine_gets_the_adapter_before_it_serves(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 3)
    fakes[0].stop()
    await probe(pool)
    assert states(pool) == ["dead", "serving"]
    fakes[0].start()
    assert fakes[0].adapters == {}
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    assert list(fakes[0].adapters) == ["v3-step"]


async def test_a_restart_between_two_probes_samples_nothing(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    pool = make(fakes[0])
    await publish(pool, store, 3)
    fakes[0].stop()
    fakes[0].start()
    with suppress(EngineError):  # the connection that was kept open is gone
        await pool.engines[0].client.model_info()
    asking = asyncio.create_task(answer(pool))
    while states(pool) != ["dead"]:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert "has lost adapter v3-step" in (pool.engines[0].error or "")
    await pool.probe(pool.engines[0])
    assert spans(await asking) == [(3, 0, 4)]


async def test_tokens_of_a_dead_engine_are_kept_after_a_publish(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    """Each part of the answer is of the adapter that it named."""
    await publish(pool, store, 1)
    home = await pool.acquire("s", time.monotonic() + 1)
    pool.release(home)
    first, second = fakes if home is pool.engines[0] else fakes[::-1]
    first.enqueue(Reply([5, 6, 7, 2], hold_after=2, drop_after=3))
    second.enqueue([9, 2])
    asking = asyncio.create_task(answer(pool))
    await first.until(lambda: first.holding == 1)
    await publish(pool, store, 2)
    first.release()
    sampled = await asking
    assert (sampled.output_ids, spans(sampled)) == ([5, 6, 7, 9, 2], [(1, 0, 3), (2, 3, 5)])


async def test_an_engine_that_refuses_an_adapter_keeps_the_one_it_has(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 1)
    fakes[0].fail_next_update = "no such tensor"
    with pytest.raises(EngineError, match="no such tensor"):
        await pool.load(pool.engines[0], 2)
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    assert [list(fake.adapters) for fake in fakes] == [["v1-step"], ["v1-step"]]
    assert spans(await answer(pool)) == [(1, 0, 4)]


async def test_an_engine_that_cannot_load_the_adapter_serves_after_it_can(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 1)
    store.version, fakes[0].fail_next_update = 2, "the disk is away"
    await probe(pool)
    assert states(pool) == ["dead", "serving"]
    assert "the disk is away" in (pool.engines[0].error or "")
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    assert list(fakes[0].adapters) == ["v1-step", "v2-step"]


async def test_an_engine_without_room_for_adapters_says_so(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    fakes[0].takes_adapters = False
    store.version = 1
    pool = make(fakes[0])
    await probe(pool)
    assert states(pool) == ["dead"]
    assert "--enable-lora" in (pool.engines[0].error or "")


async def test_two_replicas_can_load_an_adapter_at_once(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is told that the name is taken; it must not unload what it finds."""
    pool = make(fakes[0])
    load = EngineClient.load_adapter

    async def overtaken(client: EngineClient, name: str, path: str) -> None:
        await load(client, name, path)
        await load(client, name, path)

    monkeypatch.setattr(EngineClient, "load_adapter", overtaken)
    await publish(pool, store, 1)
    assert list(fakes[0].adapters) == ["v1-step"]
    assert paths(fakes[0]) == ["/load_lora_adapter"] * 2


async def test_whole_weights_of_another_run_give_way_to_the_base_first(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    fakes[0].version = "12"
    store.version = 3
    pool = make(fakes[0])
    await probe(pool)
    assert states(pool) == ["serving"]
    assert (fakes[0].version, fakes[0].model_path) == ("0", str(store.root))
    assert spans(await answer(pool)) == [(3, 0, 4)]


async def test_an_engine_left_paused_continues_with_the_adapter(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 1)
    await pool.engines[0].client.pause()
    store.claimed, store.left = {fakes[0].url: "other"}, {fakes[0].url}
    await probe(pool)
    assert states(pool) == ["updating", "serving"]
    store.claimed = {}
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    assert not fakes[0].paused


async def test_an_adapter_is_loaded_while_another_replica_claims_the_engine(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    """Nothing is changed that both could change."""
    store.claimed = {fake.url: "other" for fake in fakes}
    await publish(pool, store, 1)
    assert spans(await answer(pool)) == [(1, 0, 4)]
    store.version = 2
    await probe(pool)
    assert spans(await answer(pool)) == [(2, 0, 4)]


async def test_a_publish_waits_while_another_replica_changes_the_weights(
    pool: EnginePool, fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.claimed = {fakes[0].url: "other"}
    fakes[0].version = "7"
    await probe(pool)
    assert states(pool) == ["updating", "serving"]
    assert "/pause_generation" not in [path for path, _ in fakes[0].calls]
    store.claimed = {}
    await probe(pool)
    assert states(pool) == ["serving", "serving"]
    assert fakes[0].version == "0"


# -- unloading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes until every replica has noticed."""
    monkeypatch.setattr(adapters, "SLACK_S", 0.0)


async def loaded_after_probes(pool: EnginePool, fake: FakeEngine) -> list[str]:
    for _ in range(3):  # the first one notices
        await probe(pool)
        await asyncio.sleep(0.01)
    return list(fake.adapters)


@pytest.mark.usefixtures("at_once")
async def test_an_adapter_is_unloaded_once_no_call_can_use_it(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 1)
    store.began = [time.time()]  # a call, here or at another replica
    await publish(pool, store, 2)
    assert await loaded_after_probes(pool, fakes[0]) == ["v1-step", "v2-step"]
    store.began = [time.time()]  # it has ended, and a later one began
    assert await loaded_after_probes(pool, fakes[0]) == ["v2-step"]
    await publish(pool, store, 3)
    store.began = []
    assert await loaded_after_probes(pool, fakes[0]) == ["v3-step"]
    assert spans(await answer(pool)) == [(3, 0, 4)]


async def test_an_older_adapter_stays_loaded_for_a_grace_period(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    await publish(pool, store, 1)
    await publish(pool, store, 2)
    assert await loaded_after_probes(pool, fakes[0]) == ["v1-step", "v2-step"]


@pytest.mark.usefixtures("at_once")
async def test_a_restarted_replica_unloads_only_its_predecessors_adapters(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store, tmp_path: Path
) -> None:
    pool = make(fakes[0])
    for version in (1, 2):
        await publish(pool, store, version)
    fakes[0].adapters |= {"v1-other": str(tmp_path.parent / "v1-other"), "mine": str(tmp_path / "mine")}
    assert await loaded_after_probes(make(fakes[0]), fakes[0]) == ["v2-step", "v1-other", "mine"]


@pytest.mark.usefixtures("at_once")
async def test_a_version_that_is_being_published_elsewhere_stays(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store
) -> None:
    ours, theirs = make(fakes[0]), make(fakes[0])
    await publish(ours, store, 1)
    await theirs.load(theirs.engines[0], 2)
    assert await loaded_after_probes(ours, fakes[0]) == ["v1-step", "v2-step"]


@pytest.mark.usefixtures("at_once")
async def test_after_a_rollback_the_older_version_serves_again(
    pool: EnginePool, fakes: list[FakeEngine], store: Store
) -> None:
    for version in (1, 2, 1):
        await publish(pool, store, version)
    assert spans(await answer(pool)) == [(1, 0, 4)]
    await publish(pool, store, 3)
    assert await loaded_after_probes(pool, fakes[0]) == ["v3-step"]


@pytest.mark.usefixtures("at_once")
async def test_an_engine_that_keeps_a_caller_waiting_is_not_dead(
    make: Callable[..., EnginePool], fakes: list[FakeEngine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that slept through the change still uses the adapter; its call is not disturbed."""
    monkeypatch.setattr(adapters, "UNLOAD_TIMEOUT_S", 0.01)
    pool, asleep = make(fakes[0]), make(fakes[0])
    await publish(pool, store, 1)
    await probe(asleep)
    fakes[0].enqueue(Reply([5, 6, 2], hold_after=1))
    under_way = asyncio.create_task(answer(asleep))
    await fakes[0].until(lambda: fakes[0].holding == 1)
    await publish(pool, store, 2)
    assert await loaded_after_probes(pool, fakes[0]) == ["v2-step"]
    assert pool.engines[0].state is EngineState.SERVING
    fakes[0].release()
    assert spans(await under_way) == [(1, 0, 3)]


# -- through the proxy -------------------------------------------------------------------------------------------------


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    run_config["trainer"]["lora"] = {"rank": 4, "publish": "adapter"}
    return run_config


def write(folder: Path, value: float) -> str:
    """An adapter's folder, and its checksum."""
    import numpy as np
    from safetensors.numpy import save_file

    from agentrl import weights_folder

    folder.mkdir(exist_ok=True)
    save_file({"a": np.full(3, value, np.float32)}, folder / weights_folder.ADAPTER)
    return weights_folder.checksum(folder / weights_folder.ADAPTER)


def test_a_published_adapter_is_recorded_with_each_call(proxy: Any, tmp_path: Path) -> None:
    admin = {"Authorization": "Bearer admin-key"}
    for version in (1, 2):
        folder = tmp_path / f"v{version}-s"
        add_version(proxy.database, proxy.run_id, version, folder, write(folder, version))
        assert proxy.post("/admin/publish", {"version": version}, headers=admin).status_code == 200
        session = proxy.session()
        proxy.engine.enqueue(proxy.says("ab"))
        asked = {"messages": [{"role": "user", "content": "one"}]}
        proxy.post(f"/sessions/{session['session_id']}/v1/chat/completions", asked).raise_for_status()
        (call,) = proxy.calls(session)
        assert [span[0] for span in call["version_spans"]] == [version]
        assert proxy.engine.requests[-1]["lora_path"] == folder.name
    assert "/pause_generation" not in [path for path, _ in proxy.engine.calls]
    assert proxy.get("/api/engines")[0]["version"] == 2


def test_an_adapter_that_was_exchanged_is_not_loaded(proxy: Any, tmp_path: Path) -> None:
    folder = tmp_path / "v1-s"
    add_version(proxy.database, proxy.run_id, 1, folder, write(folder, 1.0))
    write(folder, 2.0)
    refused = proxy.post("/admin/publish", {"version": 1}, headers={"Authorization": "Bearer admin-key"})
    assert refused.status_code == 503
    assert "adapter_model.safetensors are not those that the trainer recorded" in refused.text
    assert proxy.engine.adapters == {}
    assert proxy.get("/api/engines")[0]["state"] == "serving"


def test_a_publish_that_no_engine_took_names_the_reason(proxy: Any, tmp_path: Path) -> None:
    folder = tmp_path / "v1-s"
    add_version(proxy.database, proxy.run_id, 1, folder, write(folder, 1.0))
    proxy.engine.fail_next_update = "the disk is away"
    refused = proxy.post("/admin/publish", {"version": 1}, headers={"Authorization": "Bearer admin-key"})
    assert refused.status_code == 503
    assert "no engine took version 1: " in refused.text
    assert "the disk is away" in refused.text
