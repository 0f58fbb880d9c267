"""Groups and sessions: how they are admitted, and how they end.

A group is `running` until each of its sessions is built; then it is `ready` (enough sessions can be trained) or
`rejected` (it gives its admission back). Evaluation groups are `evaluated` and never touch admission.

Nothing waits for ever: every session that is not built has a `due_at`, and any replica's sweep looks at what is due.
Locks are taken in the order root session, sessions below it from the top, group, run. Whoever opens or ends a session
of a tree holds its root. A session is sealed with all that stand below it at once; their trajectories are built a few
sessions at a time, MOST_SETTLED in one transaction (or unit).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Self

from sqlalchemy import Column, ColumnElement, Connection, Row, and_, case, exists, func, insert, select, update

from agentrl.configs.proxy_config import MAX_REWARD
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import GONE, InteractionStatus, Json, SessionStatus, TrajectoryState
from agentrl.domain.staleness import NO_BOUND, capacity
from agentrl.errors import RequestError
from agentrl.store import family, heartbeats, runs
from agentrl.store.calls import deliveries
from agentrl.store.db import codec
from agentrl.store.db.codec import new_id
from agentrl.store.family import Family
from agentrl.store.sessions import failures, roles
from agentrl.store.tables import groups, interactions, sessions, tasks
from agentrl.store.tables import runs as runs_table
from agentrl.store.tables import trajectories as trajectories_table
from agentrl.store.training import returns, rewards, trajectories
from agentrl.store.training.rewards import RewardAnswer

NO_CAPACITY = "no_capacity"
RETRY_AFTER_S = 0.5
WAITS_S = 5.0
"""Who was refused a place is taken to wait for one for so long; `agentrl.client` asks again sooner."""
PARENT_ENDED = "its parent session ended"
"""The error of a sub-agent's session that was open then."""
MOST_SETTLED = 8
"""Sessions of a tree whose trajectories are built in one transaction: no other commit waits for more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The part of a run's configuration that admission and session ends need."""

    group_size: int
    min_group_size: int
    max_concurrent_groups: int
    max_staleness: int
    groups_per_step: int
    turn_discount: float
    reward_timeout_s: float
    end_grace_s: float
    session_timeout_s: float
    session_max_s: float
    heartbeat_timeout_s: float
    max_reward: float = MAX_REWARD
    max_subagent_depth: int = 8
    max_subagents_per_session: int = 256
    max_failures_in_a_row: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The limits of a run."""
        return cls(
            group_size=config.rollout.group_size,
            min_group_size=config.rollout.min_group_size,
            max_concurrent_groups=config.rollout.max_concurrent_groups if config.steps else NO_BOUND,
            max_staleness=config.trainer.max_staleness,
            groups_per_step=config.trainer.groups_per_step,
            turn_discount=config.rollout.turn_discount,
            reward_timeout_s=config.proxy.reward_timeout_s,
            end_grace_s=config.proxy.end_grace_s,
            session_timeout_s=config.proxy.session_timeout_s,
            session_max_s=config.proxy.session_max_s,
            heartbeat_timeout_s=config.proxy.heartbeat_timeout_s,
            max_reward=config.proxy.max_reward,
            max_subagent_depth=config.proxy.max_subagent_depth,
            max_subagents_per_session=config.proxy.max_subagents_per_session,
            max_failures_in_a_row=config.rollout.max_failures_in_a_row if config.steps else None,
        )

    def silence_s(self, owner: str | None) -> float:
        """How long an open session may stay silent: one of a worker that sends heartbeats, or an outside program's."""
        return self.session_timeout_s if owner is None else self.heartbeat_timeout_s


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group with its task's data: `new`, or one that an earlier request like this one has started for `owner`."""

    group_id: str
    task_id: str | None
    task: Json | None
    session_ids: list[str]
    new: bool = field(default=True, compare=False)
    owner: str | None = field(default=None, compare=False)


