"""Trees of sub-agents' sessions: limits, ends in small transactions, and trees larger than today's limits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
from databases import KINDS, Databases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from play import call, open_group
from run_records import create_run
from sqlalchemy import event, func, insert, select
from thoroughness import examples

from agentrl.domain.schemas import SessionStatus
from agentrl.errors import RequestError
from agentrl.store import Database, family
from agentrl.store.audit import run_audit
from agentrl.store.db import codec
from agentrl.store.family import Family
from agentrl.store.sessions import child_sessions
from agentrl.store.sessions.ends import liveness, sealing, settling
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import groups, trajectories
from agentrl.store.tables import sessions as sessions_table
from agentrl.store.training import returns, rewards

LET_IT_WAIT_S = 0.3  # for a thread to reach a lock that the test holds
trees = st.integers(1, 24).flatmap(lambda n: st.tuples(*(st.integers(0, max(0, i - 1)) for i in range(n))))
"""For each session but the root, the number of its parent."""


def child(db: Database, parent_id: str, limits: Limits) -> str:
    with db.write() as conn:
        return child_sessions.start_child(conn, parent_id, limits, codec.new_id(), {}).session_ids[0]


def grown(db: Database, run_id: str, limits: Limits, parents: tuple[int, ...]) -> list[str]:
    """A group whose only session has sub-agents, by the number of each one's parent."""
    ids = list(open_group(db, run_id, limits, 1).session_ids)
    for parent in parents[1:]:
        ids.append(child(db, ids[parent], limits))
    return ids


def old_tree(db: Database, run_id: str, limits: Limits, parents: list[int]) -> list[str]:
    """The same, of any size, as rows that are there."""
    ids = list(open_group(db, run_id, limits, 1).session_ids)
    depths = [0]
    with db.write() as conn:
        root = conn.execute(select(sessions_table).where(sessions_table.c.id == ids[0])).one()._mapping
        for parent in parents:
            ids.append(codec.new_id(after=ids[-1]))
            depths.append(depths[parent] + 1)
        rows = [
            {
                **root,
                "id": ids[i],
                "parent_session_id": ids[parent],
                "root_session_id": ids[0],
                "depth": depths[i],
                "sample_index": i,
                "key_hash": ids[i],
            }
            for i, parent in enumerate(parents, start=1)
        ]
        conn.execute(insert(sessions_table), rows)
    return ids


@contextmanager
def counted(db: Database) -> Iterator[SimpleNamespace]:
    """What the block executes: statements, and sessions that are built."""
    seen = SimpleNamespace(statements=0, built=0)

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        seen.statements += 1
        seen.built += statement.startswith("UPDATE sessions SET built")

    event.listen(db.engine, "before_cursor_execute", note)
    yield seen
    event.remove(db.engine, "before_cursor_execute", note)


def sweep_to_the_end(db: Database, run_id: str, limits: Limits, seen: SimpleNamespace | None = None) -> None:
    """Look at what is due, each session in a transaction of its own; no transaction does more than its share."""
    while due := db.query(liveness.due, run_id):
        for session_id in due:
            if seen is not None:
                seen.statements = seen.built = 0
            db.transact(liveness.check_due_session, session_id, limits, heard_since=0.0)
            if seen is not None:
                assert seen.built <= settling.MOST_SETTLED
                assert seen.statements <= 20 * settling.MOST_SETTLED


