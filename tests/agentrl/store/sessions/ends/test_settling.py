"""Settling sessions: concurrent ends, and trees that are settled a few sessions at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import sleep

import pytest
from concurrent_writes import child_of, counters, meanwhile, state
from databases import Databases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from play import begin_call, call, end, open_group
from run_records import create_run
from session_trees import grown, old_tree, sweep_to_the_end, trees
from sqlalchemy import func, select
from thoroughness import examples

from agentrl.domain.schemas import SessionStatus
from agentrl.store import Database, family
from agentrl.store.audit import run_audit
from agentrl.store.calls import running_calls
from agentrl.store.sessions.ends import liveness, sealing, settling
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import groups, trajectories
from agentrl.store.tables import sessions as sessions_table
from agentrl.store.training import returns, rewards


def test_a_reward_of_the_parent_reaches_a_child_that_is_built_meanwhile(db, run_id, limits):
    """The child's builder reads the rewards either before this one (then it is refreshed) or after it."""
    (root, _) = open_group(db, run_id, limits).session_ids
    child = child_of(db, root, limits)
    with db.write() as conn:
        call(conn, run_id, root)
        begin_call(conn, run_id, child, replica="dead")
        call(conn, run_id, child)
        sealing.end(conn, root, SessionStatus.COMPLETED, None, limits)  # built; the child waits for its running call
        running_calls.declare_lost(conn, run_id, "dead")

    def reward(conn):
        return rewards.add(conn, root, value=1.0, discount=1.0)

    meanwhile(db, reward, lambda conn: settling.settle(conn, child, limits))
    with db.read() as conn:
        found = conn.execute(
            select(trajectories.c.state, trajectories.c["return"]).where(trajectories.c.session_id == child)
        ).one()
    assert tuple(found) == ("ready", 1.0)


@pytest.mark.parametrize("round_", [0, 1, *(pytest.param(round_, marks=pytest.mark.long) for round_ in range(2, 5))])
def test_sessions_of_a_group_that_end_together_settle_it_once_without_a_deadlock(db, run_id, limits, round_):
    """Not repeated by anybody, so a deadlock would be an error here."""
    many = replace(limits, group_size=6)
    new = open_group(db, run_id, many, 6)
    with db.write() as conn:
        for session_id in new.session_ids:
            call(conn, run_id, session_id)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
    together = threading.Barrier(6)

    def end_one(session_id: str) -> str:
        together.wait()
        return end(db, session_id, many)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(end_one, new.session_ids)) == ["completed"] * 6
    assert state(db, new.group_id) == "ready"
    assert counters(db, run_id) == (1, 0, 0)