def admit(conn: Connection, run_id: str, limits: Limits, *, outside: bool) -> tuple[int, int]:
    """Take one place for a group and one position of the data cursor, by one conditional UPDATE.

    While workers and outside programs both wait, they get places by turns: who had the last one leaves one free.
    Returns (cursor, seed). Raises RequestError: 409 `run_finished`, 429 while staleness or concurrency forbid more.
    """
    run = runs.get(conn, run_id)
    if run.status != "running":
        raise _takes_no_more(run)
    bound, spare = _bound(run, limits), int(_is_others_turn(run, outside))
    cursor = conn.execute(
        update(runs_table)
        .where(
            runs_table.c.id == run_id,
            runs_table.c.status == "running",
            runs_table.c.published_step == run.published_step,
            runs_table.c.admitted - runs_table.c.returned + spare < bound,
            runs_table.c.running + spare < limits.max_concurrent_groups,
        )
        .values(
            admitted=runs_table.c.admitted + 1,
            running=runs_table.c.running + 1,
            data_cursor=runs_table.c.data_cursor + 1,
            outside_had_last=outside,
            **{_asked_at(outside).name: None},
        )
        .returning(runs_table.c.data_cursor)
    ).scalar_one_or_none()
    if cursor is None:
        raise RequestError(
            429,
            "no capacity for another group: the trainer must catch up",
            code=NO_CAPACITY,
            retry_after_s=RETRY_AFTER_S,
        )
    return int(cursor) - 1, int(run.seed)


def _takes_no_more(run: Row[Any]) -> RequestError:
    why = run.error if run.status == "failed" and run.error else "it takes no more groups"
    return RequestError(409, f"run {run.name} is {run.status}: {why}", code=f"run_{run.status}")


def wait(conn: Connection, run_id: str, *, outside: bool) -> None:
    """Note that a worker, or an outside program, was refused a place: it waits for WAITS_S."""
    asked_at, now = _asked_at(outside), time.time()
    noted = asked_at.between(now - WAITS_S / 5, now)
    conn.execute(update(runs_table).where(runs_table.c.id == run_id, noted.isnot(True)).values({asked_at: now}))


def _asked_at(outside: bool) -> Column[Any]:
    return runs_table.c.outside_asked_at if outside else runs_table.c.worker_asked_at


def _is_others_turn(run: Row[Any], outside: bool) -> bool:
    asked_at = run.worker_asked_at if outside else run.outside_asked_at
    return run.outside_had_last == outside and asked_at is not None and abs(time.time() - asked_at) < WAITS_S


def room(conn: Connection, run_id: str, limits: Limits) -> int:
    """How many groups `admit` would take right now."""
    run = runs.get(conn, run_id)
    if run.status != "running":
        return 0
    free = min(_bound(run, limits) - (run.admitted - run.returned), limits.max_concurrent_groups - run.running)
    return max(0, int(free))


def _bound(run: Row[Any], limits: Limits) -> int:
    return capacity(
        max_staleness=limits.max_staleness,
        published_step=run.published_step,
        groups_per_step=limits.groups_per_step,
        target_steps=run.target_steps,
    )


def start_group(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hashes: list[str],
    *,
    owner: str | None = None,
    start_digest: str | None = None,
) -> NewGroup:
    """Admit a group for the run's next task: one session per key hash. Raises as `admit` does.

    A `start_digest` that was used before gets the group that it started, and takes no new place.
    """
    if (earlier := _started(conn, run_id, start_digest)) is not None:
        return earlier
    cursor, seed = admit(conn, run_id, limits, outside=owner is None)
    task = runs.task_at(conn, run_id, cursor, seed)
    return _insert_group(
        conn,
        run_id,
        limits,
        key_hashes,
        task_id=task.id,
        cursor=cursor,
        data=task.data,
        owner=owner,
        start_digest=start_digest,
    )


def start_external(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hashes: list[str],
    task: Json | None,
    metadata: Json,
    *,
    start_digest: str | None = None,
    name: str | None = None,
) -> NewGroup:
    """Admit a group for an outside program that brings its own task: one session per key hash, the only one of `name`.

    Raises as `admit` does.
    """
    if (earlier := _started(conn, run_id, start_digest)) is not None:
        return earlier
    cursor, _ = admit(conn, run_id, limits, outside=True)
    return _insert_group(
        conn,
        run_id,
        limits,
        key_hashes,
        cursor=cursor,
        task=task,
        data=task,
        metadata=metadata,
        external=True,
        start_digest=start_digest,
        name=name,
    )


