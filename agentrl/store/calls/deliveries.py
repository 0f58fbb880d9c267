"""Deliveries: whether a client received a call's answer, and which answer a retry gets (`schemas.Delivery`).

    open ──► given          `mark_delivered`: the client received the end of the answer
      ├────► free           `release`: the client disconnected; a retry may claim the answer
      └────► unsure         the proxy died after the commit; a retry may claim the answer
    free, unsure ──► open   `claim`: a retry waits for the answer

The calls of one request (`n`, several prompts) share a state: that of the first call's row.

A given answer is delivered again only to a retry that can belong to no other request: no other request of the session
had this body, and no call extends the answer. Clients number their retries; each number gets the answer once, and
`last_retry` holds the last such number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, exists, or_, select, update

from agentrl.domain.schemas import Delivery, InteractionStatus, Role, SessionStatus
from agentrl.errors import RequestError
from agentrl.store import events
from agentrl.store.calls.call_intents import Intent, begin_all
from agentrl.store.db import bulk
from agentrl.store.db.bulk_unit import bulk_unit, only
from agentrl.store.tables import interactions, sessions

HAS_ANSWER = (InteractionStatus.RUNNING, InteractionStatus.COMPLETE)
"""Statuses of a call that has an answer or will have one."""
CLAIMABLE = (Delivery.FREE, Delivery.UNSURE)
UPDATE_DELIVERY = bulk.update(interactions, "id", "delivery", "holder")


@dataclass(frozen=True, slots=True)
class Claim:
    """The calls of the earlier request whose answer a retry gets, in the order of the choices; empty if it gets none.

    `held`: there is such an answer, but another client still waits for it.
    """

    ids: list[str]
    held: bool = False


def mark_delivered_many(conn: Connection, requests: Sequence[tuple[list[str]]]) -> list[None]:
    """`mark_delivered` for many requests at once."""
    ids = [call_id for (call_ids,) in requests for call_id in call_ids]
    bulk.run(conn, UPDATE_DELIVERY, [{"key": key, "delivery": Delivery.GIVEN.value, "holder": None} for key in ids])
    return [None] * len(requests)


@bulk_unit(many=mark_delivered_many)
def mark_delivered(conn: Connection, call_ids: list[str]) -> None:
    """Record that a client received the end of these calls' answer."""
    only(mark_delivered_many(conn, [(call_ids,)]))


def release(conn: Connection, call_ids: list[str], holder: str) -> None:
    """Release the answer that a client at `holder` waited for: a retry may claim it."""
    conn.execute(
        update(interactions)
        .where(
            interactions.c.id.in_(call_ids), interactions.c.delivery == Delivery.OPEN, interactions.c.holder == holder
        )
        .values(delivery=Delivery.FREE, holder=None)
    )


def claim(conn: Connection, session_id: str, digest: str, retry: int, holder: str) -> Claim:
    """Claim the oldest undelivered answer to the same request, for retry number `retry` of a client at `holder`.

    If every answer was delivered and only one has this body, claim that one, provided that the retry can belong to no
    other request. An ended session has no answers to claim.
    """
    found = select(sessions.c.status, sessions.c.run_id).where(sessions.c.id == session_id)
    session = conn.execute(found.with_for_update(read=True)).first()  # blocks an end of the session until commit
    if session is None or session.status != SessionStatus.OPEN:
        return Claim([])
    columns = interactions.c
    earlier = conn.execute(
        select(columns.id, columns.delivery, columns.status, columns.options)
        .where(columns.session_id == session_id, columns.digest == digest, *_FIRST_WITH_ANSWER)
        .order_by(columns.created_at, columns.id)
    ).all()
    for row in earlier:
        if row.delivery in CLAIMABLE and _take(conn, row.id, holder, retry):
            return Claim(of_request(conn, row.id))
    if any(row.delivery == Delivery.OPEN for row in earlier):
        return Claim([], held=True)
    if len(earlier) == 1 and (earlier[0].options or {}).get("retry", 0) < retry:
        ids = of_request(conn, earlier[0].id)
        if _only_request(conn, session.run_id, session_id, digest) and _take_again(conn, ids, retry):
            return Claim(ids)
    return Claim([])


def claim_by_key(conn: Connection, session_id: str, repeat_key: str, digest: str, holder: str) -> Claim:
    """The calls of the request that had this `Idempotency-Key`, delivered or not.

    Raises RequestError 400 when its body was different.
    """
    earlier = conn.execute(
        select(interactions.c.id, interactions.c.digest).where(
            interactions.c.session_id == session_id, interactions.c.repeat_key == repeat_key, *_FIRST_WITH_ANSWER
        )
    ).first()
    if earlier is None:
        return Claim([])
    if earlier.digest != digest:
        raise RequestError(
            400,
            "this Idempotency-Key was sent with another request",
            code="idempotency_key_reused",
            param="Idempotency-Key",
        )
    _take(conn, earlier.id, holder)
    return Claim(of_request(conn, earlier.id))


def begin_once(conn: Connection, intents: list[Intent], repeat_key: str) -> Claim:
    """Write the intent rows of a request, unless one with the same `Idempotency-Key` exists: then claim its calls.

    Raises RequestError as `begin` and `claim_by_key` do.
    """
    first = intents[0]
    conn.execute(select(sessions.c.id).where(sessions.c.id == first.session_id).with_for_update(key_share=True))
    found = claim_by_key(conn, first.session_id, repeat_key, first.digest, first.replica)
    if not found.ids:
        begin_all(conn, intents)
    return found


