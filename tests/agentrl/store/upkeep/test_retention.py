"""Pruning on both databases: which rows are removed, which stay, and that lineages stay complete."""

import threading
import time

import pytest
from history import LIMITS, TOOLS, History
from sqlalchemy import func, inspect, select, text

from agentrl.domain.evaluation import Episode, Label
from agentrl.errors import RequestError, UserError
from agentrl.store import Database, events, runs
from agentrl.store.audit import run_audit
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.tables import contents, groups, heartbeats, metadata, trajectories
from agentrl.store.tables import events as events_table
from agentrl.store.tables import runs as runs_table
from agentrl.store.training import rewards, steps
from agentrl.store.upkeep import prunable_rows, pruning_database, retention


def later() -> float:
    return time.time() + 1


def violations(db, run_id) -> list[str]:
    return db.query(lambda conn: list(run_audit.scan(conn, run_id)))


def assert_replays(history: History) -> None:
    """Every surviving step gives the batch that it was given."""
    lineage = {step.step: step for step in history.db.query(steps.of_run, history.run_id)}
    for step, batch in history.batches.items():
        assert history.db.query(steps.batch, lineage[step].id).digest() == lineage[step].batch_digest == batch.digest()


def group_states(history: History) -> dict[str, str]:
    with history.db.read() as conn:
        rows = conn.execute(select(groups.c.id, groups.c.state).where(groups.c.run_id == history.run_id))
        return {row.id: row.state for row in rows}


def counters(history: History) -> tuple[int, int, int]:
    run = history.db.query(runs.get, history.run_id)
    return run.admitted, run.returned, run.running


def row_counts(db) -> dict[str, int]:
    with db.read() as conn:
        return {
            name: conn.execute(select(func.count()).select_from(table)).scalar_one()
            for name, table in metadata.tables.items()
        }


@pytest.mark.long_on("postgresql")
def test_groups_that_never_trained_are_removed_with_all_their_rows(db) -> None:
    history = History(db, seed=3)
    history.train(2)
    before = row_counts(db)
    admitted, returned, running = counters(history)
    rejected = [history.rejected(tools=TOOLS) for _ in range(3)]
    history.evaluation()
    states = group_states(history)
    assert [states[group.group_id] for group in rejected] == ["rejected"] * 3
    assert counters(history) == (admitted + 3, returned + 3, running)
    grown = row_counts(db)
    seen: list[tuple[int, int]] = []
    pruned = retention.prune(db, history.run_id, later(), lambda done, total: seen.append((done, total)))
    assert row_counts(db) == before
    assert {name: n for name, n in pruned.rows.items() if n} == {
        name: grown[name] - before[name] for name in grown if grown[name] > before[name]
    }
    assert pruned.rows["groups"] == 4
    assert pruned.bytes > 0
    assert seen[-1] == (4, 4)
    assert counters(history) == (admitted, returned, running)
    assert violations(db, history.run_id) == []
    assert_replays(history)


def test_an_estimate_equals_what_is_removed_and_changes_nothing(db) -> None:
    history = History(db, seed=4)
    history.train(1)
    for _ in range(2):
        history.rejected(tools=TOOLS)
    with db.write() as conn:
        events.record(conn, history.run_id, "publish", {}, "proxy")
    history.beat("w1")
    with db.write() as conn:
        conn.execute(heartbeats.update().values(last_seen_at=1.0))
    history.beat("w2")  # spoke a moment ago: a sweep needs it, whatever the cut
    before = row_counts(db)
    told = retention.estimate(db, history.run_id, later())
    assert row_counts(db) == before
    done = retention.prune(db, history.run_id, later())
    assert +told.rows == +done.rows
    assert told.bytes == done.bytes
    assert done.rows["contents"] == done.rows["events"] == done.rows["heartbeats"] == 1


def test_rows_newer_than_the_cut_stay(db) -> None:
    history = History(db)
    old = history.rejected()
    cut = later()
    with db.write() as conn:
        conn.execute(groups.update().where(groups.c.id == old.group_id).values(finished_at=cut - 10))
    young = history.rejected()
    with db.write() as conn:
        conn.execute(groups.update().where(groups.c.id == young.group_id).values(finished_at=cut + 10))
    retention.prune(db, history.run_id, cut)
    assert group_states(history).keys() == {young.group_id}