def start_evaluation(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hashes: list[str],
    task: Json,
    metadata: Json,
    sampling: Json | None,
    *,
    owner: str | None = None,
    start_digest: str | None = None,
) -> NewGroup:
    """Create a group that is never trained and never counted.

    Raises RequestError: 409 `claimed` when the `start_digest` was used before by another owner, 409 `run_failed`.
    """
    if (earlier := _started(conn, run_id, start_digest)) is not None:
        if earlier.owner != owner:
            raise RequestError(409, f"{earlier.owner} plays it, or has played it", code="claimed")
        return earlier
    run = runs.get(conn, run_id)
    if run.status == "failed":
        raise _takes_no_more(run)
    return _insert_group(
        conn,
        run_id,
        limits,
        key_hashes,
        task=task,
        data=task,
        metadata=metadata,
        is_eval=True,
        sampling=sampling,
        owner=owner,
        start_digest=start_digest,
    )


def start_child(conn: Connection, parent_id: str, limits: Limits, key_hash: str, metadata: Json) -> NewGroup:
    """Open a sub-agent's session under an open one: same group, no admission, ended at the latest with its parent.

    A `key_hash` that opened one before gets the same session. Raises RequestError: 404 for an unknown parent, 409 when
    it has ended, 422 when the tree has as many levels or sub-agents as it may have.
    """
    parent = _locked_in_tree(conn, parent_id)
    earlier = conn.execute(
        select(sessions.c.id, groups.c.task_id, groups.c.task)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.key_hash == key_hash, sessions.c.parent_session_id == parent_id)
    ).first()
    if earlier is not None:
        return NewGroup(parent.group_id, earlier.task_id, earlier.task, [earlier.id], new=False)
    if parent.status != SessionStatus.OPEN:
        raise RequestError(409, f"session {parent_id} is sealed: it has ended", code="session_sealed")
    root_id = family.root_of(parent)
    _check_tree(conn, root_id, parent.depth, limits)
    group = _locked_group(conn, parent.group_id)
    index = conn.execute(select(func.max(sessions.c.sample_index)).where(sessions.c.group_id == group.id)).scalar_one()
    session_id, now = new_id(), time.time()
    conn.execute(
        insert(sessions).values(
            id=session_id,
            run_id=parent.run_id,
            group_id=group.id,
            sample_index=max(index + 1, group.size),
            key_hash=key_hash,
            status=SessionStatus.OPEN,
            is_eval=group.is_eval,
            metadata=metadata,
            parent_session_id=parent_id,
            root_session_id=root_id,
            depth=parent.depth + 1,
            created_at=now,
            last_seen_at=now,
            due_at=_first_look(limits, group.owner, now),
        )
    )
    return NewGroup(group.id, group.task_id, group.task, [session_id])


def _check_tree(conn: Connection, root_id: str, depth: int, limits: Limits) -> None:
    """Raises RequestError 422 unless the tree takes one more session, below one at `depth`."""
    deepest, most = limits.max_subagent_depth, limits.max_subagents_per_session
    if depth >= deepest:
        message = f"sub-agents stand at most {deepest} levels below a session (proxy.max_subagent_depth)"
        raise RequestError(422, message, code="subagents_too_deep", param="parent_session_id")
    of_root = select(func.count()).select_from(sessions).where(sessions.c.root_session_id == root_id)
    if (found := conn.execute(of_root).scalar_one()) >= most:
        message = f"session {root_id} has {found} sub-agents' sessions, of {most} (proxy.max_subagents_per_session)"
        raise RequestError(422, message, code="too_many_subagents", param="parent_session_id")


