"""Who counts as silent, on a clock that tests set: outages kill nobody, and no bad session stops the sweep."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from databases import KINDS
from run_records import create_run
from sqlalchemy import func, select

from agentrl.configs.config_files import parse_config
from agentrl.domain.schemas import SessionStatus
from agentrl.domain.tokens import TokenIds
from agentrl.errors import RequestError, StoreUnavailable
from agentrl.proxy.calls import sweep
from agentrl.proxy.calls.sweep import Sweep, Uptime
from agentrl.store import Database, events, heartbeats, runs, silence
from agentrl.store.calls import call_intents, call_outcomes, running_calls
from agentrl.store.db import codec
from agentrl.store.sessions import child_sessions, group_starts, session_limits, session_locks
from agentrl.store.sessions.ends import liveness, sealing, settling
from agentrl.store.tables import interactions as interactions_table
from agentrl.store.tables import sessions as sessions_table

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
TIMEOUT_S = 60.0


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now


class Replica:
    """What the sweep needs of a proxy; `before_write` runs before each write, as a database that makes it wait."""

    def __init__(self, database: Database, run_id: str, limits: session_limits.Limits, replica: str = "me") -> None:
        self.database, self.run_id, self.limits, self.replica = database, run_id, limits, replica
        self.serving: set[str] = set()
        self.forgotten: list[str] = []
        self.before_write: Callable[[Any], None] = lambda unit: None
        self.sweep = Sweep(
            store=cast(Any, self),
            serving=self.serving,
            forget=self.forgotten.append,
            stop_orphans=self.stop_orphans,
            about=dict,
        )

    async def write(self, unit: Any, *args: Any, **kwargs: Any) -> Any:
        self.before_write(unit)
        return self.database.transact(unit, *args, **kwargs)

    async def read(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return self.database.query(query, *args, **kwargs)

    async def stop_orphans(self) -> None:
        """No client has left an answer here."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (sweep, silence, group_starts, liveness, sealing, settling, heartbeats, running_calls, call_outcomes):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def replica(store_url: str, run_config: dict[str, Any]) -> Iterator[Replica]:
    database = Database(store_url)
    with database.read() as conn:
        run_id = runs.by_name(conn, "test").id
    yield Replica(database, run_id, session_limits.Limits.of(parse_config(run_config)))
    database.close()


def start(replica: Replica, owner: str | None = "worker") -> list[str]:
    group = replica.database.transact(
        group_starts.start_group, replica.run_id, replica.limits, [codec.new_id(), codec.new_id()], owner=owner
    )
    return group.session_ids


def statuses(replica: Replica, ids: list[str]) -> set[str]:
    with replica.database.read() as conn:
        return set(conn.scalars(select(sessions_table.c.status).where(sessions_table.c.id.in_(ids))))


def running_call(replica: Replica, session_id: str, served_by: str) -> str:
    call_id = codec.new_id()
    intent = call_intents.Intent(
        id=call_id,
        run_id=replica.run_id,
        session_id=session_id,
        parent_id=None,
        dialect="openai.chat",
        role="main",
        digest="d",
        replica=served_by,
        params={},
        temperature=1.0,
        tools=None,
        fork_reason=None,
        bridged=False,
        distribution_modified=False,
        trainable=True,
        prompt_tokens=1,
        prompt_digest=TokenIds([1]).digest,
        created_at=sweep.time.time(),
    )
    replica.database.transact(call_intents.begin, intent)
    if served_by == replica.replica:
        replica.serving.add(call_id)
    return call_id


def call_status(replica: Replica, call_id: str) -> str:
    with replica.database.read() as conn:
        return str(conn.scalar(select(interactions_table.c.status).where(interactions_table.c.id == call_id)))


async def beat_and_sweep(replica: Replica, uptime: Uptime) -> None:
    """What a replica does at the same time, one after the other."""
    await replica.sweep.beat(uptime)
    await replica.sweep.once(uptime)


async def listen(replica: Replica, uptime: Uptime, clock: Clock, seconds: float) -> None:
    """Sweep in steps without a gap."""
    for _ in range(int(seconds / 10)):
        clock.now += 10
        await beat_and_sweep(replica, uptime)


