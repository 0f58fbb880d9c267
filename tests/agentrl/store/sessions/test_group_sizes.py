"""The number of sessions of a task's next group follows from its recorded rewards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from play import call
from run_records import create_run
from sqlalchemy import select

from agentrl.domain.curriculum import AdaptiveGroup
from agentrl.domain.schemas import SessionStatus
from agentrl.store.audit import run_audit
from agentrl.store.db.codec import new_id
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import groups
from agentrl.store.training import rewards

SIZES = AdaptiveGroup(least=2, most=6, first=4, chance=0.8, success=1.0, groups=2)


@pytest.fixture
def limits(limits: Limits) -> Limits:
    return replace(limits, max_staleness=10**6, max_concurrent_groups=10**6, adaptive=SIZES)


@pytest.mark.long_on("postgresql")
def test_a_group_has_as_many_sessions_as_its_task_needs(db, limits):
    with db.write() as conn:
        run_id = create_run(conn, name="sized", task_data=[{"n": 0}], steps=10**6)
    found = []
    for values in ((1.0, 0.0, 1.0, 0.0), (0.0,) * 4, (0.0,) * 6, (1.0,) * 6, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)):
        with db.write() as conn:
            new = group_starts.start_group(conn, run_id, limits, [new_id() for _ in range(limits.most_sessions)])
            found.append(len(new.session_ids))
            for session_id, value in zip(new.session_ids, values, strict=False):
                call(conn, run_id, session_id)
                rewards.add(conn, session_id, value=value, discount=1.0)
                sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
    # the rates are unknown; 1/2; 2/8; 0; 6/12
    assert found == [4, 4, 6, 6, 4]
    with db.read() as conn:
        assert list(conn.execute(select(groups.c.size).order_by(groups.c.cursor)).scalars()) == found
        assert list(run_audit.scan(conn, run_id)) == []


@pytest.mark.long_on("postgresql")
def test_a_repeated_start_gets_the_same_sessions(db, limits):
    with db.write() as conn:
        run_id = create_run(conn, name="sized", task_data=[{"n": 0}], steps=10**6)
        keys = [new_id() for _ in range(limits.most_sessions)]
        first = group_starts.start_group(conn, run_id, limits, keys, start_digest="d")
        again = group_starts.start_group(conn, run_id, limits, keys, start_digest="d")
    assert len(first.session_ids) == 4
    assert again.session_ids == first.session_ids