def test_ready_running_and_other_runs_groups_stay(db) -> None:
    other = History(db, name="other")
    others = other.rejected()
    history = History(db, seed=1)
    ready = history.group()
    with db.write() as conn:
        running = group_starts.start_group(conn, history.run_id, LIMITS, [codec.new_id(), codec.new_id()])
    retention.prune(db, history.run_id, later())
    assert group_states(history) == {ready.group_id: "ready", running.group_id: "running"}
    assert group_states(other) == {others.group_id: "rejected"}


@pytest.mark.long_on("postgresql")
def test_trajectories_of_a_rolled_back_step_stay_even_when_stale(db) -> None:
    history = History(db, seed=5)
    history.train(3)
    trained = {t.group_id for t in history.batches[3].trajectories}
    history.go_back(2)
    with db.write() as conn:  # retired by a lease that found it too old
        conn.execute(groups.update().where(groups.c.id.in_(trained)).values(state="stale"))
        conn.execute(
            trajectories.update()
            .where(trajectories.c.group_id.in_(trained), trajectories.c.state == "ready")
            .values(state="stale", reason="too_old")
        )
        conn.execute(runs_table.update().values(returned=runs_table.c.returned + len(trained)))
    retention.prune(db, history.run_id, later())
    assert trained <= group_states(history).keys()
    with db.read() as conn:
        assert conn.execute(text("SELECT count(*) FROM lineage WHERE step_state = 'rolled_back'")).scalar_one()
    assert violations(db, history.run_id) == []


@pytest.mark.long_on("postgresql")
def test_the_first_and_the_newest_evaluation_stay(db) -> None:
    history = History(db)

    def evaluation(version: int) -> set[str]:
        labels = [Label(version, version, Episode("s", index, 0), 2) for index in range(2)]
        return {history.evaluation(label.metadata).group_id for label in labels}

    kept = evaluation(0)
    for _ in range(2):
        history.group(), history.group()
        history.complete(history.lease())
    evaluation(1)
    kept |= evaluation(2)
    history.evaluation({"who": "an outside program"})
    trained = {group for group, state in group_states(history).items() if state == "trained"}
    retention.prune(db, history.run_id, later())
    assert group_states(history).keys() == kept | trained


def test_contents_stay_while_any_call_of_any_run_refers_to_them(db) -> None:
    other = History(db, name="other")
    other.group(tools=TOOLS)
    history = History(db)
    history.rejected(tools=TOOLS)
    history.rejected(tools=[{"type": "function", "function": {"name": "lonely"}}])
    retention.prune(db, history.run_id, later())
    with db.read() as conn:
        (body,) = conn.execute(select(contents.c.body)).scalars()
    assert codec.unpack_json(body) == TOOLS


def test_old_events_and_heartbeats_are_removed_except_those_of_the_run_time(db) -> None:
    history = History(db)
    with db.write() as conn:
        for kind in ("publish", "stopped"):
            events.record(conn, history.run_id, kind, {}, "test")
        conn.execute(events_table.update().values(created_at=1.0))
        events.record(conn, history.run_id, "publish", {"new": True}, "test")
    history.beat("old")
    with db.write() as conn:
        conn.execute(heartbeats.update().values(last_seen_at=1.0))
    history.beat("new")
    retention.prune(db, history.run_id, 2.0)
    with db.read() as conn:
        assert [(row.kind, row.data) for row in events.of_run(conn, history.run_id)] == [
            ("stopped", {}),
            ("publish", {"new": True}),
        ]
        assert list(conn.execute(select(heartbeats.c.name)).scalars()) == ["new"]


@pytest.mark.long_on("postgresql")
def test_a_late_reward_of_a_pruned_session_is_refused(db) -> None:
    history = History(db)
    gone = history.rejected()
    retention.prune(db, history.run_id, later())
    with pytest.raises(RequestError) as refused, db.write() as conn:
        rewards.add(conn, gone.session_ids[0], value=1.0, discount=1.0)
    assert refused.value.status == 404