async def test_a_silent_worker_is_dead_after_its_timeout_and_not_before(replica, clock):
    ids, uptime = start(replica), Uptime(TIMEOUT_S / 4)
    await listen(replica, uptime, clock, TIMEOUT_S - 10)
    assert statuses(replica, ids) == {"open"}
    await listen(replica, uptime, clock, 20)
    assert statuses(replica, ids) == {"abandoned"}
    assert sorted(replica.forgotten) == sorted(ids)


@pytest.mark.long_on("postgresql")
async def test_a_worker_that_beats_is_left_alone(replica, clock):
    ids, uptime = start(replica), Uptime(TIMEOUT_S / 4)
    for _ in range(10):
        replica.database.transact(heartbeats.beat, replica.run_id, "worker", "worker")
        await listen(replica, uptime, clock, TIMEOUT_S / 2)
    assert statuses(replica, ids) == {"open"}


async def test_an_outage_is_not_silence(replica, clock):
    ids, uptime = start(replica), Uptime(TIMEOUT_S / 4)
    clock.now += 10 * TIMEOUT_S  # nobody swept: the proxy hung, or the database was away
    await beat_and_sweep(replica, uptime)
    await listen(replica, uptime, clock, TIMEOUT_S - 10)
    assert statuses(replica, ids) == {"open"}
    await listen(replica, uptime, clock, 20)
    assert statuses(replica, ids) == {"abandoned"}


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("held_up", [heartbeats.beat, silence.check_session])
async def test_a_decision_that_waited_for_the_database_is_made_anew(replica, clock, held_up):
    """The outage begins in the middle of a sweep, where what to do had been decided before it."""
    ids, uptime = start(replica), Uptime(TIMEOUT_S / 4)
    await listen(replica, uptime, clock, TIMEOUT_S / 2)

    def outage(unit: Any) -> None:
        if unit is held_up:
            clock.now += 10 * TIMEOUT_S
            replica.before_write = lambda unit: None

    replica.database.transact(lambda conn: conn.execute(sessions_table.update().values(due_at=clock.now)))
    replica.before_write = outage
    await beat_and_sweep(replica, uptime)
    assert statuses(replica, ids) == {"open"}
    replica.database.transact(heartbeats.beat, replica.run_id, "worker", "worker")  # it waited as well
    await listen(replica, uptime, clock, TIMEOUT_S - 10)
    assert statuses(replica, ids) == {"open"}


async def test_a_running_call_keeps_its_session_until_its_replica_is_silent(replica, clock):
    (alone, *_), uptime = start(replica), Uptime(TIMEOUT_S / 4)
    call = running_call(replica, alone, "other")
    replica.database.transact(heartbeats.beat, replica.run_id, "proxy", "other")
    for _ in range(20):
        replica.database.transact(heartbeats.beat, replica.run_id, "proxy", "other")
        await listen(replica, uptime, clock, TIMEOUT_S / 2)
    assert (statuses(replica, [alone]), call_status(replica, call)) == ({"open"}, "running")
    await listen(replica, uptime, clock, TIMEOUT_S + 10)
    assert call_status(replica, call) == "lost"
    await listen(replica, uptime, clock, 2 * TIMEOUT_S)
    assert statuses(replica, [alone]) == {"abandoned"}


async def test_a_call_that_its_replica_no_longer_serves_becomes_lost(replica, clock):
    """How it ended could not be stored: while its replica lives, nobody else would find it."""
    (session_id, *_), uptime = start(replica, owner=None), Uptime(TIMEOUT_S / 4)
    forgotten, served, others = (running_call(replica, session_id, by) for by in ("me", "me", "other"))
    replica.serving.remove(forgotten)
    clock.now += sweep.FORGOTTEN_S
    await replica.sweep.once(uptime)  # it may be on its way
    assert call_status(replica, forgotten) == "running"
    clock.now += 1
    await replica.sweep.once(uptime)
    assert [call_status(replica, call) for call in (forgotten, served, others)] == ["lost", "running", "running"]


