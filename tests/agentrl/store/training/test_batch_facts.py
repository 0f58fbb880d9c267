"""Facts of a leased batch: rewards by name, task sources, truncated calls."""

import json

import pytest
from play import begin, call, group, take
from sqlalchemy import select, text

from agentrl.domain.schemas import SessionStatus
from agentrl.store.db import codec
from agentrl.store.sessions import child_sessions, group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import trajectories
from agentrl.store.training import batch_facts, rewards


def found(db, batch):
    with db.read() as conn:
        return batch_facts.read(conn, batch.step_id)


def test_a_sessions_rewards_are_summed_by_name_and_the_newest_counts(db, run_id, limits):
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in range(2)])
        for i, session_id in enumerate(new.session_ids):
            first = call(conn, run_id, session_id)
            second = call(conn, run_id, session_id, parent=first, delta=(5,), output=(6,))
            for called in (first, second):
                rewards.add(conn, session_id, value=0.25, discount=1.0, interaction_id=called, name="turn")
            rewards.add(conn, session_id, value=9.0, discount=1.0, name="exact")
            rewards.add(conn, session_id, value=float(i), discount=1.0, name="exact")
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
    group(db, run_id, limits, values=(3.0, 5.0))
    left = group(db, run_id, limits, values=(100.0, 200.0))
    batch = take(db, run_id, begin(db, run_id), 1)
    assert left.session_ids[0] not in {t.session_id for t in batch.trajectories}
    with db.write() as conn:  # too late to count
        assert not rewards.add(conn, new.session_ids[0], value=50.0, discount=1.0, name="exact").applied
    assert {name: sorted(v) for name, v in found(db, batch).rewards.items()} == {
        "turn": [0.5, 0.5],
        "exact": [0.0, 1.0],
        "reward": [3.0, 5.0],
    }


@pytest.mark.parametrize(
    ("data", "source"),
    [
        ({"source": "sums"}, "sums"),
        ({"data_source": "products"}, "products"),
        ({"source": 3, "data_source": "text only"}, "text only"),
        ({"source": {"name": "nested"}}, None),
        pytest.param({"source": ""}, None, marks=pytest.mark.long),
        pytest.param({}, None, marks=pytest.mark.long),
    ],
)
def test_a_tasks_source_is_text(db, run_id, limits, data, source):
    with db.write() as conn:
        conn.execute(text("UPDATE tasks SET data = :data"), {"data": json.dumps(data)})
    own, given = group(db, run_id, limits), group(db, run_id, limits)
    with db.write() as conn:  # as an outside program's group has it
        conn.execute(
            text("UPDATE groups SET task_id = NULL, task = :data WHERE id = :id"),
            {"data": json.dumps(data), "id": given.group_id},
        )
    expected = {own.group_id: source, given.group_id: source} if source else {}
    assert found(db, take(db, run_id, begin(db, run_id), 1)).sources == expected


def test_calls_that_were_cut_off_count_once_however_many_paths_share_them(db, run_id, limits):
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in range(2)])
        for session_id in new.session_ids:
            root = call(conn, run_id, session_id)
            for _ in range(2):
                call(conn, run_id, session_id, parent=root, delta=(5,), output=(6,))
            rewards.add(conn, session_id, value=1.0, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
        conn.execute(text("UPDATE interactions SET finish_reason = 'length' WHERE id = :id"), {"id": root})
    facts = found(db, take(db, run_id, begin(db, run_id), 1, n_groups=1))
    assert (facts.calls, facts.truncated_calls) == (6, 1)


def test_stats_are_those_of_the_leased_sessions_and_of_their_roots(db, run_id, limits):
    def play(*stats, below=False):
        with db.write() as conn:
            new = group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in stats])
            for session_id, of_session in zip(new.session_ids, stats, strict=True):
                caller = session_id
                if below:
                    (caller,) = child_sessions.start_child(conn, session_id, limits, codec.new_id(), {}).session_ids
                call(conn, run_id, caller)
                rewards.add(conn, session_id, value=1.0, discount=1.0)
                sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits, stats=of_session)

    play({"turns": 1.0, "rare": 5.0}, {"turns": 3.0})
    play({"turns": 8.0}, None, below=True)  # only the sub-agents of these made calls
    play({"turns": 100.0}, {"turns": 100.0})
    facts = found(db, take(db, run_id, begin(db, run_id), 1, n_groups=2))
    assert {name: sorted(values) for name, values in facts.stats.items()} == {"turns": [1.0, 3.0, 8.0], "rare": [5.0]}