@pytest.mark.long_on("postgresql")
def test_the_bound_for_the_newest_steps_is_their_start(db) -> None:
    history = History(db)
    history.train(3)
    lineage = db.query(steps.of_run, history.run_id)
    assert db.query(retention.cut_before_steps, history.run_id, 3) == 0.0
    assert db.query(retention.cut_before_steps, history.run_id, 2) == lineage[1].started_at
    assert db.query(retention.cut_before_steps, history.run_id, 1) == lineage[2].started_at
    assert db.query(retention.cut_before_steps, history.run_id, 0) >= lineage[2].started_at


@pytest.mark.long_on("postgresql")
def test_pruning_during_the_run_keeps_counters_equal_to_rows(db, database_url, monkeypatch) -> None:
    monkeypatch.setattr(prunable_rows, "PAGE_GROUPS", 2)
    history = History(db, seed=6)
    for _ in range(6):
        history.rejected(tools=TOOLS)
    stop = threading.Event()
    seen: list[list[str]] = []

    def watch() -> None:
        other = Database(database_url)
        while not stop.is_set():
            seen.append(other.query(lambda conn: list(run_audit.scan(conn, history.run_id))))
        other.close()

    def work() -> None:
        while not stop.is_set():
            history.rejected(tools=TOOLS)
            history.train(1)

    threads = [threading.Thread(target=watch)] if db.is_sqlite else []  # one snapshot for all of its queries
    threads.append(threading.Thread(target=work))
    for thread in threads:
        thread.start()
    try:
        pruned = retention.prune(db, history.run_id, later())
        again = retention.prune(db, history.run_id, later())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert pruned.rows["groups"] + again.rows["groups"] >= 6
    assert all(found == [] for found in seen)
    assert violations(db, history.run_id) == []
    assert_replays(history)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_a_random_history_replays_after_any_prune(db, seed) -> None:
    """Groups of every fate, steps, roll-backs and prunes in any order."""
    history = History(db, seed=100 + seed)
    pick = history.random
    for _ in range(14):
        match pick.randrange(8):
            case 0 | 1:
                history.train(1)
            case 2:
                history.rejected(tools=pick.choice([None, TOOLS]))
            case 3:
                history.group(reward=False)
            case 4:
                history.group(versions=[max(0, history.version - pick.randrange(4))])
            case 5:
                history.evaluation()
            case 6 if history.step:
                history.go_back(pick.randrange(history.step + 1))
            case _:
                retention.prune(db, history.run_id, later())
        if pick.random() < 0.3:
            with db.read() as conn:
                some = list(conn.execute(select(trajectories.c.session_id)).scalars())
            if some:
                with db.write() as conn:
                    rewards.add(conn, pick.choice(some), value=pick.random(), discount=0.9, name="late")
    retention.prune(db, history.run_id, later())
    assert violations(db, history.run_id) == []
    assert db.integrity() == []
    assert_replays(history)
    states = group_states(history)
    kept = {t.group_id for batch in history.batches.values() for t in batch.trajectories}
    assert kept <= states.keys()


def test_postgresql_drops_the_temporary_indexes_of_a_prune(databases) -> None:
    with databases.lent("postgresql") as url:
        db = Database(url)
        history = History(db)
        before = {index["name"] for table in metadata.tables for index in inspect(db.engine).get_indexes(table)}
        with db.write() as conn:  # as a prune that was killed leaves it
            conn.execute(text("CREATE INDEX tmp_prune_leaf ON trajectories (leaf_id)"))
        with db.engine.connect() as rival:
            rival.execute(select(func.pg_advisory_lock(pruning_database._PRUNE_LOCK)))
            with pytest.raises(UserError, match="another"):
                retention.prune(db, history.run_id, later())
            rival.execute(select(func.pg_advisory_unlock(pruning_database._PRUNE_LOCK)))
        retention.prune(db, history.run_id, later())
        after = {index["name"] for table in metadata.tables for index in inspect(db.engine).get_indexes(table)}
        db.close()
    assert before == after


def test_vacuum_releases_disk_space(databases) -> None:
    for kind in ("sqlite", "postgresql"):
        with databases.lent(kind) as url:
            db = Database(url)
            history = History(db)
            for _ in range(30):
                history.rejected()
            retention.prune(db, history.run_id, later())
            retention.vacuum(db)
            if db.is_sqlite:
                with db.read() as conn:
                    assert conn.execute(text("PRAGMA freelist_count")).scalar_one() == 0
            assert violations(db, history.run_id) == []
            db.close()