async def test_a_replica_is_not_dead_before_it_could_be_heard(replica, clock):
    (session_id, *_), uptime = start(replica, owner=None), Uptime(TIMEOUT_S / 4)
    replica.database.transact(heartbeats.beat, replica.run_id, "proxy", "other")
    call = running_call(replica, session_id, "other")
    clock.now += 10 * TIMEOUT_S
    await beat_and_sweep(replica, uptime)
    await listen(replica, uptime, clock, TIMEOUT_S - 10)
    assert call_status(replica, call) == "running"
    await listen(replica, uptime, clock, 20)
    assert call_status(replica, call) == "lost"


async def test_the_calls_of_another_run_are_not_touched(replica, clock):
    def other_run(conn: Any) -> str:
        return create_run(conn, name="other", key="other-key")

    (session_id, *_) = start(replica, owner=None)
    call = running_call(replica, session_id, "me")
    other = replica.database.transact(other_run)
    assert replica.database.transact(running_calls.declare_lost, other, "me") == 0
    assert call_status(replica, call) == "running"
    assert replica.database.transact(running_calls.declare_lost, replica.run_id, "me") == 1


async def test_one_bad_session_does_not_stop_the_sweep(replica, clock, monkeypatch, caplog):
    ids, uptime = start(replica), Uptime(TIMEOUT_S / 4)
    look = liveness.check_due_session

    def bad(conn: Any, session_id: str, *args: Any, **kwargs: Any) -> bool:
        if session_id == ids[0]:
            session_locks.lock(conn, "nobody")  # 404
        return look(conn, session_id, *args, **kwargs)

    monkeypatch.setattr(liveness, "check_due_session", bad)
    with caplog.at_level(logging.ERROR):
        await listen(replica, uptime, clock, TIMEOUT_S + 20)
    assert statuses(replica, ids[1:]) == {"abandoned"}
    assert statuses(replica, ids[:1]) == {"open"}
    assert ids[0] in caplog.text


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("failure", [RecursionError("too deep"), KeyError("x"), RequestError(404, "no", code="no")])
async def test_any_failure_of_one_session_is_recorded_and_retried_later(replica, clock, monkeypatch, caplog, failure):
    ids, uptime = start(replica), Uptime(TIMEOUT_S / 4)
    look, looked = liveness.check_due_session, []

    def bad(conn: Any, session_id: str, *args: Any, **kwargs: Any) -> bool:
        looked.append(session_id)
        if session_id == ids[0]:
            raise failure
        return look(conn, session_id, *args, **kwargs)

    monkeypatch.setattr(liveness, "check_due_session", bad)
    await listen(replica, uptime, clock, TIMEOUT_S + 20)
    assert statuses(replica, ids[1:]) == {"abandoned"}
    assert looked.count(ids[0]) == 1, "it is put off"
    await listen(replica, uptime, clock, sweep.PUT_OFF_S)
    assert looked.count(ids[0]) == 2, "and told of once"
    assert f"session {ids[0]} cannot be dealt with" in caplog.text
    with replica.database.read() as conn:
        (event,) = events.of_run(conn, replica.run_id, silence.STUCK)
    assert event.data == {"session_id": ids[0], "error": repr(failure)}
    monkeypatch.setattr(liveness, "check_due_session", look)
    await listen(replica, uptime, clock, sweep.PUT_OFF_S)
    assert statuses(replica, ids) == {"abandoned"}


async def test_a_database_that_is_away_is_asked_again(replica, clock, caplog):
    ids, uptime = start(replica), Uptime(TIMEOUT_S / 4)

    def away(unit: Any) -> None:
        if unit is silence.check_session:
            raise StoreUnavailable("away")

    replica.before_write = away
    with caplog.at_level(logging.ERROR):
        await listen(replica, uptime, clock, TIMEOUT_S + 10)
    assert all(f"session {session_id}: away" in caplog.text for session_id in ids)
    replica.before_write = lambda unit: None
    await listen(replica, uptime, clock, 10)
    assert statuses(replica, ids) == {"abandoned"}