def _insert_group(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hashes: list[str],
    *,
    task_id: str | None = None,
    cursor: int | None = None,
    task: Json | None = None,
    data: Json | None,
    metadata: Json | None = None,
    is_eval: bool = False,
    external: bool = False,
    sampling: Json | None = None,
    owner: str | None = None,
    start_digest: str | None = None,
    name: str | None = None,
) -> NewGroup:
    now, group_id = time.time(), new_id()
    conn.execute(
        insert(groups).values(
            id=group_id,
            run_id=run_id,
            task_id=task_id,
            cursor=cursor,
            task=task,
            size=len(key_hashes),
            is_eval=is_eval,
            external=external,
            state="running",
            sampling=sampling,
            owner=owner,
            start_digest=start_digest,
            created_at=now,
        )
    )
    session_ids = [new_id() for _ in key_hashes]
    conn.execute(
        insert(sessions),
        [
            {
                "id": sid,
                "run_id": run_id,
                "group_id": group_id,
                "sample_index": i,
                "key_hash": key_hash,
                "status": SessionStatus.OPEN,
                "seq": 0,
                "is_eval": is_eval,
                "built": False,
                "metadata": metadata or {},
                "name": name,
                "created_at": now,
                "last_seen_at": now,
                "due_at": _first_look(limits, owner, now),
            }
            for i, (sid, key_hash) in enumerate(zip(session_ids, key_hashes, strict=True))
        ],
    )
    if owner is not None:  # who starts a group is alive, whether or not it has said so yet
        heartbeats.beat(conn, run_id, "worker", owner)
    return NewGroup(group_id, task_id, data, session_ids)


def _started(conn: Connection, run_id: str, start_digest: str | None) -> NewGroup | None:
    """The group that this idempotency key started before. The run's lock keeps two repetitions apart."""
    if start_digest is None:
        return None
    conn.execute(select(runs_table.c.id).where(runs_table.c.id == run_id).with_for_update(key_share=True))
    group = conn.execute(
        select(groups, tasks.c.data)
        .outerjoin(tasks, tasks.c.id == groups.c.task_id)
        .where(groups.c.run_id == run_id, groups.c.start_digest == start_digest)
    ).first()
    if group is None:
        return None
    of_group = select(sessions.c.id).where(sessions.c.group_id == group.id, sessions.c.parent_session_id.is_(None))
    ids = list(conn.execute(of_group.order_by(sessions.c.sample_index)).scalars())
    data = group.data if group.task_id else group.task
    return NewGroup(group.id, group.task_id, data, ids, new=False, owner=group.owner)


def _first_look(limits: Limits, owner: str | None, now: float) -> float:
    return now + min(limits.silence_s(owner), limits.session_max_s)


def get(conn: Connection, session_id: str) -> Row[Any] | None:
    """One session with its group's sampling overrides."""
    return conn.execute(
        select(sessions, groups.c.sampling, groups.c.external)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.id == session_id)
    ).first()


def by_key_hash(conn: Connection, run_id: str, key_hash: str) -> str | None:
    """The id of the run's session that a key opens."""
    of_key = select(sessions.c.id).where(sessions.c.key_hash == key_hash, sessions.c.run_id == run_id)
    return conn.execute(of_key).scalar()


def run_of(conn: Connection, session_id: str) -> str | None:
    """The run of a session."""
    return conn.execute(select(sessions.c.run_id).where(sessions.c.id == session_id)).scalar()


def touch(conn: Connection, session_id: str) -> str:
    """Somebody uses the session: it will not be abandoned for a while; returns its status. Raises RequestError 404."""
    status = conn.execute(
        update(sessions)
        .where(sessions.c.id == session_id)
        .values(last_seen_at=time.time())
        .returning(sessions.c.status)
    ).scalar()
    if status is None:
        raise RequestError(404, f"no session {session_id!r}", code="session_not_found")
    return str(status)


def end(conn: Connection, session_id: str, status: SessionStatus, error: str | None, limits: Limits) -> str:
    """Seal a session and its sub-agents': new calls get 409, running ones may still commit; returns the status.

    Ending twice is harmless: the first end stands, except that a session which waits for calls or a reward can still be
    given up. Raises RequestError 404 for an unknown session.
    """
    row = _locked_in_tree(conn, session_id)
    given_up = status == SessionStatus.ABANDONED and not row.built and row.status not in GONE
    if row.status != SessionStatus.OPEN and not given_up:
        return str(row.status)
    below = [member.id for member in family.load(conn, family.root_of(row)).below(session_id)]
    _lock_all(conn, below)
    error = None if error is None else codec.error_text(error)
    _seal(conn, [session_id], status, error, due_in_s=0.0)
    if below:
        _seal(conn, below, status, PARENT_ENDED, due_in_s=limits.silence_s(None))
    return settle(conn, session_id, limits)


