"""Groups with a greedy session: its return is the others' baseline, and nothing of it is ever trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from play import begin, call, finish, group, take
from sqlalchemy import select, update

from agentrl.domain.credit import SessionRewards
from agentrl.domain.curriculum import Curriculum
from agentrl.domain.schemas import SessionStatus
from agentrl.domain.verdicts import EVERYTHING, Verdict
from agentrl.errors import RequestError
from agentrl.store import Database, runs
from agentrl.store.audit import run_audit
from agentrl.store.db.codec import new_id
from agentrl.store.sessions import areal_sessions, child_sessions, group_starts, named_groups, task_skips
from agentrl.store.sessions.ends import sealing
from agentrl.store.sessions.ends.settling import NO_BASELINE
from agentrl.store.sessions.group_starts import NewGroup
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import groups, interactions, sessions, trajectories
from agentrl.store.training import rewards, steps
from agentrl.store.training.leases import WITHOUT_GREEDY


@pytest.fixture
def limits(limits: Limits) -> Limits:
    return replace(limits, greedy_baseline=True)


def start(db: Database, run_id: str, limits: Limits) -> NewGroup:
    with db.write() as conn:
        return group_starts.start_group(conn, run_id, limits, [new_id() for _ in range(limits.most_sessions)])


def play(db: Database, run_id: str, session_id: str, limits: Limits, value: float | None, **end: Any) -> str:
    """One call, greedy where the session is, a reward, and the end; returns the call."""
    with db.write() as conn:
        is_baseline = conn.execute(select(sessions.c.is_baseline).where(sessions.c.id == session_id)).scalar_one()
        how = {"trainable": False, "temperature": 0.0} if is_baseline else {}
        made = call(conn, run_id, session_id, **how)
        if value is not None:
            rewards.add(conn, session_id, value=value, discount=1.0)
        ended = {"status": SessionStatus.COMPLETED, "verdict": EVERYTHING} | end
        sealing.end(conn, session_id, ended["status"], None, limits, ended["verdict"])
    return made


def played(db: Database, run_id: str, limits: Limits, values: Sequence[float]) -> NewGroup:
    new = start(db, run_id, limits)
    for session_id, value in zip(new.session_ids, values, strict=True):
        play(db, run_id, session_id, limits, value)
    return new


def states(db: Database, group_id: str) -> tuple[str, str | None, list[tuple[str, str | None]]]:
    """A group's state and reason, and those of its trajectories in the order of its sessions."""
    with db.read() as conn:
        of_group = conn.execute(select(groups.c.state, groups.c.reject_reason).where(groups.c.id == group_id)).one()
        found = conn.execute(
            select(trajectories.c.state, trajectories.c.reason)
            .join(sessions, sessions.c.id == trajectories.c.session_id)
            .where(trajectories.c.group_id == group_id)
            .order_by(sessions.c.sample_index)
        )
        return of_group.state, of_group.reject_reason, [(row.state, row.reason) for row in found]


def violations(db: Database, run_id: str) -> list[str]:
    with db.read() as conn:
        return list(run_audit.scan(conn, run_id))


@pytest.mark.long_on("postgresql")
def test_the_greedy_return_reaches_the_batch_and_only_the_samples_train(db, run_id, limits):
    new = played(db, run_id, limits, [0.0, 1.0, 0.75])
    other = played(db, run_id, limits, [1.0, 1.0, -0.5])
    assert states(db, new.group_id) == (
        "ready",
        None,
        [("ready", None), ("ready", None), ("rejected", "baseline")],
    )
    epoch = begin(db, run_id)
    batch = take(db, run_id, epoch, 1, needs_greedy=True)
    assert {t.session_id for t in batch.trajectories} == {*new.session_ids[:2], *other.session_ids[:2]}
    assert {t.group_id: t.greedy_return for t in batch.trajectories} == {new.group_id: 0.75, other.group_id: -0.5}
    with db.write() as conn:
        answer = rewards.add(conn, new.session_ids[2], value=9.0, discount=1.0)
    assert not answer.applied  # the lease has frozen the baseline too
    again = db.query(steps.batch, batch.step_id)
    assert [t.greedy_return for t in again.trajectories] == [t.greedy_return for t in batch.trajectories]
    finish(db, run_id, epoch, batch)
    assert states(db, new.group_id)[2] == [("trained", None), ("trained", None), ("rejected", "baseline")]
    assert violations(db, run_id) == []


def test_a_later_reward_before_the_lease_changes_the_baseline(db, run_id, limits):
    new = played(db, run_id, limits, [0.0, 1.0, 0.75])
    with db.write() as conn:
        assert rewards.add(conn, new.session_ids[2], value=0.25, discount=1.0).applied
    assert states(db, new.group_id)[2][2] == ("rejected", "baseline")
    batch = take(db, run_id, begin(db, run_id), 1, n_groups=1, needs_greedy=True)
    assert {t.greedy_return for t in batch.trajectories} == {0.25}
    assert violations(db, run_id) == []


def test_another_credit_judges_the_greedy_episode_too(db, run_id, limits):
    new = played(db, run_id, limits, [0.0, 1.0, 0.75])
    batch = take(db, run_id, begin(db, run_id), 1, n_groups=1)

    def judge(session_id: str, found: SessionRewards) -> SessionRewards:
        return SessionRewards(session=5.0) if session_id == new.session_ids[2] else found

    outline = db.query(lambda conn: steps.outlined(conn, batch.step_id, rescore=judge))
    assert {(one.episode_return, one.greedy_return) for one in outline.trajectories} == {(0.0, 5.0), (1.0, 5.0)}


