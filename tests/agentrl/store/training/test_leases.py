"""Leases: concurrent leasers, concurrent rewards, and which trajectories are young enough."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import sleep
from types import SimpleNamespace

import pytest
from play import begin, finish, group, take
from sqlalchemy import insert, select

from agentrl.domain.schemas import VersionState
from agentrl.errors import FencedError, StoreError
from agentrl.store import Database, runs
from agentrl.store.audit import run_audit
from agentrl.store.db.codec import new_id
from agentrl.store.tables import groups, trajectories
from agentrl.store.tables import steps as steps_table
from agentrl.store.training import leases, returns, rewards, step_resume, steps, version_states
from agentrl.store.training import trajectories as paths

LEASERS = 8


@pytest.fixture
def roomy(limits):
    return replace(limits, groups_per_step=1000)


def at_once(n, work):
    """`work(i)` in n threads that start together; the results in order."""
    together = threading.Barrier(n)

    def one(i):
        together.wait()
        return work(i)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))


def states(db, table=trajectories):
    with db.read() as conn:
        return Counter(conn.execute(select(table.c.state)).scalars())


@pytest.mark.long_on("sqlite")
def test_no_two_claims_hold_the_same_trajectory(db, database_url, run_id, roomy):
    """Eight leasers with connections of their own, more asking than there is, and steps of their own to write to."""
    for _ in range(3 * LEASERS):
        group(db, run_id, roomy)
    databases = [Database(database_url) for _ in range(LEASERS)]
    step_ids = [new_id() for _ in databases]
    with db.write() as conn:
        conn.execute(
            insert(steps_table),
            [
                {
                    "id": step_id,
                    "run_id": run_id,
                    "epoch": 1,
                    "step": 100 + i,
                    "state": "started",
                    "version_before": 0,
                    "max_staleness": 1,
                    "turn_discount": 1.0,
                    "metrics": {},
                    "started_at": 0.0,
                }
                for i, step_id in enumerate(step_ids)
            ],
        )

    def lease(i):
        held: list[str] = []
        misses = 0
        while misses < 3:
            with databases[i].write() as conn:
                claimed = leases.claim(conn, run_id, 1, young={0}, policy="mask")
                if claimed is None:  # none left, or others hold the rest at this moment
                    misses += 1
                else:
                    leases.assign(conn, claimed, step_ids[i], 1)
                    held += claimed.trajectories
        return held

    held = at_once(LEASERS, lease)
    for database in databases:
        database.close()
    everything = [t for of_one in held for t in of_one]
    assert len(everything) == len(set(everything)) == 2 * 3 * LEASERS
    assert states(db, groups) == {"leased": 3 * LEASERS}
    with db.read() as conn:
        for step_id, mine in zip(step_ids, held, strict=True):
            of_step = select(trajectories.c.id).where(trajectories.c.lease_step_id == step_id)
            assert set(conn.execute(of_step).scalars()) == set(mine)


@pytest.mark.long_on("sqlite")
def test_trainers_of_one_epoch_that_ask_for_one_step_get_one_lease(db, run_id, limits):
    for _ in range(4):
        group(db, run_id, limits)
    epoch = begin(db, run_id)
    batches = at_once(LEASERS, lambda _: take(db, run_id, epoch, 1))
    assert len({batch.digest() for batch in batches}) == 1
    assert states(db) == {"leased": 4, "ready": 4}


@pytest.mark.long_on("sqlite")
def test_old_and_new_epochs_that_race_leave_one_lease_of_the_newest(db, run_id, limits):
    for _ in range(4):
        group(db, run_id, limits)

    def trainer(_):
        """What a trainer does: a new epoch, resume, lease; it is fenced whenever a newer one came between."""
        try:
            epoch = begin(db, run_id)
            with db.write() as conn:
                step_resume.reconcile(conn, run_id, epoch, None)
            return epoch, take(db, run_id, epoch, 1)
        except FencedError:
            return None

    leased = [found for found in at_once(LEASERS, trainer) if found is not None]
    newest, batch = max(leased, key=lambda found: found[0])
    assert newest == LEASERS
    assert states(db) == {"leased": 4, "ready": 4}
    with db.read() as conn:
        (step,) = steps.of_run(conn, run_id)
    assert (step.id, step.epoch) == (batch.step_id, newest)


@pytest.mark.long_on("sqlite")
def test_a_reward_is_in_the_batch_or_is_not_applied(db, run_id, roomy):
    """Four at once try to get a last reward into a group while it is leased."""
    epoch = begin(db, run_id)
    seen: Counter[bool] = Counter()
    for step in range(1, 13):
        new = [group(db, run_id, roomy) for _ in range(2)]
        late = [session_id for one in new for session_id in one.session_ids]
        digests: list[str] = []

        def act(i, *, step=step, late=late, digests=digests):
            if i == 0:
                sleep(0.002 * (step % 5))
                while (batch := take(db, run_id, epoch, step, max_staleness=1000)) is None:
                    pass  # a group is passed over while a reward of it is being written
                digests.append(batch.digest())
                return batch
            with db.write() as conn:
                return rewards.add(conn, late[i - 1], value=5.0 + i, discount=1.0).applied

        batch, *applied = at_once(5, act)
        seen.update(applied)
        by_session = {t.session_id: t.episode_return for t in batch.trajectories}
        for i, (session_id, was_applied) in enumerate(zip(late, applied, strict=True), 1):
            assert (by_session[session_id] == 5.0 + i) == was_applied
        finish(db, run_id, epoch, batch)
        with db.read() as conn:
            assert steps.batch(conn, batch.step_id).digest() == digests[0]
    assert sum(seen.values()) == 48


def test_a_publish_that_meets_a_roll_back_does_not_bring_the_version_back(db, run_id, limits):
    for _ in range(2):
        group(db, run_id, limits)
    epoch = begin(db, run_id)
    version = finish(db, run_id, epoch, take(db, run_id, epoch, 1), publish=False)
    newer = begin(db, run_id)
    with ThreadPoolExecutor(1) as pool:
        with db.write() as conn:
            assert step_resume.reconcile(conn, run_id, newer, None).rolled_back_steps == [1]
            late = pool.submit(db.transact, version_states.mark_published, run_id, version)
            sleep(0.2)
        with pytest.raises(StoreError, match="surviving lineage"):
            late.result()
    with db.read() as conn:
        assert runs.version(conn, run_id, version).state == VersionState.ROLLED_BACK
        assert runs.get(conn, run_id).current_version == 0


@pytest.mark.parametrize(
    ("policy", "versions", "expected"),
    [
        ("mask", (3, 4), True),
        ("mask", (2, 3), True),  # one young token is enough
        ("mask", (1, 2), False),
        ("drop", (3, 4), True),
        ("drop", (2, 3), False),  # one old token is too many
        ("drop", (1, 2), False),
    ],
)
def test_the_stale_policy_decides_which_token_makes_a_trajectory_young(policy, versions, expected):
    trajectory = SimpleNamespace(min_version=versions[0], max_version=versions[1])
    assert leases.is_young(trajectory, {3, 4}, policy) is expected


# -- groups that teach nothing -------------------------------------------------------------------------------------


@pytest.mark.long_on("postgresql")
def test_tied_groups_are_passed_over_and_give_their_place_back(db, run_id, roomy):
    tied = [group(db, run_id, roomy, values=values) for values in [(0.5, 0.5), (-1.0, -1.0), (0.0, 0.0, 0.0)]]
    wanted = group(db, run_id, roomy, values=(0.0, 1.0))
    epoch = begin(db, run_id)
    assert take(db, run_id, epoch, 1, skip_tied=True) is None  # one of two is there
    with db.read() as conn:
        assert runs.get(conn, run_id).returned == 3
        reasons = conn.execute(select(trajectories.c.state, trajectories.c.reason).distinct()).all()
        assert {tuple(row) for row in reasons} == {("ready", None), ("stale", "tied")}
        assert list(run_audit.scan(conn, run_id)) == []
    for new in tied:
        with db.write() as conn:
            assert not rewards.add(conn, new.session_ids[0], value=9.0, discount=1.0).applied  # too late for it
    other = group(db, run_id, roomy, values=(0.0, 0.0, 0.25))
    batch = take(db, run_id, epoch, 1, skip_tied=True)
    assert {t.session_id for t in batch.trajectories} == {*wanted.session_ids, *other.session_ids}
    finish(db, run_id, epoch, batch)
    with db.read() as conn:
        assert list(run_audit.scan(conn, run_id)) == []


def test_the_order_of_rewards_does_not_untie_a_group(db, run_id, roomy):
    """Of .1, .2 and .3, one order gives 0.6 and another 0.6000000000000001."""
    new = group(db, run_id, roomy, values=(0.0, 0.0))
    for session_id, values in zip(new.session_ids, [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1)], strict=True):
        with db.write() as conn:
            for i, value in enumerate(values):
                rewards.add(conn, session_id, value=value, discount=1.0, name=str(i))
    with db.read() as conn:
        recorded = sorted(set(conn.execute(select(trajectories.c["return"])).scalars()))
        assert recorded == [0.6, 0.1 + 0.2 + 0.3]
        credited = returns.of_sessions(conn, new.session_ids, 1.0)
        loaded = paths.load(conn, conn.execute(select(trajectories.c.id)).scalars().all(), ages={0: 0}, discount=1.0)
    for t in loaded.trajectories:  # a turn's return is the very number that the baseline is made of
        assert t.turn_returns.tolist() == [credited[t.session_id].episode_return] * 2
    assert take(db, run_id, begin(db, run_id), 1, skip_tied=True) is None
    with db.read() as conn:
        assert conn.execute(select(trajectories.c.reason).distinct()).scalars().all() == ["tied"]


def test_tied_groups_are_trained_unless_it_is_asked_for(db, run_id, roomy):
    for _ in range(2):
        group(db, run_id, roomy, values=(0.5, 0.5))
    batch = take(db, run_id, begin(db, run_id), 1)
    assert len(batch.trajectories) == 4


@pytest.mark.long_on("postgresql")
def test_a_group_that_is_too_old_is_not_called_tied(db, run_id, roomy):
    epoch = begin(db, run_id)
    for step in (1, 2):
        for _ in range(2):
            group(db, run_id, roomy, version=step - 1)
        finish(db, run_id, epoch, take(db, run_id, epoch, step))
    group(db, run_id, roomy, version=0, values=(0.5, 0.5))
    assert take(db, run_id, epoch, 3, skip_tied=True) is None
    with db.read() as conn:
        assert conn.execute(
            select(trajectories.c.reason).where(trajectories.c.state == "stale").distinct()
        ).scalars().all() == ["too_old"]