@pytest.mark.long_on("sqlite")
def test_two_replicas_settle_the_sessions_of_groups_through_their_group_commits(db, database_url, run_id, limits):
    """Each commits many units at once, whose locks cross: deadlocks are repeated, and nothing happens twice."""
    many = replace(limits, group_size=8, groups_per_step=100)
    started = [open_group(db, run_id, many, 8) for _ in range(6)]
    everybody = [session_id for new in started for session_id in new.session_ids]
    with db.write() as conn:
        for session_id in everybody:
            call(conn, run_id, session_id)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
    replicas = [Database(database_url), Database(database_url)]
    together = threading.Barrier(8)

    def end_some(i: int) -> list[str]:
        """Every session is ended by both replicas, in different orders."""
        together.wait()
        mine = everybody[i // 2 :: 4][:: 1 if i % 2 else -1]
        ends = [replicas[i % 2].submit(sealing.end, sid, SessionStatus.COMPLETED, None, many) for sid in mine]
        return [one.result() for one in ends]

    with ThreadPoolExecutor(8) as pool:
        assert {status for of_one in pool.map(end_some, range(8)) for status in of_one} == {"completed"}
    for replica in replicas:
        replica.close()
    assert [state(db, new.group_id) for new in started] == ["ready"] * 6
    assert counters(db, run_id) == (6, 0, 0)
    with db.read() as conn:
        assert list(run_audit.scan(conn, run_id)) == []


LET_IT_WAIT_S = 0.3  # for a thread to reach a lock that the test holds


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parents=trees,
    reward=st.sampled_from([None, 0, 3]),
    ends=st.lists(st.tuples(st.integers(0, 23), st.sampled_from(["completed", "failed", "abandoned"])), max_size=6),
)
def test_any_tree_ends_by_the_rules_when_few_sessions_are_settled_at_once(
    databases: Databases, monkeypatch, parents, ends, reward
):
    """The model: what is open takes the end of the nearest session above it that ends; all is built in the end."""
    monkeypatch.setattr(settling, "MOST_SETTLED", 3)
    limits = LIMITS
    with databases.lent("sqlite") as url:
        db = Database(url)
        run_id = new_run(db)
        ids = grown(db, run_id, limits, parents)
        status = ["open"] * len(ids)

        def end_all(i: int, how: str) -> None:
            if status[i] == "open" or (how == "abandoned" and status[i] == "completed"):
                status[i] = how
                for j in range(1, len(ids)):
                    if parents[j] == i:
                        end_all(j, how)

        with db.write() as conn:
            for session_id in ids:
                call(conn, run_id, session_id)
            if reward is not None:
                rewards.add(conn, ids[min(reward, len(ids) - 1)], value=1.0, discount=1.0)
        for i, how in [(i % len(ids), how) for i, how in ends if i % len(ids)] + [(0, "completed")]:
            end_all(i, how)
            db.transact(sealing.end, ids[i], SessionStatus(how), None, limits)
        sweep_to_the_end(db, run_id, limits)
        with db.read() as conn:
            rows = {row.id: row for row in conn.execute(select(sessions_table))}
            assert [rows[session_id].status for session_id in ids] == status
            assert all(row.built for row in rows.values())
            assert {family.root_of(row) for row in rows.values()} == {ids[0]}
            assert set(returns.of_sessions(conn, ids, 1.0)) == set(ids)
            assert conn.execute(select(groups.c.state)).scalar_one() != "running"
            trained = set(conn.execute(select(trajectories.c.session_id)).scalars())
            assert list(run_audit.scan(conn, run_id)) == []
        gone = [s in ("failed", "abandoned") for s in status]
        assert trained == {
            ids[i] for i in range(len(ids)) if not gone[i] and not any(gone[j] for j in above_of(parents, i))
        }
        db.close()


def above_of(parents: tuple[int, ...], i: int) -> list[int]:
    found = []
    while i:
        i = parents[i]
        found.append(i)
    return found


def test_unbuilt_sessions_of_a_tree_are_locked_before_the_group(db, run_id, limits):
    """A reward of a session that is left holds it, and then needs the group: a builder that has that must not wait."""
    patient = replace(limits, reward_timeout_s=3600.0)
    ids = old_tree(db, run_id, limits, [0] * (settling.MOST_SETTLED + 2))
    with db.write() as conn:
        call(conn, run_id, ids[0])
        assert sealing.end(conn, ids[0], SessionStatus.COMPLETED, None, patient) == "completed"
        conn.execute(sessions_table.update().values(due_at=0.0))
    with ThreadPoolExecutor(1) as pool:
        with db.write() as conn:
            conn.execute(select(sessions_table.c.id).where(sessions_table.c.id == ids[-1]).with_for_update()).all()
            builder = pool.submit(
                db.transact, lambda conn: liveness.check_due_session(conn, ids[0], limits, heard_since=0.0)
            )
            sleep(LET_IT_WAIT_S)
            conn.execute(select(groups.c.id).with_for_update(nowait=True)).all()  # refused where somebody has it
        assert builder.result() is False
    with db.read() as conn:
        built = select(func.count()).select_from(sessions_table).where(sessions_table.c.built)
        assert conn.execute(built).scalar_one() == settling.MOST_SETTLED


def new_run(db: Database) -> str:
    with db.write() as conn:
        return create_run(conn, name="r", task_data=[{"n": 1}], key="k", steps=5)


LIMITS = Limits(
    group_size=1,
    min_group_size=1,
    max_concurrent_groups=4,
    max_staleness=1,
    groups_per_step=1,
    turn_discount=1.0,
    reward_timeout_s=0.0,
    end_grace_s=30.0,
    session_timeout_s=900.0,
    session_max_s=5000.0,
    heartbeat_timeout_s=60.0,
    max_subagent_depth=30,
)