@given(parents=trees)
def test_ancestors_and_descendants_match_the_parent_links(parents):
    def parent_of(i: int) -> int | None:
        return None if i == 0 else parents[i]

    def chain(i: int) -> list[str]:
        found, above = [], parent_of(i)
        while above is not None:
            found.append(str(above))
            above = parent_of(above)
        return found

    depth = {i: len(chain(i)) for i in range(len(parents))}
    rows: list[Any] = [
        SimpleNamespace(id=str(i), parent_session_id=None if i == 0 else str(parents[i]))
        for i in sorted(depth, key=lambda i: (depth[i], str(i)))
    ]
    tree = Family(rows)
    for i in depth:
        assert [row.id for row in tree.above(str(i))] == chain(i)
        below = [row.id for row in tree.below(str(i))]
        assert sorted(below) == sorted(str(j) for j in depth if str(i) in chain(j))
        assert [depth[int(j)] for j in below] == sorted(depth[int(j)] for j in below)


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parents=trees,
    reward=st.sampled_from([None, 0, 3]),
    ends=st.lists(st.tuples(st.integers(0, 23), st.sampled_from(["completed", "failed", "abandoned"])), max_size=6),
)
def test_any_tree_ends_as_the_rules_say_however_few_are_settled_at_once(
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
            assert run_audit.violations(conn, run_id) == []
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


def test_a_tree_has_so_many_levels(db, run_id, limits):
    bounded = replace(limits, max_subagent_depth=2)
    (root, _) = open_group(db, run_id, bounded).session_ids
    below = child(db, child(db, root, bounded), bounded)
    with pytest.raises(RequestError) as refused:
        child(db, below, bounded)
    assert (refused.value.status, refused.value.code) == (422, "subagents_too_deep")
    with pytest.raises(RequestError, match="at most 0 levels"):
        child(db, root, replace(limits, max_subagent_depth=0))


def test_a_tree_has_so_many_sub_agents_of_all_levels_and_each_root_its_own(db, run_id, limits):
    bounded = replace(limits, max_subagents_per_session=3)
    first, second = open_group(db, run_id, bounded).session_ids
    below = child(db, first, bounded)
    child(db, below, bounded)
    child(db, below, bounded)
    for parent in (first, below):
        with pytest.raises(RequestError) as refused:
            child(db, parent, bounded)
        assert (refused.value.status, refused.value.code) == (422, "too_many_subagents")
    child(db, second, bounded)


@pytest.mark.parametrize("shape", ["deep", "wide"])
def test_of_a_thousand_sub_agents_a_run_takes_as_many_as_it_says_by_default(db, run_id, limits, shape):
    (root, _) = open_group(db, run_id, limits).session_ids
    refusals: list[str] = []
    with db.write() as conn:
        parent = root
        for _ in range(1000):
            try:
                (below,) = child_sessions.start_child(conn, parent, limits, codec.new_id(), {}).session_ids
            except RequestError as refused:
                refusals.append(refused.code)
            else:
                parent = below if shape == "deep" else root
    taken = 8 if shape == "deep" else 256
    assert refusals == ["subagents_too_deep" if shape == "deep" else "too_many_subagents"] * (1000 - taken)


@pytest.mark.parametrize(("shape", "n"), [("deep", 1050), ("wide", 300)])
@pytest.mark.parametrize("database_kind", KINDS[:1])
def test_a_tree_of_an_older_version_is_swept_without_recursion_and_in_small_transactions(db, run_id, limits, shape, n):
    ids = old_tree(db, run_id, limits, [i if shape == "deep" else 0 for i in range(n)])
    with db.write() as conn:
        conn.execute(sessions_table.update().values(created_at=0.0, due_at=0.0))
        rewards.add(conn, ids[0], value=1.0, discount=1.0)
    with counted(db) as seen:
        sweep_to_the_end(db, run_id, limits, seen)
    with db.read() as conn:
        built = select(sessions_table.c.status, func.count()).where(sessions_table.c.built).group_by("status")
        assert [tuple(row) for row in conn.execute(built)] == [("failed", n + 1)]
        assert returns.of_sessions(conn, ids[-1:], 1.0)[ids[-1]].episode_return == 0.0


@pytest.mark.parametrize("database_kind", KINDS[:1])
def test_the_end_of_a_large_tree_seals_all_of_it_and_settles_a_few(db, run_id, limits):
    ids = old_tree(db, run_id, limits, [0] * 1000)
    with counted(db) as seen:
        assert db.transact(sealing.end, ids[0], SessionStatus.COMPLETED, None, limits) == "completed"
    assert seen.built == settling.MOST_SETTLED
    assert seen.statements < 200
    with db.read() as conn:
        assert set(conn.execute(select(sessions_table.c.status)).scalars()) == {"completed"}
    assert len(db.query(liveness.due, run_id, limit=2000)) == 1001 - settling.MOST_SETTLED
    with pytest.raises(RequestError, match="sealed"):
        child(db, ids[1], limits)


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