def test_each_call_names_its_engine(db, run_id, limits):
    made = group(db, run_id, limits, values=(1.0, 2.0))
    mine = "session_id = :id"
    with db.write() as conn:
        for session_id, backend, spans in [
            (made.session_ids[0], "vllm", None),
            (made.session_ids[1], "sglang", json.dumps([["http://b", "vllm", 0], ["http://a", "sglang", 1]])),
        ]:
            values = {"id": session_id, "backend": backend, "spans": spans}
            changed = "engine_url = 'http://a', engine_backend = :backend, engine_spans = :spans"
            conn.execute(text(f"UPDATE interactions SET {changed} WHERE {mine}"), values)
    batch = take(db, run_id, begin(db, run_id), 1, n_groups=1)
    engines = found(db, batch).engines
    with db.read() as conn:
        sessions = dict(tuple(row) for row in conn.execute(text("SELECT id, session_id FROM interactions")))
    assert {sessions[call_id]: engine for call_id, engine in engines.items()} == {
        made.session_ids[0]: batch_facts.SampledBy("http://a", "vllm", several=False),
        made.session_ids[1]: batch_facts.SampledBy("http://a", "sglang", several=True),
    }


def test_a_group_is_of_the_source_that_its_task_was_drawn_from(db, run_id, limits):
    with db.write() as conn:
        conn.execute(text("""UPDATE tasks SET data = '{"source": "a name in the data"}'"""))
    drawn, given = group(db, run_id, limits), group(db, run_id, limits)
    with db.write() as conn:  # as an outside program's group has it
        conn.execute(text("UPDATE groups SET task_id = NULL, task = '{}' WHERE id = :id"), {"id": given.group_id})
    batch = take(db, run_id, begin(db, run_id), 1)
    with db.read() as conn:
        assert batch_facts.task_sources(conn, batch.step_id) == {drawn.group_id: "tasks"}
        assert batch_facts.task_sources(conn, "no step") == {}
    with db.write() as conn:  # positions count the sources in turn
        conn.execute(
            text("INSERT INTO task_sources SELECT run_id, 1, 'more', 1.0, 0, 0, 0, true, NULL, NULL FROM task_sources")
        )
        moved = "UPDATE tasks SET position = 9 WHERE id = (SELECT task_id FROM groups WHERE id = :id)"
        conn.execute(text(moved), {"id": drawn.group_id})
        assert batch_facts.task_sources(conn, batch.step_id) == {drawn.group_id: "more"}


def test_a_batch_is_found_by_indexes_however_many_trajectories_there_are(db):
    asked = select(trajectories.c.id).where(batch_facts.in_batch("step"))
    with db.read() as conn:
        if db.is_sqlite:
            plan = conn.execute(text(f"EXPLAIN QUERY PLAN {_sql(asked, conn)}")).all()
        else:
            conn.exec_driver_sql("SET LOCAL enable_seqscan = off")  # the tables are empty, so it would be cheapest
            plan = conn.exec_driver_sql(f"EXPLAIN {_sql(asked, conn)}").all()
    lines = [str(row[-1]) for row in plan]
    assert lines
    assert [line for line in lines if "Seq Scan" in line or line.startswith("SCAN trajectories")] == [], lines


def _sql(query, conn):
    return query.compile(conn, compile_kwargs={"literal_binds": True}).string
