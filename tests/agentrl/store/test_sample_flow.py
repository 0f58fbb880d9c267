"""Every sample of a run is in one band."""

from __future__ import annotations

import pytest
from history import LIMITS, History
from sqlalchemy import func, select, update

from agentrl.domain.schemas import SessionStatus
from agentrl.store import Database, sample_flow
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import sessions, steps, trajectories


@pytest.fixture
def history(db: Database) -> History:
    """Trained, leased, ready, stale, rejected, evaluated and open ones, and sessions without a call."""
    History(db, name="other", seed=9).train(1)
    made = History(db, seed=1)
    made.train(2)
    made.group(versions=[0, 1, 2])
    made.group(versions=[0])
    made.group()
    assert made.lease() is not None
    made.group()
    made.group(reward=False)
    made.rejected()
    made.evaluation()
    with db.write() as conn:
        new = group_starts.start_group(conn, made.run_id, LIMITS, [codec.new_id() for _ in range(2)])
        sealing.end(conn, new.session_ids[0], SessionStatus.FAILED, "died", LIMITS)
    return made


def test_bands_sum_to_the_rows_of_the_store(history: History) -> None:
    found = history.db.query(sample_flow.of_run, history.run_id)
    with history.db.read() as conn:
        paths = select(func.count(), func.sum(trajectories.c.trainable_tokens)).where(
            trajectories.c.run_id == history.run_id
        )
        n_paths, tokens = conn.execute(paths).one()
        bare = select(func.count()).where(
            sessions.c.run_id == history.run_id,
            sessions.c.is_eval.is_(False),
            sessions.c.id.not_in(select(trajectories.c.session_id)),
        )
        n_bare = conn.execute(bare).scalar_one()
    assert found["samples"] == sum(band["samples"] for band in found["bands"]) == n_paths + n_bare
    assert sum(band["tokens"] for band in found["bands"]) == tokens
    keys = [(band["band"], band["reason"]) for band in found["bands"]]
    assert len(keys) == len(set(keys))
    assert {band for band, _ in keys} == {"trained", "waiting", "stale", "rejected", "open", "without calls"}
    assert ("without calls", "failed") in keys
    assert ("stale", "too_old") in keys


@pytest.mark.long_on("postgresql")
def test_trained_samples_are_those_of_the_steps(history: History) -> None:
    found = history.db.query(sample_flow.of_run, history.run_id)
    (trained,) = (band for band in found["bands"] if band["band"] == "trained")
    assert trained["samples"] == sum(len(batch.trajectories) for batch in history.batches.values())


@pytest.mark.long_on("postgresql")
def test_steps_without_all_totals_are_counted_by_their_trajectories(history: History) -> None:
    found = history.db.query(sample_flow.of_run, history.run_id)
    with history.db.write() as conn:
        conn.execute(update(steps).values(batch_digest=None, wasted_tokens=0, tokens_trained=0))
    assert history.db.query(sample_flow.of_run, history.run_id) == found


def test_a_run_without_sessions_has_no_bands(db: Database) -> None:
    empty = History(db)
    assert db.query(sample_flow.of_run, empty.run_id) == {"samples": 0, "bands": []}
