"""Rewards of the last call, for AReaL's routes."""

from __future__ import annotations

import pytest
from play import call, open_group
from sqlalchemy import update

from agentrl.domain.schemas import Delivery
from agentrl.store.sessions import areal_sessions
from agentrl.store.tables import interactions
from agentrl.store.training import rewards

pytestmark = pytest.mark.long_on("postgresql")


def test_an_answer_that_no_client_received_does_not_take_the_reward_of_the_last_call(db, run_id, limits):
    """It becomes a side call at the session's end, and the turns of the agent would have no return."""
    session_id = open_group(db, run_id, limits).session_ids[0]
    with db.write() as conn:
        turn = call(conn, run_id, session_id)
        lost = call(conn, run_id, session_id, parent=turn, delta=(5,))
        conn.execute(update(interactions).where(interactions.c.id == lost).values(delivery=Delivery.FREE))
        areal_sessions.reward(conn, session_id, limits, value=1.0, interaction_id=None, idempotency_key=None)
    assert [one["interaction_id"] for one in db.query(rewards.history, session_id)] == [turn]
