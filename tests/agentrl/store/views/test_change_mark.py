"""The mark of a run changes with whatever a page shows, and with nothing else."""

from __future__ import annotations

from history import LIMITS, History
from sqlalchemy import insert

from agentrl.domain.schemas import SessionStatus
from agentrl.store import Database, events
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import engines
from agentrl.store.training import rewards
from agentrl.store.views import change_mark


def test_it_differs_after_every_change(db: Database) -> None:
    history = History(db)

    def marked() -> str:
        return db.query(change_mark.of_run, history.run_id)

    seen = [marked()]

    def changed(what: str) -> None:
        now = marked()
        assert now not in seen, what
        assert marked() == now  # reading changes nothing
        seen.append(now)

    with db.write() as conn:
        new = group_starts.start_group(conn, history.run_id, LIMITS, [codec.new_id() for _ in range(2)])
    changed("a session begins")
    with db.write() as conn:
        history.call(conn, new.session_ids[0])
    changed("a call ends")
    with db.write() as conn:
        rewards.add(conn, new.session_ids[0], value=1.0, discount=0.9)
    changed("a reward")
    with db.write() as conn:
        sealing.end(conn, new.session_ids[0], SessionStatus.COMPLETED, None, LIMITS)
    changed("a session ends")
    with db.write() as conn:
        events.record(conn, history.run_id, "resumed", {}, "test")
    changed("an event")
    with db.write() as conn:
        conn.execute(
            insert(engines).values(run_id=history.run_id, url="http://e", state="serving", last_seen_at=0.0, changes=1)
        )
    changed("an engine")
    with db.write() as conn:
        conn.execute(engines.update().values(state="dead", changes=2))
    changed("an engine dies")
    with db.write() as conn:
        rewards.add(conn, new.session_ids[1], value=1.0, discount=0.9)
        sealing.end(conn, new.session_ids[1], SessionStatus.COMPLETED, None, LIMITS)
    changed("a group ends")
    history.train(1)
    changed("a step")


def test_a_run_that_does_not_exist_has_a_mark(db: Database) -> None:
    assert db.query(change_mark.of_run, "0" * 32)