def _seal(conn: Connection, session_ids: list[str], status: SessionStatus, error: str | None, due_in_s: float) -> None:
    """Seal those of some locked sessions that are open, or with ABANDONED those that are not built."""
    takes: ColumnElement[bool] = sessions.c.status == SessionStatus.OPEN
    final: Any = status
    if status == SessionStatus.ABANDONED:
        takes = and_(sessions.c.built.is_(False), sessions.c.status.not_in(GONE))
    elif status == SessionStatus.COMPLETED:
        runs_still = exists().where(
            interactions.c.session_id == sessions.c.id, interactions.c.status == InteractionStatus.RUNNING
        )
        final = case((runs_still, SessionStatus.CLOSING.value), else_=SessionStatus.COMPLETED.value)
    now = time.time()
    conn.execute(
        update(sessions)
        .where(sessions.c.id.in_(session_ids), takes)
        .values(status=final, error=error, ended_at=now, due_at=now + due_in_s)
    )


def settle(conn: Connection, session_id: str, limits: Limits) -> str:
    """Build the trajectories of an ended session once nothing more can arrive; returns its status.

    Until then it says when to look again (`due_at`): when its running calls have had their grace, or its reward its
    time. A sub-agent's session waits for its parent, from which it may inherit a reward. So the sessions below one that
    is built follow, MOST_SETTLED together; those that are left are due at once.
    """
    row = _locked(conn, session_id)
    if row.built or row.status == SessionStatus.OPEN:
        return str(row.status)
    tree = family.load(conn, family.root_of(row))
    unbuilt = [member for member in tree.below(session_id) if not member.built]
    below, left = [member.id for member in unbuilt[: MOST_SETTLED - 1]], unbuilt[MOST_SETTLED - 1 :]
    built: list[str] = []
    members = {session_id: row} | {member.id: member for member in _lock_all(conn, below)}
    _lock_ids(conn, [member.id for member in left if member.parent_session_id in members])  # before the group
    for member in members.values():
        follows = member.parent_session_id in built
        if (follows or member.id == session_id) and _build(conn, member, tree, limits, parent_is_built=follows):
            built.append(member.id)
    next_ones = [member.id for member in left if member.parent_session_id in built]
    if next_ones:
        of_them = (sessions.c.id.in_(next_ones), sessions.c.built.is_(False))
        conn.execute(update(sessions).where(*of_them).values(due_at=time.time()))
    if built:
        _settle_group(conn, row.group_id, limits)
    return str(conn.execute(select(sessions.c.status).where(sessions.c.id == session_id)).scalar_one())


def _build(conn: Connection, row: Row[Any], tree: Family, limits: Limits, *, parent_is_built: bool) -> bool:
    """Build the trajectories of a locked session that has ended, if nothing more can arrive; whether that is done."""
    session_id, now = row.id, time.time()
    status = SessionStatus(row.status)
    if status == SessionStatus.CLOSING:
        if _running_calls(conn, session_id) and now < row.ended_at + limits.end_grace_s:
            _look_again(conn, session_id, row.ended_at + limits.end_grace_s)
            return False
        status = SessionStatus.COMPLETED
        conn.execute(update(sessions).where(sessions.c.id == session_id).values(status=status))
    if row.parent_session_id is not None:
        if not (parent_is_built or tree.is_built(row.parent_session_id)):
            _look_again(conn, session_id, now + limits.silence_s(None))
            return False
        # A reward of a session above is either seen now, or waits for this lock and then finds the trajectories.
        _locked_group(conn, row.group_id)
    roles.judge(conn, session_id)
    is_below_gone = any(member.status in GONE for member in tree.above(session_id))
    if not row.is_eval and status == SessionStatus.COMPLETED and not is_below_gone:
        rewarded = returns.of_sessions(conn, [session_id], limits.turn_discount)[session_id].rewarded
        if not rewarded and now < row.ended_at + limits.reward_timeout_s:
            _look_again(conn, session_id, row.ended_at + limits.reward_timeout_s)
            return False
        deliveries.demote_unread(conn, session_id)
        trajectories.build(conn, row, limits.turn_discount)
    conn.execute(update(sessions).where(sessions.c.id == session_id).values(built=True))
    return True


