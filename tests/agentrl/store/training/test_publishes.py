"""Which versions engines may serve while the run has another one: pending ones, and those within the lag."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, insert, update

from agentrl.errors import RequestError, StoreError
from agentrl.store import Database
from agentrl.store import runs as run_records
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import runs, weight_versions
from agentrl.store.training import memory_leases, publishes, trainer_epochs, version_states

PUBLISHED, PENDING, ROLLED_BACK = "published", "pending", "rolled_back"
LINEAGE = {1: (0, PUBLISHED), 2: (1, PUBLISHED), 3: (2, ROLLED_BACK), 4: (2, PUBLISHED), 5: (4, PUBLISHED)}
"""Version → parent and state: version 3 was rolled back, and 4 took its place."""


@pytest.fixture
def lineage(db: Database, run_id: str) -> str:
    def fill(conn: Connection) -> None:
        for version, (parent, state) in (LINEAGE | {6: (5, PENDING)}).items():
            of: dict[str, Any] = {"run_id": run_id, "version": version, "parent_version": parent, "state": state}
            conn.execute(insert(weight_versions).values(**of, step=version, created_at=0.0, path=f"/w/{version}"))
        conn.execute(update(runs).where(runs.c.id == run_id).values(current_version=5, published_step=5))

    db.transact(fill)
    return run_id


@pytest.mark.parametrize(
    ("reported", "lag", "wanted"),
    [
        (5, 2, 5),
        (6, 2, 6),  # it is being published
        (4, 0, 5),
        (4, 1, 4),
        (2, 1, 5),
        (2, 2, 2),
        (3, 9, 5),  # rolled back
        (0, 9, 0),
        (0, 3, 5),
        (7, 9, 5),  # unknown
        (None, 9, 5),
    ],
)
def test_an_engine_may_keep_the_last_ancestors(
    db: Database, lineage: str, reported: int, lag: int, wanted: int
) -> None:
    assert db.query(publishes.version_to_serve, lineage, reported, lag).version == wanted


@pytest.mark.parametrize(
    ("version", "lag", "kept"),
    [(5, 0, set()), (5, 1, {4}), (5, 2, {4, 2}), (5, 9, {4, 2, 1, 0}), (0, 9, set()), (9, 9, set())],
)
def test_versions_within_the_lag(db: Database, lineage: str, version: int, lag: int, kept: set[int]) -> None:
    assert db.query(publishes.within_lag, lineage, version, lag) == kept


def test_engines_change_to_the_runs_version_unless_it_was_rolled_back_or_their_memory_is_lent(
    db: Database, lineage: str
) -> None:
    assert db.query(publishes.target, lineage) == (5, "/w/5", None)
    epoch = db.transact(trainer_epochs.begin_epoch, lineage)
    db.transact(memory_leases.grant, lineage, epoch, 60.0, "r")
    assert db.query(publishes.target, lineage) is None
    db.transact(memory_leases.end, lineage, epoch, "r")
    assert db.query(publishes.target, lineage) is not None
    row = update(weight_versions).where(weight_versions.c.version == 5).values(state=ROLLED_BACK)
    db.transact(lambda conn: conn.execute(row))
    assert db.query(publishes.target, lineage) is None


@pytest.mark.parametrize(("max_staleness", "lag", "groups"), [(2, 0, 3), (2, 1, 2), (2, 2, 1)])
def test_admission_leaves_the_lag_of_the_staleness_to_the_engines(
    db: Database, run_id: str, limits: Limits, max_staleness: int, lag: int, groups: int
) -> None:
    bound = replace(limits, max_staleness=max_staleness, lag=lag, groups_per_step=1, max_concurrent_groups=100)
    for n in range(groups):
        db.transact(group_starts.start_group, run_id, bound, [f"key-{n}-{i}" for i in range(limits.group_size)])
    with pytest.raises(RequestError, match="no capacity"):
        db.transact(group_starts.start_group, run_id, bound, [f"last-{i}" for i in range(limits.group_size)])


@pytest.mark.parametrize("version", [1, 4])
def test_a_trainer_moves_the_run_back_only_from_a_version_that_was_rolled_back(
    db: Database, lineage: str, version: int
) -> None:
    """An answer of its own that comes late, of a version before the one that the run has now, changes nothing."""
    epoch = db.transact(trainer_epochs.begin_epoch, lineage)
    assert db.query(version_states.overtaken_by, lineage, version) == 5
    with pytest.raises(StoreError, match=f"version {version} is older than the run's version 5"):
        db.transact(version_states.mark_published, lineage, version, epoch)
    assert db.query(run_records.get, lineage).current_version == 5
    for again in (5, 6):
        assert db.query(version_states.overtaken_by, lineage, again) is None
        db.transact(version_states.mark_published, lineage, again, epoch)
    undone = update(weight_versions).where(weight_versions.c.version >= 5).values(state=ROLLED_BACK)
    db.transact(lambda conn: conn.execute(undone))
    assert db.query(version_states.overtaken_by, lineage, version) is None
    db.transact(version_states.mark_published, lineage, version, epoch)
    assert db.query(run_records.get, lineage).current_version == version
