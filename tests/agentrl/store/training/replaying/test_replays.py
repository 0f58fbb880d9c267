"""Groups with a rare success are trained once more, within the staleness bound, as often as allowed, and on record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from play import begin, call, finish, group, take
from run_records import create_run
from sqlalchemy import select, text

from agentrl.domain.batches.outline_message import pack, unpack
from agentrl.domain.batches.reward_scaling import Scale
from agentrl.domain.curriculum import Replay
from agentrl.domain.schemas import Batch, SessionStatus
from agentrl.errors import StoreError
from agentrl.store import Database, runs
from agentrl.store.audit import run_audit
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import replays, step_trajectories
from agentrl.store.tables import steps as steps_table
from agentrl.store.training import rewards, step_resume, steps
from agentrl.store.views.results import step_batch

pytestmark = pytest.mark.long_on("postgresql")
RULE = Replay(success=1.0, most_rate=0.25, times=1, most=1)
RARE, NEVER, OFTEN = (0.0, 1.0, 0.0, 0.0), (0.0,) * 4, (1.0, 1.0, 0.0, 0.0)


@pytest.fixture
def limits(limits: Limits) -> Limits:
    return replace(limits, max_staleness=100)


@pytest.fixture
def run_id(db: Database) -> str:
    with db.write() as conn:
        return create_run(conn, config={"rollout": {"replay": {"times": 1}}}, task_data=[{"n": 0}], steps=100)


def audited(db: Database, run_id: str) -> list[str]:
    with db.read() as conn:
        return list(run_audit.scan(conn, run_id))


def groups_of(batch: Batch) -> list[str]:
    """The groups of a batch, in order."""
    return list(dict.fromkeys(t.group_id for t in batch.trajectories))


class Played:
    """A run whose groups are played and trained step by step; `groups` are the ids by step."""

    def __init__(self, db: Database, run_id: str, limits: Limits) -> None:
        self.db, self.run_id, self.limits = db, run_id, limits
        self.epoch = begin(db, run_id)

    def play(self, version: int, *values: Sequence[float]) -> list[str]:
        return [group(self.db, self.run_id, self.limits, version=version, values=one).group_id for one in values]

    def train(self, step: int, rule: Replay | None = RULE, **kwargs: Any) -> Batch:
        batch = take(self.db, self.run_id, self.epoch, step, replay=rule, **kwargs)
        assert batch is not None
        finish(self.db, self.run_id, self.epoch, batch)
        return batch


@pytest.fixture
def played(db: Database, run_id: str, limits: Limits) -> Played:
    return Played(db, run_id, limits)


def test_a_rare_success_is_trained_once_more_and_no_other(db, run_id, played):
    first = played.play(0, RARE, NEVER)
    assert groups_of(played.train(1)) == first
    second = played.play(1, OFTEN, NEVER)
    batch = played.train(2)
    assert groups_of(batch) == [first[0], *second]
    again = [t for t in batch.trajectories if t.group_id == first[0]]
    assert [t.episode_return for t in again] == [0.0, 1.0, 0.0, 0.0]
    assert all(t.loss_mask.sum() == 5 for t in again)
    assert all(set(t.versions[t.loss_mask].tolist()) == {0} for t in again)  # one version old, as recorded
    assert batch.ages[0] == 1
    third = played.play(2, OFTEN, OFTEN)
    assert groups_of(played.train(3, max_staleness=5)) == third  # it has been trained again once
    with db.read() as conn:
        rows = conn.execute(select(replays)).all()
        assert {row.step_id for row in rows} == {batch.step_id}
        trained = conn.execute(select(step_trajectories.c.trajectory_id, step_trajectories.c.step_id)).all()
        of_group = {t.trajectory_id for t in again}
        assert sum(row.trajectory_id in of_group for row in trained) == 8  # twice each
        assert len(trained) == 4 * 6 + 4
        found = conn.execute(select(steps_table).where(steps_table.c.step == 2)).one()
        assert (found.groups, found.trajectories) == (3, 12)
        assert runs.get(conn, run_id).returned == 0
        counted = runs.state_counts(conn, run_id)
        assert (counted["groups"], counted["trajectories"]) == ({"trained": 6}, {"trained": 24})
        assert {row["group_id"] for row in step_batch.paths(conn, found)} == {first[0], *second}
        assert len(step_batch.members(conn, found)) == 3
        assert steps.batch(conn, batch.step_id).digest() == batch.digest()  # it can be rebuilt
    assert audited(db, run_id) == []


def test_without_a_rule_nothing_is_trained_again(db, run_id, played):
    played.play(0, RARE, RARE)
    played.train(1, None)
    second = played.play(1, RARE, RARE)
    assert groups_of(played.train(2, None)) == second
    with db.read() as conn:
        assert conn.execute(select(replays)).all() == []
    assert audited(db, run_id) == []


def test_the_rarest_come_first_and_the_bound_is_kept(db, run_id, played):
    rule = replace(RULE, most_rate=0.5)
    first = played.play(0, OFTEN, RARE)
    played.train(1, rule)
    played.play(1, NEVER, NEVER)
    assert groups_of(played.train(2, rule))[0] == first[1]
    played.play(2, NEVER, NEVER)
    assert not set(groups_of(played.train(3, rule))) & set(first)  # two versions old: above max_staleness
    played.play(3, NEVER, NEVER)
    assert not set(groups_of(played.train(4, rule, max_staleness=2))) & set(first)  # three versions old
    assert audited(db, run_id) == []


def test_a_group_is_trained_again_at_most_so_often(db, run_id, played):
    with db.write() as conn:
        conn.execute(runs.runs.update().values(config={"rollout": {"replay": {"times": 2}}}))
    rule, bound = replace(RULE, times=2, most=4), 9
    rare, _ = played.play(0, RARE, NEVER)
    played.train(1, rule, max_staleness=bound)
    seen = []
    for step in range(2, 6):
        played.play(step - 1, NEVER, NEVER)
        seen.append(rare in groups_of(played.train(step, rule, max_staleness=bound)))
    assert seen == [True, True, False, False]
    assert audited(db, run_id) == []


def test_a_step_that_is_rolled_back_gives_its_replay_back(db, run_id, played):
    rare, _ = played.play(0, RARE, NEVER)
    first = played.train(1)
    played.play(1, NEVER, NEVER)
    lost = played.train(2)
    assert rare in groups_of(lost)
    for anchor, steps_again in ((first.step_id, (2,)), (None, (1, 2))):
        played.epoch = begin(db, run_id)
        with db.write() as conn:
            step_resume.reconcile(conn, run_id, played.epoch, anchor)
        assert audited(db, run_id) == []
        for step in steps_again:
            batch = played.train(step, max_staleness=3)
            assert rare in groups_of(batch)
        assert audited(db, run_id) == []
    with db.read() as conn:
        steps_of = conn.execute(select(replays.c.step_id).distinct()).scalars().all()
    assert len(steps_of) == 3  # two of them were rolled back, and stay on record


def test_a_lease_that_is_undone_replays_nothing(db, run_id, played):
    rare, _ = played.play(0, RARE, NEVER)
    played.train(1)
    refused, _ = played.play(1, NEVER, NEVER)
    batch = take(db, run_id, played.epoch, 2, replay=RULE)
    with pytest.raises(StoreError, match="has not leased"), db.write() as conn:
        steps.refuse(conn, run_id, played.epoch, batch.step_id, {rare: "no"})  # it was trained already
    with db.write() as conn:
        steps.refuse(conn, run_id, played.epoch, batch.step_id, {refused: "no"})
        assert conn.execute(select(replays)).all() == []
    assert audited(db, run_id) == []
    played.play(1, NEVER)
    assert rare in groups_of(played.train(2))


@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_what_is_too_old_stays_in_the_baseline_alone(db, run_id, limits, played, policy):
    played.play(0, NEVER)
    played.train(1, n_groups=1, stale_policy=policy)
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in RARE])
        for session_id, value, versions in zip(new.session_ids, RARE, ((0, 0), (0, 1), (1, 1), (0, 0)), strict=True):
            parent = call(conn, run_id, session_id, version=versions[0])
            call(conn, run_id, session_id, parent=parent, delta=(5,), output=(6, 7, 8), version=versions[1])
            rewards.add(conn, session_id, value=value, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
    assert len(played.train(2, n_groups=1, stale_policy=policy).trajectories) == 4
    played.play(2, NEVER)
    batch = played.train(3, n_groups=1, stale_policy=policy)
    masks = {t.session_id: int(t.loss_mask.sum()) for t in batch.trajectories}
    # at step 3 version 0 is too old: `mask` keeps the newer tokens of the second session, `drop` none of it
    expected = [0, 3, 5, 0] if policy == "mask" else [0, 0, 5, 0]
    assert [masks[session_id] for session_id in new.session_ids] == expected
    returns = {t.session_id: t.episode_return for t in batch.trajectories}
    assert [returns[session_id] for session_id in new.session_ids] == list(RARE)
    assert audited(db, run_id) == []


def test_ranks_know_which_groups_are_replayed(db, run_id, played):
    rare, _ = played.play(0, RARE, NEVER)
    played.train(1)
    played.play(1, NEVER, NEVER)
    step_id = played.train(2).step_id
    with db.read() as conn:
        outline = steps.outlined(conn, step_id)
    assert outline.replayed == {rare} == unpack(pack(outline)).replayed
    assert {one.group_id for one in outline.fresh} == {one.group_id for one in outline.trajectories} - {rare}


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("DELETE FROM replays", "was trained by 2 surviving steps"),
        (
            "DELETE FROM step_trajectories WHERE step_id = :step AND trajectory_id = :one",
            "replays .*: it is young, but its step says otherwise",
        ),
        ("UPDATE replays SET stale = :yes WHERE trajectory_id = :one", "it is stale, but its step says otherwise"),
        ("INSERT INTO replays VALUES (:first, :one, :no)", "trains it first, which is no earlier one"),
        ("UPDATE runs SET config = '{}'", "1 steps train it once more, rollout.replay allows 0"),
        ("UPDATE trajectories SET state = 'ready', lease_step_id = NULL WHERE id = :one", "but 1 steps train it once"),
    ],
)
def test_the_audit_names_replays_that_are_not_on_record(db, run_id, played, sql, said):
    rare, _ = played.play(0, RARE, NEVER)
    first = played.train(1)
    played.play(1, NEVER, NEVER)
    batch = played.train(2)
    one = next(t.trajectory_id for t in batch.trajectories if t.group_id == rare)
    names = {"step": batch.step_id, "first": first.step_id, "one": one, "yes": True, "no": False}
    with db.write() as conn:
        conn.execute(text(sql), {name: value for name, value in names.items() if f":{name}" in sql})
    found = "\n".join(audited(db, run_id))
    assert re.search(said, found), found


def test_rewards_of_replays_and_of_greedy_sessions_are_scaled_but_counted_once_or_never(db, run_id, limits):
    limits = replace(limits, group_size=4, greedy_baseline=True)
    scales, epoch = {"reward": Scale(normalize="running")}, begin(db, run_id)
    values = {1: (*RARE, 3.0), 2: (*OFTEN, 5.0)}  # the last is the greedy session's
    for step, of_group in values.items():
        with db.write() as conn:
            new = group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in of_group])
            for session_id, value in zip(new.session_ids, of_group, strict=True):
                greedy = {"trainable": False, "temperature": 0.0} if session_id == new.session_ids[-1] else {}
                call(conn, run_id, session_id, version=step - 1, **greedy)
                rewards.add(conn, session_id, value=value, discount=1.0)
                sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
        batch = take(
            db, run_id, epoch, step, n_groups=1, max_staleness=5, replay=RULE, scales=scales, needs_greedy=True
        )
        assert batch is not None
        finish(db, run_id, epoch, batch)
    samples = [v for of_group in values.values() for v in of_group[:-1]]
    mean, deviation = np.mean(samples), np.std(samples) + 1e-6
    returns = sorted((t.episode_return, t.greedy_return) for t in batch.trajectories)
    expected = sorted((v - mean, of_group[-1] - mean) for of_group in values.values() for v in of_group[:-1])
    np.testing.assert_allclose(returns, np.array(expected) / deviation, rtol=1e-9)
    assert audited(db, run_id) == []