def _settle_group(conn: Connection, group_id: str, limits: Limits) -> None:
    group = _locked_group(conn, group_id)
    unbuilt = conn.execute(
        select(func.count()).select_from(sessions).where(sessions.c.group_id == group_id, sessions.c.built.is_(False))
    ).scalar_one()
    if unbuilt or group.state != "running":
        return
    now = time.time()
    if group.is_eval:
        conn.execute(update(groups).where(groups.c.id == group_id).values(state="evaluated", finished_at=now))
        failures.stop_if_all_fail(conn, group.run_id, group_id, limits.max_failures_in_a_row)
        return
    of_group = (trajectories_table.c.group_id == group_id, trajectories_table.c.state == TrajectoryState.READY)
    trainable = list(conn.execute(select(trajectories_table.c.session_id).distinct().where(*of_group)).scalars())
    episodes = set(family.roots(conn, trainable).values())
    ready = len(episodes) >= limits.min_group_size
    conn.execute(
        update(groups).where(groups.c.id == group_id).values(state="ready" if ready else "rejected", finished_at=now)
    )
    if not ready:
        conn.execute(
            update(trajectories_table).where(*of_group).values(state=TrajectoryState.REJECTED, reason="group_too_small")
        )
    conn.execute(
        update(runs_table)
        .where(runs_table.c.id == group.run_id)
        .values(running=runs_table.c.running - 1, returned=runs_table.c.returned + (0 if ready else 1))
    )
    failures.stop_if_all_fail(conn, group.run_id, group_id, limits.max_failures_in_a_row)


def reward(
    conn: Connection,
    session_id: str,
    limits: Limits,
    *,
    value: float,
    interaction_id: str | None = None,
    scope: str | None = None,
    name: str = "reward",
    source: str = "agent",
    idempotency_key: str | None = None,
) -> RewardAnswer:
    """Append a reward, and build the session if it had ended and only waited for one. Raises as `rewards.add` does.

    `interaction_id` may be a response's id, as the caller's dialect spells it: `chatcmpl-…`, `resp_…`, `msg_…`.
    """
    row = _locked(conn, session_id)
    waiting = row.status != SessionStatus.OPEN and not row.built
    if waiting:  # what may be settled with it, before the group
        _lock_all(conn, family.ids_below(conn, session_id))
    answer = rewards.add(
        conn,
        session_id,
        value=value,
        discount=limits.turn_discount,
        scope=scope,
        max_value=limits.max_reward,
        interaction_id=None if interaction_id is None else codec.call_id(interaction_id),
        name=name,
        source=source,
        idempotency_key=idempotency_key,
    )
    if waiting:
        settle(conn, session_id, limits)
    return answer


def open_of_owner(conn: Connection, run_id: str, owner: str) -> list[str]:
    """The open sessions of a worker: what it left when it died. The restarted worker ends them first."""
    return list(
        conn.execute(
            select(sessions.c.id)
            .join(groups, groups.c.id == sessions.c.group_id)
            .where(groups.c.run_id == run_id, groups.c.owner == owner, groups.c.state == "running")
            .where(sessions.c.status == SessionStatus.OPEN, sessions.c.parent_session_id.is_(None))
        ).scalars()
    )


def due(conn: Connection, run_id: str, *, skip: int = 0, limit: int = 256) -> list[str]:
    """The sessions that some replica should look at now, the longest overdue first, without the first `skip`."""
    return list(
        conn.execute(
            select(sessions.c.id)
            .where(sessions.c.run_id == run_id, sessions.c.built.is_(False), sessions.c.due_at <= time.time())
            .order_by(sessions.c.due_at, sessions.c.id)
            .offset(skip)
            .limit(limit)
        ).scalars()
    )


