"""Published versions over HTTP: engines, replicas and restarts."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from databases import KINDS
from sqlalchemy import text

from agentrl.domain.schemas import InteractionStatus
from agentrl.engine.server_process import free_port
from agentrl.proxy.engines import pool
from agentrl.proxy.engines.pool import EnginePool
from agentrl.store.db import codec
from agentrl.store.tables import interactions as interactions_table
from agentrl.testing import FakeEngine

from ..played_sessions import ADMIN, trained_version

pytestmark = pytest.mark.parametrize("database_kind", KINDS)


def test_a_publish_moves_the_run_once_every_engine_has_the_version(proxy, tmp_path):
    trained_version(proxy, tmp_path)
    answer = proxy.post("/admin/publish", {"version": 1}, headers=ADMIN).json()
    assert answer["version"] == 1
    assert list(answer["stall_s"]) == [proxy.engine.url]
    assert proxy.engine.version == "1"
    assert not proxy.engine.paused
    run = proxy.get("/api/run")
    assert (run["current_version"], run["published_step"]) == (1, 1)
    (step,) = proxy.get(f"/api/runs/{proxy.run_id}/steps")
    assert (step["state"], step["trajectories"], step["metrics"]) == ("published", 4, {"loss": 0.5})
    lineage = proxy.get(f"/api/runs/{proxy.run_id}/steps/1/lineage")
    assert len({row["trajectory_id"] for row in lineage}) == 4
    assert {(row["return"], row["advantage"], row["staleness_max"]) for row in lineage} == {(1.0, 0.5, 0)}


@pytest.mark.long_on("postgresql")
def test_an_engine_that_refuses_the_weights_is_ejected_and_comes_back(proxy, tmp_path):
    trained_version(proxy, tmp_path)
    proxy.engine.fail_next_update = "out of memory"
    refused = proxy.post("/admin/publish", {"version": 1}, headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "publish_failed")
    assert proxy.post("/admin/publish", {"version": 1}, headers=ADMIN).status_code == 200
    assert proxy.get("/api/engines")[0]["state"] == "serving"


@pytest.mark.long_on("sqlite")
def test_two_replicas_that_publish_at_once_update_an_engine_once(proxy, second, tmp_path, until):
    """One changes its weights; the other waits, and then finds nothing to do."""
    trained_version(proxy, tmp_path)
    proxy.engine.update_takes_s = 0.5
    with ThreadPoolExecutor() as threads:
        first = threads.submit(proxy.post, "/admin/publish", {"version": 1}, headers=ADMIN)
        until(lambda: proxy.get("/api/engines")[0]["updater"] == "test-replica")
        other = threads.submit(second.post, "/admin/publish", {"version": 1}, headers=ADMIN)
        answers = [first.result(), other.result()]
    assert [list(answer.json()["transport"].values()) for answer in answers] == [["disk"], ["none"]]
    changes = [path for path, _ in proxy.engine.calls if "pause" in path or "update" in path or "continue" in path]
    assert changes == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    (row,) = proxy.get("/api/engines")
    assert (row["updater"], row["version"], proxy.engine.version) == (None, 1, "1")


def updates(proxy):
    """The versions that the engine was told to load, in order."""
    return [body["weight_version"] for path, body in proxy.engine.calls if path == "/update_weights_from_disk"]


@pytest.fixture
def probed(monkeypatch, until):
    """Wait until the engines were asked so many times for their version."""
    asked = []
    ask = EnginePool.probe

    async def counted(pool, engine):
        await ask(pool, engine)
        asked.append(engine)

    monkeypatch.setattr(EnginePool, "probe", counted)
    monkeypatch.setattr(pool, "WATCH_EVERY_S", 0.05)

    def wait(times):
        seen = len(asked)
        until(lambda: len(asked) >= seen + times)

    return wait


@pytest.mark.long_on("postgresql")
def test_a_publish_of_one_replica_is_not_undone_by_another(proxy, second, probed, tmp_path, until):
    trained_version(proxy, tmp_path)
    probed(4)
    assert proxy.post("/admin/publish", {"version": 1}, headers=ADMIN).status_code == 200
    probed(4)
    assert (updates(proxy), proxy.engine.version) == (["1"], "1")
    proxy.engine.stop()
    proxy.engine.start()  # base weights: both bring it to the run's version, which only one of them published
    until(lambda: proxy.engine.version == "1")
    probed(4)
    assert set(updates(proxy)) == {"1"}


@pytest.mark.long_on("postgresql")
def test_a_version_that_is_being_published_is_not_undone(proxy, probed, tmp_path, until):
    """Another replica has brought it to this engine, and is busy with the next one."""
    trained_version(proxy, tmp_path)
    proxy.engine.version = "1"
    probed(3)
    assert (updates(proxy), proxy.engine.version) == ([], "1")
    with proxy.database.write() as conn:
        conn.execute(text("UPDATE weight_versions SET state = 'rolled_back' WHERE version = 1"))
    until(lambda: proxy.engine.version == "0")


@pytest.mark.long_on("postgresql")
def test_an_older_version_that_takes_a_rolled_back_ones_place_is_not_undone(proxy, probed, tmp_path):
    trained_version(proxy, tmp_path)
    proxy.post("/admin/publish", {"version": 1}, headers=ADMIN)
    with proxy.database.write() as conn:
        conn.execute(text("UPDATE weight_versions SET state = 'rolled_back' WHERE version = 1"))
    proxy.engine.version = "0"  # another replica has begun
    probed(3)
    assert (updates(proxy), proxy.engine.version) == (["1"], "0")


@pytest.mark.long_on("postgresql")
def test_a_restarted_engine_is_brought_to_the_runs_version(proxy, tmp_path, until):
    trained_version(proxy, tmp_path)
    proxy.post("/admin/publish", {"version": 1}, headers=ADMIN)
    proxy.engine.stop()
    proxy.engine.start()  # base weights, version 0
    until(lambda: proxy.engine.version == "1")


def test_a_restarted_proxy_carries_on(proxy, serve, store_url, tmp_path, until):
    trained_version(proxy, tmp_path)
    session = proxy.session()
    first = proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
    with proxy.database.write() as conn:  # a call that the proxy died over
        row = conn.execute(interactions_table.select().limit(1)).one()
        lost = codec.new_id()
        conn.execute(
            interactions_table.insert().values(
                **{**row._mapping, "id": lost, "status": InteractionStatus.RUNNING, "replica": "test-replica"}
            )
        )
    port = free_port()
    with serve(store_url, [proxy.engine.url], port):
        url = f"http://127.0.0.1:{port}"
        with proxy.database.read() as conn:
            status = conn.execute(interactions_table.select().where(interactions_table.c.id == lost)).one()
        assert status.status == InteractionStatus.LOST
        until(lambda: proxy.engine.version == "1")  # it finishes the publish that nobody asked for
        moved = {**session, "base_url": f"{url}/sessions/{session['session_id']}/v1"}
        messages = [
            {"role": "user", "content": "ab"},
            first.choices[0].message.model_dump(),
            {"role": "user", "content": "c"},
        ]
        proxy.sdk(moved).chat.completions.create(model="test", messages=messages)
    delivered = [call for call in proxy.calls(session) if call["status"] == "complete"]
    assert [call["bridged"] for call in delivered] == [False, True]


@pytest.mark.long_on("postgresql")
def test_an_engine_that_dies_leaves_the_pool(proxy, fake_engine: FakeEngine, until):
    until(lambda: [e["state"] for e in proxy.get("/api/engines")] == ["serving"])
    fake_engine.stop()
    until(lambda: proxy.get("/api/engines")[0]["state"] == "dead")