async def test_many_overdue_sessions_are_all_looked_at(replica, clock):
    ids = [session_id for _ in range(4) for session_id in start(replica)]
    with replica.database.write() as conn:
        conn.execute(sessions_table.update().values(created_at=0.0, due_at=0.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "TOGETHER", 3)
        await beat_and_sweep(replica, Uptime(TIMEOUT_S / 4))
    assert statuses(replica, ids) == {"failed"}


@pytest.mark.long_on("postgresql")
async def test_one_pass_settles_a_tree_that_takes_many_transactions(replica, clock):
    """What a transaction leaves is due at once."""
    (root, *_), limits = start(replica, owner=None), replica.limits
    for _ in range(3 * settling.MOST_SETTLED):
        replica.database.transact(child_sessions.start_child, root, limits, codec.new_id(), {})
    replica.database.transact(sealing.end, root, SessionStatus.COMPLETED, None, limits)
    tree = sessions_table.c.root_session_id == root
    unbuilt = select(func.count()).select_from(sessions_table).where(tree, sessions_table.c.built.is_(False))
    with replica.database.read() as conn:
        assert conn.scalar(unbuilt) == 2 * settling.MOST_SETTLED + 1
    await beat_and_sweep(replica, Uptime(TIMEOUT_S / 4))
    with replica.database.read() as conn:
        assert conn.scalar(unbuilt) == 0


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("busy", ["a call", pytest.param("a heartbeat", marks=pytest.mark.long), "a running call"])
async def test_a_sub_agent_at_work_keeps_its_parent(replica, clock, busy):
    """And its own silence is its parent's business: it ends with it."""
    (parent, *_), uptime = start(replica, owner=None), Uptime(TIMEOUT_S / 4)
    limits = replica.limits
    (sub,) = replica.database.transact(child_sessions.start_child, parent, limits, codec.new_id(), {}).session_ids
    (idle,) = replica.database.transact(child_sessions.start_child, parent, limits, codec.new_id(), {}).session_ids
    if busy == "a running call":
        running_call(replica, sub, "me")
    for _ in range(int(2 * limits.session_timeout_s / 30)):
        if busy == "a call":
            replica.database.transact(running_calls.fail, running_call(replica, sub, "me"), "aborted", "went away")
        elif busy == "a heartbeat":
            replica.database.transact(liveness.touch, sub)
        await listen(replica, uptime, clock, 30)
    assert statuses(replica, [parent, sub, idle]) == {"open"}
    replica.database.transact(sealing.end, parent, SessionStatus.COMPLETED, None, limits)
    assert statuses(replica, [sub, idle]) <= {"completed", "closing"}


@pytest.mark.long_on("postgresql")
async def test_one_pass_deals_with_every_session_that_is_due_and_asks_for_bad_ones_once(replica, clock, monkeypatch):
    ids = [i for _ in range(4) for i in start(replica)]
    bad = sorted(ids)[:3]
    with replica.database.write() as conn:
        conn.execute(sessions_table.update().values(created_at=0.0, due_at=1.0))
        conn.execute(sessions_table.update().where(sessions_table.c.id.in_(bad)).values(due_at=0.0))
    monkeypatch.setattr(sweep, "PAGE", 2)
    look, looked = liveness.check_due_session, []

    def some_are_bad(conn: Any, session_id: str, *args: Any, **kwargs: Any) -> bool:
        looked.append(session_id)
        return look(conn, "nobody" if session_id in bad else session_id, *args, **kwargs)

    monkeypatch.setattr(liveness, "check_due_session", some_are_bad)
    await beat_and_sweep(replica, Uptime(TIMEOUT_S / 4))
    assert sorted(looked) == sorted(ids)
    assert statuses(replica, [i for i in ids if i not in bad]) == {"failed"}
    assert statuses(replica, bad) == {"open"}


async def test_a_session_that_another_replica_has_just_looked_at_is_left_to_it(replica, clock):
    (session_id, *_) = start(replica)
    with replica.database.write() as conn:
        assert not liveness.check_due_session(conn, session_id, replica.limits, heard_since=0.0)  # not due
        conn.execute(sessions_table.update().values(created_at=0.0))
        assert not liveness.check_due_session(conn, session_id, replica.limits, heard_since=0.0)
    assert statuses(replica, [session_id]) == {"open"}