def look(conn: Connection, session_id: str, limits: Limits, *, heard_since: float) -> bool:
    """Deal with a session that is due; returns whether it was abandoned. Of several replicas, the first does so.

    An open session is failed when it is older than `session_max_s`, and abandoned (completed, if its client opened it
    by a name) when it and its worker have been silent for too long. Silence counts from `heard_since`, the start of the
    caller's own uptime without a gap, so that an outage of the proxy or the database ends no session.
    A running call keeps a session alive, a sub-agent's session keeps its parent alive, and is itself ended by its
    parent. Ended sessions are settled.
    """
    row = _locked_in_tree(conn, session_id)
    if row.built or row.due_at > time.time():  # another replica was faster
        return False
    if row.status != SessionStatus.OPEN:
        settle(conn, session_id, limits)
        return False
    now = time.time()
    if now >= row.created_at + limits.session_max_s:
        end(conn, session_id, SessionStatus.FAILED, f"it was open for {limits.session_max_s:g} s", limits)
        return False
    owner = conn.execute(select(groups.c.owner).where(groups.c.id == row.group_id)).scalar_one()
    silence_s = limits.silence_s(owner)
    tree = family.load(conn, family.root_of(row))
    below = [member for member in tree.below(session_id) if member.status == SessionStatus.OPEN]
    heard = max(heard_since, *(member.last_seen_at for member in (row, *below)))
    if owner is not None:
        heard = max(heard, heartbeats.last(conn, row.run_id, "worker", owner))
    at_work = _running_calls(conn, session_id, *(member.id for member in below))
    if now < heard + silence_s or at_work or _is_open(conn, row.parent_session_id):
        next_look = max(heard, now - silence_s / 2) + silence_s
        _look_again(conn, session_id, min(next_look, row.created_at + limits.session_max_s))
        return False
    if row.name is not None:  # its client may have no other way to end it
        end(conn, session_id, SessionStatus.COMPLETED, None, limits)
        return False
    why = f"its worker {owner} fell silent" if owner else "nobody used the session any more"
    end(conn, session_id, SessionStatus.ABANDONED, why, limits)
    return True


def put_off(conn: Connection, session_id: str, at: float) -> None:
    """Look at a session no earlier than that, whatever it waits for."""
    conn.execute(update(sessions).where(sessions.c.id == session_id, sessions.c.due_at < at).values(due_at=at))


def _locked(conn: Connection, session_id: str) -> Row[Any]:
    """The session, locked. Raises RequestError 404."""
    row = conn.execute(select(sessions).where(sessions.c.id == session_id).with_for_update(key_share=True)).first()
    if row is None:
        raise RequestError(404, f"no session {session_id!r}", code="session_not_found")
    return row


def _locked_in_tree(conn: Connection, session_id: str) -> Row[Any]:
    """The session, locked after its root, so that the tree does not change. Raises RequestError 404."""
    root_id = conn.execute(select(sessions.c.root_session_id).where(sessions.c.id == session_id)).scalar()
    if root_id is not None:
        _locked(conn, root_id)
    return _locked(conn, session_id)


def _lock_all(conn: Connection, session_ids: list[str]) -> list[Row[Any]]:
    """Sessions of a tree, locked from the top."""
    if not session_ids:
        return []
    of_them = select(sessions).where(sessions.c.id.in_(session_ids)).order_by(sessions.c.depth, sessions.c.id)
    return list(conn.execute(of_them.with_for_update(key_share=True)))


def _lock_ids(conn: Connection, session_ids: list[str]) -> None:
    """As `_lock_all`, for those of which nothing else is needed."""
    if session_ids:
        of_them = select(sessions.c.id).where(sessions.c.id.in_(session_ids)).order_by(sessions.c.depth, sessions.c.id)
        conn.execute(of_them.with_for_update(key_share=True)).all()


def _locked_group(conn: Connection, group_id: str) -> Row[Any]:
    """The group, locked: after sessions, before the run."""
    return conn.execute(select(groups).where(groups.c.id == group_id).with_for_update(key_share=True)).one()


def _look_again(conn: Connection, session_id: str, at: float) -> None:
    conn.execute(update(sessions).where(sessions.c.id == session_id).values(due_at=at))


def _is_open(conn: Connection, session_id: str | None) -> bool:
    found = select(sessions.c.id).where(sessions.c.id == session_id, sessions.c.status == SessionStatus.OPEN)
    return session_id is not None and conn.execute(found).first() is not None


def _running_calls(conn: Connection, *session_ids: str) -> int:
    return conn.execute(
        select(func.count())
        .select_from(interactions)
        .where(interactions.c.session_id.in_(session_ids), interactions.c.status == InteractionStatus.RUNNING)
    ).scalar_one()