def of_request(conn: Connection, first_id: str) -> list[str]:
    """The calls of a request in the order of their choices, by the first one's id."""
    rows = conn.execute(
        select(interactions.c.id, interactions.c.options).where(
            or_(interactions.c.id == first_id, interactions.c.request_id == first_id)
        )
    ).all()
    return [row.id for row in sorted(rows, key=lambda row: (row.options or {}).get("choice", 0))]


def progress(conn: Connection, call_ids: list[str]) -> tuple[set[str], bool]:
    """The statuses of a request's calls, and whether a retry may claim their answer."""
    columns = interactions.c
    rows = conn.execute(select(columns.status, columns.delivery).where(columns.id.in_(call_ids))).all()
    return {row.status for row in rows}, any(row.delivery in CLAIMABLE for row in rows)


def reclaim(conn: Connection, call_ids: list[str], holder: str) -> None:
    """Claim an answer that was released while a client at `holder` was following it."""
    _take(conn, call_ids[0], holder)


def sealed_sessions(conn: Connection, session_ids: list[str]) -> set[str]:
    """The ended sessions among `session_ids`."""
    columns = sessions.c
    rows = select(columns.id).where(columns.id.in_(session_ids), columns.status != SessionStatus.OPEN)
    return set(conn.execute(rows).scalars())


def is_awaited(conn: Connection, call_ids: list[str]) -> bool:
    """Whether a client waits for the calls, here or at another replica."""
    rows = select(interactions.c.id).where(
        interactions.c.id.in_(call_ids),
        interactions.c.delivery == Delivery.OPEN,
        interactions.c.status == InteractionStatus.RUNNING,
    )
    return conn.execute(rows.limit(1)).first() is not None


def demote_undelivered(conn: Connection, session_id: str) -> None:
    """Turn the `undelivered` calls into side calls."""
    conn.execute(update(interactions).where(*_undelivered(session_id)).values(role=Role.SIDE))


def undelivered(conn: Connection, session_id: str) -> set[str]:
    """The calls of the policy whose answer no client received and no call extends: they are not turns of the agent."""
    return set(conn.execute(select(interactions.c.id).where(*_undelivered(session_id))).scalars())


def _undelivered(session_id: str) -> tuple[ColumnElement[bool], ...]:
    after = interactions.alias()
    return (
        interactions.c.session_id == session_id,
        interactions.c.status == InteractionStatus.COMPLETE,
        interactions.c.delivery == Delivery.FREE,
        interactions.c.role.in_((Role.MAIN, Role.SUBAGENT)),
        ~exists(
            select(after.c.id).where(
                after.c.parent_id == interactions.c.id, after.c.status == InteractionStatus.COMPLETE
            )
        ),
    )


_SIBLING = interactions.alias()
_FIRST_WITH_ANSWER: tuple[ColumnElement[bool], ...] = (
    interactions.c.status.in_(HAS_ANSWER),
    interactions.c.role != Role.UPSTREAM,
    or_(
        interactions.c.request_id.is_(None),
        and_(
            interactions.c.request_id == interactions.c.id,
            ~exists(
                select(_SIBLING.c.id).where(
                    _SIBLING.c.session_id == interactions.c.session_id,
                    _SIBLING.c.request_id == interactions.c.id,
                    _SIBLING.c.status.not_in(HAS_ANSWER),
                )
            ),
        ),
    ),
)


def _only_request(conn: Connection, run_id: str, session_id: str, digest: str) -> bool:
    """Whether the records show at most one request with this body, besides retries. False if some may be missing."""
    columns = interactions.c
    recorded = conn.execute(
        select(columns.options).where(
            columns.session_id == session_id,
            columns.digest == digest,
            or_(columns.request_id.is_(None), columns.request_id == columns.id),
        )
    ).scalars()
    refused = events.refusals(conn, run_id, session_id)
    if len(refused) >= events.REFUSALS_KEPT:  # older ones may have been dropped
        return False
    tries = [(options or {}).get("retry", 0) for options in recorded]
    tries += [one.get("retry", 0) for one in refused if one.get("digest") == digest]
    return tries.count(0) <= 1


def _take_again(conn: Connection, call_ids: list[str], retry: int) -> bool:
    """Claim a given answer again, if no call extends it and only lower retry numbers got it.

    Returns whether it was claimed.
    """
    columns, after = interactions.c, interactions.alias()
    taken = conn.execute(
        update(interactions)
        .where(
            columns.id == call_ids[0],
            columns.status == InteractionStatus.COMPLETE,
            columns.delivery == Delivery.GIVEN,
            or_(columns.last_retry.is_(None), columns.last_retry < retry),
            ~exists(select(after.c.id).where(after.c.parent_id.in_(call_ids))),
        )
        .values(last_retry=retry)
    )
    return bool(taken.rowcount)


def _take(conn: Connection, first_id: str, holder: str, retry: int | None = None) -> bool:
    """Claim a claimable answer. Returns false when another client claimed it first."""
    free = and_(interactions.c.delivery.in_(CLAIMABLE), interactions.c.status.in_(HAS_ANSWER))
    mine = {"delivery": Delivery.OPEN, "holder": holder}
    first = mine if retry is None else mine | {"last_retry": retry}
    if not conn.execute(update(interactions).where(interactions.c.id == first_id, free).values(first)).rowcount:
        return False
    conn.execute(update(interactions).where(interactions.c.request_id == first_id).values(mine))
    return True
