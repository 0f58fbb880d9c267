"""Which client has an answer, which one waits for it, and which answer a retry gets (schemas.Delivery).

    open ──► given ──► given              the client received the end; a retry of it that says so gets the end again
      └────► free ──► open                it left; a retry of its claims the answer, and waits in its turn
      └────► unsure ──► open              its proxy died after the commit: perhaps it received the end, perhaps not

A request's calls (`n`, several prompts) go together: the first one's row decides.

A given answer is delivered again where the retry can only be of that request: no other request of the session had this
body, and no call goes on from the answer. A client numbers its retries, so each number gets an answer once:
`last_retry` is the number that got it last.
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
"""A call that has an answer, or will have one."""
CLAIMABLE = (Delivery.FREE, Delivery.UNSURE)
UPDATE_DELIVERY = bulk.update(interactions, "id", "delivery", "holder")


@dataclass(frozen=True, slots=True)
class Claim:
    """The calls of the earlier request whose answer a retry gets, in the order of its choices; none where it gets none.

    Then `held` tells that there is such an answer, which another client still waits for.
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
    """A client received the end of these calls' answer."""
    only(mark_delivered_many(conn, [(call_ids,)]))


def release(conn: Connection, call_ids: list[str], holder: str) -> None:
    """The client that waited at `holder` is gone: a retry may claim the answer."""
    conn.execute(
        update(interactions)
        .where(
            interactions.c.id.in_(call_ids), interactions.c.delivery == Delivery.OPEN, interactions.c.holder == holder
        )
        .values(delivery=Delivery.FREE, holder=None)
    )


def claim(conn: Connection, session_id: str, digest: str, retry: int, holder: str) -> Claim:
    """Take the oldest undelivered answer to the same request for retry number `retry` of a client at `holder`.

    If every answer was delivered, takes the only one with this body, provided that the retry can belong to no other
    request. A session that has ended has none.
    """
    found = select(sessions.c.status, sessions.c.run_id).where(sessions.c.id == session_id)
    session = conn.execute(found.with_for_update(read=True)).first()  # an end of the session waits for the claim
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

    Raises RequestError 400 when that was another request.
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
    """Write the intent rows of a request, unless another with its `Idempotency-Key` has: then that one's calls.

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
    """What has become of a request's calls, and whether nobody waits for them any more."""
    columns = interactions.c
    rows = conn.execute(select(columns.status, columns.delivery).where(columns.id.in_(call_ids))).all()
    return {row.status for row in rows}, any(row.delivery in CLAIMABLE for row in rows)


def reclaim(conn: Connection, call_ids: list[str], holder: str) -> None:
    """A client that waits at `holder` goes on waiting for an answer that the one before it has left."""
    _take(conn, call_ids[0], holder)


def sealed_sessions(conn: Connection, session_ids: list[str]) -> set[str]:
    """Those of the sessions that take no calls any more."""
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
    """An answer that no client received, and that no call goes on from, is no turn of its agent: a side call."""
    after = interactions.alias()
    conn.execute(
        update(interactions)
        .where(
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
        .values(role=Role.SIDE)
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
    """Whether at most one request with this body was sent for the first time, as far as anybody knows."""
    columns = interactions.c
    recorded = conn.execute(
        select(columns.options).where(
            columns.session_id == session_id,
            columns.digest == digest,
            or_(columns.request_id.is_(None), columns.request_id == columns.id),
        )
    ).scalars()
    refused = events.refusals(conn, run_id, session_id)
    if len(refused) >= events.REFUSALS_KEPT:  # there may be more of them
        return False
    tries = [(options or {}).get("retry", 0) for options in recorded]
    tries += [one.get("retry", 0) for one in refused if one.get("digest") == digest]
    return tries.count(0) <= 1


def _take_again(conn: Connection, call_ids: list[str], retry: int) -> bool:
    """Whether a given answer, from which no call goes on, is delivered again to this retry; to each number once."""
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
    """Whether nobody else took it meanwhile."""
    free = and_(interactions.c.delivery.in_(CLAIMABLE), interactions.c.status.in_(HAS_ANSWER))
    mine = {"delivery": Delivery.OPEN, "holder": holder}
    first = mine if retry is None else mine | {"last_retry": retry}
    if not conn.execute(update(interactions).where(interactions.c.id == first_id, free).values(first)).rowcount:
        return False
    conn.execute(update(interactions).where(interactions.c.request_id == first_id).values(mine))
    return True
