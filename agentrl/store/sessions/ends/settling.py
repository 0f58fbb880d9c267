"""Settles ended sessions: builds their trajectories, then moves their group out of `running`."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Row, func, select, update

from agentrl.domain.schemas import GONE, InteractionStatus, SessionStatus, TrajectoryState
from agentrl.domain.verdicts import Verdict
from agentrl.store import family
from agentrl.store.calls import deliveries
from agentrl.store.family import Family
from agentrl.store.sessions.due_times import check_at
from agentrl.store.sessions.ends import failures, roles, trace_outbox
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.sessions.session_locks import lock, lock_all, lock_group, lock_ids
from agentrl.store.tables import groups, interactions, sessions
from agentrl.store.tables import runs as runs_table
from agentrl.store.tables import trajectories as trajectories_table
from agentrl.store.training import returns, trajectories

NO_BASELINE = "its greedy episode failed or has no reward"
"""The reason of groups whose other episodes have no baseline."""
MOST_SETTLED = 8
"""Maximum number of sessions of a tree that one transaction builds, so that other commits wait only briefly."""


def settle(conn: Connection, session_id: str, limits: Limits) -> str:
    """Build the trajectories of an ended session once no call or reward can still arrive; returns its status.

    Until then it sets the next check (`due_at`) to the end of the grace period of running calls, or of the wait for a
    reward. A sub-agent's session waits for its parent, from which it may inherit a reward: after a parent is built, the
    sessions below it are built too, MOST_SETTLED per transaction; the others become due at once.
    """
    row = lock(conn, session_id)
    if row.built or row.status == SessionStatus.OPEN:
        return str(row.status)
    tree = family.load(conn, family.root_of(row))
    unbuilt = [member for member in tree.below(session_id) if not member.built]
    below, left = [member.id for member in unbuilt[: MOST_SETTLED - 1]], unbuilt[MOST_SETTLED - 1 :]
    built: list[str] = []
    members = {session_id: row} | {member.id: member for member in lock_all(conn, below)}
    # Sessions are locked before their group.
    lock_ids(conn, [member.id for member in left if member.parent_session_id in members])
    for member in members.values():
        follows = member.parent_session_id in built
        if (follows or member.id == session_id) and _build(conn, member, tree, limits, parent_is_built=follows):
            built.append(member.id)
    next_ones = [member.id for member in left if member.parent_session_id in built]
    if next_ones:
        of_them = (sessions.c.id.in_(next_ones), sessions.c.built.is_(False))
        conn.execute(update(sessions).where(*of_them).values(due_at=time.time()))
    if built:
        settle_group(conn, row.group_id, limits)
    return str(conn.execute(select(sessions.c.status).where(sessions.c.id == session_id)).scalar_one())


def _build(conn: Connection, row: Row[Any], tree: Family, limits: Limits, *, parent_is_built: bool) -> bool:
    """Build the trajectories of a locked, ended session; returns false while a call or a reward may still arrive."""
    session_id, now = row.id, time.time()
    status = SessionStatus(row.status)
    if status == SessionStatus.CLOSING:
        if count_running(conn, session_id) and now < row.ended_at + limits.end_grace_s:
            check_at(conn, session_id, row.ended_at + limits.end_grace_s)
            return False
        status = SessionStatus.COMPLETED
        conn.execute(update(sessions).where(sessions.c.id == session_id).values(status=status))
    if row.parent_session_id is not None:
        if not (parent_is_built or tree.is_built(row.parent_session_id)):
            check_at(conn, session_id, now + limits.silence_s(None))
            return False
        # A reward of an ancestor is either committed already, or waits for this lock and then updates trajectories.
        lock_group(conn, row.group_id)
    roles.reassign(conn, session_id)
    is_below_gone = any(member.status in GONE for member in tree.above(session_id))
    built = None if row.is_eval else 0
    if not row.is_eval and status == SessionStatus.COMPLETED and not is_below_gone:
        rewarded = returns.of_sessions(conn, [session_id], limits.turn_discount)[session_id].rewarded
        if not rewarded and now < row.ended_at + limits.reward_timeout_s:
            check_at(conn, session_id, row.ended_at + limits.reward_timeout_s)
            return False
        deliveries.demote_undelivered(conn, session_id)
        built = trajectories.build(conn, row, limits.turn_discount)
    conn.execute(update(sessions).where(sessions.c.id == session_id).values(built=True, trajectories=built))
    if limits.traced:
        trace_outbox.add(conn, row.run_id, session_id)
    return True


def settle_group(conn: Connection, group_id: str, limits: Limits) -> None:
    """Move a group out of `running` once all its sessions are built; a rejected one gives its place back.

    A group that sessions may still join stays `running` until its missing places are given up (`missing_places`).
    """
    group = lock_group(conn, group_id)
    unbuilt = conn.execute(
        select(func.count()).select_from(sessions).where(sessions.c.group_id == group_id, sessions.c.built.is_(False))
    ).scalar_one()
    if unbuilt or group.state != "running":
        return
    now = time.time()
    if group.due_at is not None:
        conn.execute(update(groups).where(groups.c.id == group_id).values(due_at=now + limits.session_timeout_s))
        return
    if group.is_eval:
        conn.execute(update(groups).where(groups.c.id == group_id).values(state="evaluated", finished_at=now))
        failures.stop_if_all_fail(conn, group.run_id, group_id, limits.max_failures_in_a_row)
        return
    of_group = (trajectories_table.c.group_id == group_id, trajectories_table.c.state == TrajectoryState.READY)
    trainable = list(conn.execute(select(trajectories_table.c.session_id).distinct().where(*of_group)).scalars())
    episodes = set(family.roots(conn, trainable).values())
    reject_reason = group.reject_reason
    if group.missing and reject_reason is None and len(episodes) < limits.min_group_size:
        started = group.size - group.missing
        reject_reason = (
            f"{started} of {group.size} sessions started, {len(episodes)} trainable, min_group_size is "
            f"{limits.min_group_size}"
        )
    if reject_reason is None and _lacks_baseline(conn, group_id, limits):
        reject_reason = NO_BASELINE
    ready = len(episodes) >= limits.min_group_size and reject_reason is None
    conn.execute(
        update(groups)
        .where(groups.c.id == group_id)
        .values(state="ready" if ready else "rejected", reject_reason=reject_reason, finished_at=now)
    )
    if not ready:
        reason = "group_too_small" if reject_reason is None else trajectories.rejected(reject_reason)
        conn.execute(update(trajectories_table).where(*of_group).values(state=TrajectoryState.REJECTED, reason=reason))
    conn.execute(
        update(runs_table)
        .where(runs_table.c.id == group.run_id)
        .values(running=runs_table.c.running - 1, returned=runs_table.c.returned + (0 if ready else 1))
    )
    failures.stop_if_all_fail(conn, group.run_id, group_id, limits.max_failures_in_a_row)


def _lacks_baseline(conn: Connection, group_id: str, limits: Limits) -> bool:
    """Whether a group has a greedy session that failed, was rejected or has no reward."""
    has_one = select(sessions.c.verdict).where(
        sessions.c.group_id == group_id, sessions.c.is_baseline.is_(True), sessions.c.parent_session_id.is_(None)
    )
    verdict = conn.execute(has_one).first()
    if verdict is None:
        return False
    rejected = Verdict.of(verdict.verdict).rejected is not None
    return rejected or not returns.of_baselines(conn, [group_id], limits.turn_discount)


def count_running(conn: Connection, *session_ids: str) -> int:
    """How many calls of these sessions are running."""
    return conn.execute(
        select(func.count())
        .select_from(interactions)
        .where(interactions.c.session_id.in_(session_ids), interactions.c.status == InteractionStatus.RUNNING)
    ).scalar_one()
