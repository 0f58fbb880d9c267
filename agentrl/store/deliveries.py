"""Which client has an answer, which one waits for it, and which answer a retry gets (schemas.Delivery).

    open ──► given                        the client received the end
      └────► free ──► open                it left; a retry of its claims the answer, and waits in its turn
      └────► unsure ──► open              its proxy died after the commit: perhaps it received the end, perhaps not

A request's calls (`n`, several prompts) go together: the first one's row decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, exists, or_, select, update

from agentrl.errors import RequestError
from agentrl.schemas import Delivery, InteractionStatus, Role, SessionStatus
from agentrl.store import bulk
from agentrl.store.interactions import Intent, begin_many
from agentrl.tables import interactions, sessions

HAS_ANSWER = (InteractionStatus.RUNNING, InteractionStatus.COMPLETE)
"""A call that has an answer, or will have one."""
CLAIMABLE = (Delivery.FREE, Delivery.UNSURE)
UPDATE_GIVEN = bulk.update(interactions, "id", "delivery", "holder")


@dataclass(frozen=True, slots=True)
class Claim:
    """The calls of the earlier request whose answer a retry gets, in the order of its choices; none where it gets none.

    Then `held` tells that there is such an answer, which another client still waits for.
    """

    ids: list[str]
    held: bool = False


def given(conn: Connection, call_ids: list[str]) -> None:
    """A client received the end of these calls' answer."""
    given_many(conn, [(call_ids,)])


def given_many(conn: Connection, requests: Sequence[tuple[list[str]]]) -> list[None]:
    """`given` for many requests at once."""
    ids = [call_id for (call_ids,) in requests for call_id in call_ids]
    bulk.run(conn, UPDATE_GIVEN, [{"key": key, "delivery": Delivery.GIVEN.value, "holder": None} for key in ids])
    return [None] * len(requests)


given.many = given_many  # type: ignore[attr-defined]


def left(conn: Connection, call_ids: list[str], holder: str) -> None:
    """The client that waited at `holder` is gone: a retry may claim the answer."""
    conn.execute(
        update(interactions)
        .where(
            interactions.c.id.in_(call_ids), interactions.c.delivery == Delivery.OPEN, interactions.c.holder == holder
        )
        .values(delivery=Delivery.FREE, holder=None)
    )


def claim(conn: Connection, session_id: str, digest: str, holder: str) -> Claim:
    """Take the oldest undelivered answer to the same request for a client that waits at `holder`.

    There is none in a session that has ended.
    """
    found = select(sessions.c.status).where(sessions.c.id == session_id)
    status = conn.execute(found.with_for_update(read=True)).scalar()  # who ends it waits for the claim
    if status != SessionStatus.OPEN:
        return Claim([])
    earlier = conn.execute(
        select(interactions.c.id, interactions.c.delivery)
        .where(interactions.c.session_id == session_id, interactions.c.digest == digest, *_FIRST_WITH_ANSWER)
        .order_by(interactions.c.created_at, interactions.c.id)
    ).all()
    for row in earlier:
        if row.delivery in CLAIMABLE and _take(conn, row.id, holder):
            return Claim(of_request(conn, row.id))
    return Claim([], held=any(row.delivery == Delivery.OPEN for row in earlier))


def repeated(conn: Connection, session_id: str, repeat_key: str, digest: str, holder: str) -> Claim:
    """The calls of the request that had this `Idempotency-Key`, delivered or not.

    Raises RequestError 422 when that was another request.
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
            422, "this Idempotency-Key was sent with another request", code="idempotency_key_reused",
            param="Idempotency-Key",
        )  # fmt: skip
    _take(conn, earlier.id, holder)
    return Claim(of_request(conn, earlier.id))


def begin_once(conn: Connection, intents: list[Intent], repeat_key: str) -> Claim:
    """Write the intent rows of a request, unless another with its `Idempotency-Key` has: then that one's calls.

    Raises RequestError as `begin` and `repeated` do.
    """
    first = intents[0]
    conn.execute(select(sessions.c.id).where(sessions.c.id == first.session_id).with_for_update(key_share=True))
    found = repeated(conn, first.session_id, repeat_key, first.digest, first.replica)
    if not found.ids:
        for result in begin_many(conn, [(intent,) for intent in intents]):
            if result is not None:
                raise result
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


def take(conn: Connection, call_ids: list[str], holder: str) -> None:
    """A client that waits at `holder` goes on waiting for an answer that the one before it has left."""
    _take(conn, call_ids[0], holder)


def ended(conn: Connection, session_ids: list[str]) -> set[str]:
    """Those of the sessions that take no calls any more."""
    columns = sessions.c
    rows = select(columns.id).where(columns.id.in_(session_ids), columns.status != SessionStatus.OPEN)
    return set(conn.execute(rows).scalars())


def wanted(conn: Connection, call_ids: list[str]) -> bool:
    """Whether a client waits for the calls, here or at another replica."""
    rows = select(interactions.c.id).where(
        interactions.c.id.in_(call_ids), interactions.c.delivery == Delivery.OPEN,
        interactions.c.status == InteractionStatus.RUNNING,
    )  # fmt: skip
    return conn.execute(rows.limit(1)).first() is not None


def demote_unread(conn: Connection, session_id: str) -> None:
    """An answer that no client received, and that no call goes on from, is no turn of its agent: a side call."""
    after = interactions.alias()
    conn.execute(
        update(interactions)
        .where(
            interactions.c.session_id == session_id, interactions.c.status == InteractionStatus.COMPLETE,
            interactions.c.delivery == Delivery.FREE, interactions.c.role.in_((Role.MAIN, Role.SUBAGENT)),
            ~exists(
                select(after.c.id).where(
                    after.c.parent_id == interactions.c.id, after.c.status == InteractionStatus.COMPLETE
                )
            ),
        )
        .values(role=Role.SIDE)
    )  # fmt: skip


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
                    _SIBLING.c.session_id == interactions.c.session_id, _SIBLING.c.request_id == interactions.c.id,
                    _SIBLING.c.status.not_in(HAS_ANSWER),
                )
            ),
        ),
    ),
)  # fmt: skip


def _take(conn: Connection, first_id: str, holder: str) -> bool:
    """Whether nobody else took it meanwhile."""
    free = and_(interactions.c.delivery.in_(CLAIMABLE), interactions.c.status.in_(HAS_ANSWER))
    mine = {"delivery": Delivery.OPEN, "holder": holder}
    if not conn.execute(update(interactions).where(interactions.c.id == first_id, free).values(mine)).rowcount:
        return False
    conn.execute(update(interactions).where(interactions.c.request_id == first_id).values(mine))
    return True
