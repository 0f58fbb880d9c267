"""The trainer's turns on GPUs that it shares with engines: which of the two may have the memory.

engines' turn ── grant ──► trainer's turn ── hand_back(v) ──► a publish loads v ── it is complete ──► engines' turn
                             │    ▲                                                                      ▲
                             │    └─ renew                                                               │
                             └─ end, or not renewed in time: engines load the run's version ─────────────┘

A turn is one row. It belongs to a trainer's epoch, and ends by the database's clock, whatever dies. While it lasts,
engines keep their memory released, and no engine is started: a new process would take the memory.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, and_, delete, or_, select, update

from agentrl.store import engine_rows, events
from agentrl.store.db import clock, upsert
from agentrl.store.tables import engines, memory_leases
from agentrl.store.training.trainer_epochs import check_epoch, lock_run

HANDING_S = 60.0
"""Time for a publish to bring its version to the engines; afterwards any replica does so."""


def grant(conn: Connection, run_id: str, epoch: int, lease_s: float, source: str) -> list[str]:
    """Give the trainer of `epoch` the GPUs for `lease_s`, or more time on them.

    Returns the engines whose processes are starting: with any of them, nothing is granted. Raises FencedError when a
    newer trainer has started.
    """
    check_epoch(conn, run_id, epoch)
    if starting := _starting(conn, run_id):
        return starting
    is_new = not conn.execute(select(memory_leases.c.run_id).where(_held(run_id, epoch))).first()
    turn = {"epoch": epoch, "until": clock.now() + lease_s, "version": None}
    conn.execute(
        upsert.insert(conn, memory_leases)
        .values(run_id=run_id, **turn)
        .on_conflict_do_update(index_elements=["run_id"], set_=turn)
    )
    if is_new:
        events.record(conn, run_id, "memory_granted", {"epoch": epoch}, source)
    return []


def renew(conn: Connection, run_id: str, epoch: int, lease_s: float) -> bool:
    """Extend the trainer's turn; false when it is over."""
    turn = update(memory_leases).where(_held(run_id, epoch))
    return bool(conn.execute(turn.values(until=clock.now() + lease_s)).rowcount)


def hand_back(conn: Connection, run_id: str, epoch: int | None, version: int) -> bool:
    """End the turn of the trainer that publishes `version`; false if it is another trainer's turn, which goes on.

    Engines without weights wait for the publish, for up to HANDING_S. Then they load `version`, at any replica.
    """
    mine = or_(memory_leases.c.epoch == epoch, memory_leases.c.version.is_not(None))
    over = and_(memory_leases.c.run_id == run_id, or_(mine, memory_leases.c.until <= clock.now()))
    conn.execute(update(memory_leases).where(over).values(version=version, until=clock.now() + HANDING_S))
    return not is_held(conn, run_id)


def end(conn: Connection, run_id: str, epoch: int, source: str) -> None:
    """End the turn of `epoch`, if it has one: engines load the run's version."""
    mine = and_(memory_leases.c.run_id == run_id, memory_leases.c.epoch == epoch)
    if conn.execute(delete(memory_leases).where(mine)).rowcount:
        events.record(conn, run_id, "memory_returned", {"epoch": epoch, "why": "asked to"}, source)


def expire(conn: Connection, run_id: str, source: str) -> None:
    """Remove a turn that was not renewed in time."""
    over = and_(memory_leases.c.version.is_(None), memory_leases.c.until <= clock.now())
    ended = delete(memory_leases).where(memory_leases.c.run_id == run_id, over).returning(memory_leases.c.epoch)
    for epoch in conn.scalars(ended).all():
        events.record(conn, run_id, "memory_returned", {"epoch": epoch, "why": "its lease ended"}, source)


def trainer_ended(conn: Connection, run_id: str, source: str) -> None:
    """Remove the turn of a trainer whose process has ended, which has no memory any more."""
    turn = and_(memory_leases.c.run_id == run_id, memory_leases.c.version.is_(None))
    for epoch in conn.scalars(delete(memory_leases).where(turn).returning(memory_leases.c.epoch)).all():
        events.record(conn, run_id, "memory_returned", {"epoch": epoch, "why": "the trainer ended"}, source)


def forget(conn: Connection, run_id: str) -> None:
    """Remove any turn, and every mark of an engine that starts: nothing of the run is running."""
    conn.execute(delete(memory_leases).where(memory_leases.c.run_id == run_id))
    conn.execute(update(engines).where(engines.c.run_id == run_id).values(starting_until=None))


def is_held(conn: Connection, run_id: str) -> bool:
    """Whether it is the trainer's turn."""
    return conn.execute(select(memory_leases.c.run_id).where(_held(run_id))).first() is not None


def may_start(conn: Connection, run_id: str, url: str, timeout_s: float) -> bool:
    """Whether the process of an engine may start now. If so, no turn is granted until it answers, has ended, or
    `timeout_s` are over.
    """
    lock_run(conn, run_id)  # one after another with `grant`
    if is_held(conn, run_id):
        return False
    until = clock.now() + timeout_s
    conn.execute(
        upsert.insert(conn, engines)
        .values(run_id=run_id, url=url, **engine_rows.new(starting_until=until))
        .on_conflict_do_update(index_elements=["run_id", "url"], set_={"starting_until": until})
    )
    return True


def has_ended(conn: Connection, run_id: str, url: str) -> None:
    """The process of an engine has ended, and its memory is free."""
    conn.execute(update(engines).where(engines.c.run_id == run_id, engines.c.url == url).values(starting_until=None))


def _starting(conn: Connection, run_id: str) -> list[str]:
    soon = engines.c.starting_until > clock.now()
    return list(conn.scalars(select(engines.c.url).where(engines.c.run_id == run_id, soon).order_by(engines.c.url)))


def _held(run_id: str, epoch: int | None = None) -> ColumnElement[bool]:
    """The run's turn while it is the trainer's; with `epoch`, only that trainer's."""
    mine = [memory_leases.c.epoch == epoch] if epoch is not None else []
    lasts = memory_leases.c.until > clock.now()
    return and_(memory_leases.c.run_id == run_id, memory_leases.c.version.is_(None), lasts, *mine)
