"""The trace of a session shows the roles that its calls have if it ends now."""

from __future__ import annotations

import pytest
from play import call, open_group
from sqlalchemy import update

from agentrl.domain.schemas import Delivery, SessionStatus
from agentrl.store.sessions import session_view
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import interactions
from agentrl.store.training import rewards

pytestmark = pytest.mark.long_on("postgresql")


def test_an_answer_that_no_client_received_is_a_side_call_in_the_trace_before_and_after_the_end(db, run_id, limits):
    """Otherwise a process reward would judge it as a turn, and make it a trained side call."""
    new = open_group(db, run_id, limits)
    session_id = new.session_ids[0]
    with db.write() as conn:
        first = call(conn, run_id, session_id)
        lost, again = (call(conn, run_id, session_id, parent=first, delta=(5,)) for _ in range(2))
        conn.execute(update(interactions).where(interactions.c.id == first).values(delivery=Delivery.FREE))
        conn.execute(update(interactions).where(interactions.c.id == lost).values(delivery=Delivery.FREE))
        rewards.add(conn, session_id, value=1.0, discount=1.0)
    expected = {first: "main", lost: "side", again: "main"}  # the first one is extended
    for _ in range(2):
        trace = db.query(session_view.with_trace, session_id)["calls"]
        assert {one["id"]: one["role"] for one in trace} == expected
        with db.write() as conn:
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