@pytest.mark.parametrize(
    "end",
    [
        {"value": 1.0, "status": SessionStatus.FAILED},
        {"value": 1.0, "status": SessionStatus.ABANDONED},
        {"value": None},
        {"value": 1.0, "verdict": Verdict(rejected="too easy")},
    ],
    ids=str,
)
def test_a_group_whose_greedy_episode_has_no_return_is_rejected(db, run_id, limits, end):
    new = start(db, run_id, limits)
    with db.read() as conn:
        before = runs.get(conn, run_id)
    for session_id, value in zip(new.session_ids, (0.0, 1.0), strict=False):
        play(db, run_id, session_id, limits, value)
    assert states(db, new.group_id)[0] == "running"
    play(db, run_id, new.session_ids[2], limits, **end)
    state, reason, of_paths = states(db, new.group_id)
    assert (state, reason) == ("rejected", NO_BASELINE)
    assert of_paths[:2] == [("rejected", f"rejected: {NO_BASELINE}")] * 2
    with db.read() as conn:
        after = runs.get(conn, run_id)
    assert (after.running, after.returned) == (before.running - 1, before.returned + 1)
    assert violations(db, run_id) == []


def test_failed_samples_count_as_ever_and_the_greedy_episode_is_none_of_them(db, run_id, limits):
    new = start(db, run_id, limits)
    play(db, run_id, new.session_ids[0], limits, 1.0)
    play(db, run_id, new.session_ids[1], limits, None, status=SessionStatus.FAILED)
    play(db, run_id, new.session_ids[2], limits, 1.0)
    assert states(db, new.group_id)[:2] == ("rejected", None)  # one sample is too few, min_group_size is 2
    alone = replace(limits, group_size=1, min_group_size=1)
    assert states(db, played(db, run_id, alone, [1.0, 0.0]).group_id)[0] == "ready"
    assert violations(db, run_id) == []


def test_a_sub_agent_of_a_greedy_session_is_greedy_and_is_not_trained(db, run_id, limits):
    new = start(db, run_id, limits)
    with db.write() as conn:
        (child,) = child_sessions.start_child(conn, new.session_ids[2], limits, "child", {}).session_ids
        call(conn, run_id, child, trainable=False, temperature=0.0)
        assert conn.execute(select(sessions.c.is_baseline).where(sessions.c.id == child)).scalar_one()
    for session_id in new.session_ids:
        play(db, run_id, session_id, limits, 1.0)
    assert states(db, new.group_id)[2] == [("ready", None)] * 2 + [("rejected", "baseline")] * 2
    assert violations(db, run_id) == []


def test_groups_that_began_without_a_greedy_session_are_left_out(db, run_id, limits):
    old = group(db, run_id, replace(limits, greedy_baseline=False))
    new = played(db, run_id, limits, [0.0, 1.0, 0.5])
    batch = take(db, run_id, begin(db, run_id), 1, n_groups=1, needs_greedy=True)
    assert {t.group_id for t in batch.trajectories} == {new.group_id}
    left_out = [("rejected", f"rejected: {WITHOUT_GREEDY}")] * 2
    assert states(db, old.group_id) == ("rejected", WITHOUT_GREEDY, left_out)
    assert violations(db, run_id) == []


def test_programs_with_tasks_of_their_own_are_refused_by_name(db, run_id, limits):
    starts = [
        lambda conn: group_starts.start_external(conn, run_id, limits, ["k"], {"n": 1}, {}),
        lambda conn: named_groups.start_in_group(conn, run_id, limits, "k", "mine", 2, {"n": 1}, {}),
        lambda conn: areal_sessions.start(conn, run_id, limits, ["k"], "t"),
    ]
    for begins in starts:
        with (
            pytest.raises(RequestError, match="greedy needs a greedy episode") as refused,
            db.write() as conn,
        ):
            begins(conn)
        assert (refused.value.status, refused.value.code) == (409, "needs_greedy_episode")
    assert violations(db, run_id) == []


def test_the_greedy_episode_is_no_sample_of_a_tasks_success_rate(db, run_id, limits):
    new = played(db, run_id, limits, [0.0, 1.0, 1.0])
    curriculum = Curriculum(low=0.1, high=0.9, skip=0.5, success=1.0, groups=2)
    assert db.query(task_skips.success_rate, run_id, new.task_id, curriculum) == 0.5


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (
            lambda new, made: update(interactions).where(interactions.c.id == made).values(temperature=1.0),
            "it has temperature 1 in a greedy session",
        ),
        (
            lambda new, made: update(sessions).where(sessions.c.id == new.session_ids[0]).values(is_baseline=True),
            "its greedy sessions are numbered [0, 2]",
        ),
        (
            lambda new, made: update(sessions).where(sessions.c.id == new.session_ids[2]).values(status="failed"),
            "it is ready, but its greedy session is failed",
        ),
        (
            lambda new, made: update(sessions).where(sessions.c.id == new.session_ids[2]).values(is_baseline=False),
            "but its calls and rewards say no_trainable_tokens",
        ),
    ],
)
def test_the_audit_finds_what_breaks_a_greedy_session(db, run_id, limits, broken, line):
    new = start(db, run_id, limits)
    for session_id, value in zip(new.session_ids, (0.0, 1.0, 0.5), strict=True):
        made = play(db, run_id, session_id, limits, value)
    with db.write() as conn:
        conn.execute(broken(new, made))
    assert any(line in found for found in violations(db, run_id))
