"""Opens sub-agents' sessions below an open session, within the limits of a tree."""

from __future__ import annotations

import time

from sqlalchemy import Connection, func, insert, select

from agentrl.domain.schemas import Json, SessionStatus
from agentrl.errors import RequestError
from agentrl.store import family
from agentrl.store.db.codec import new_id
from agentrl.store.sessions.due_times import first_check_at
from agentrl.store.sessions.group_starts import NewGroup
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.sessions.session_locks import lock_group, lock_in_tree
from agentrl.store.tables import groups, sessions


def start_child(conn: Connection, parent_id: str, limits: Limits, key_hash: str, metadata: Json) -> NewGroup:
    """Open a sub-agent's session under an open session: same group, no admission, ended with its parent at the latest.

    Repeating a `key_hash` returns the session that it opened. Raises RequestError: 404 for an unknown parent, 409 when
    it has ended, 422 when the tree is as deep or as large as the limits allow.
    """
    parent = lock_in_tree(conn, parent_id)
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
    group = lock_group(conn, parent.group_id)
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
            is_baseline=parent.is_baseline,
            metadata=metadata,
            parent_session_id=parent_id,
            root_session_id=root_id,
            depth=parent.depth + 1,
            created_at=now,
            last_seen_at=now,
            due_at=first_check_at(limits, group.owner, now),
        )
    )
    return NewGroup(group.id, group.task_id, group.task, [session_id])


def _check_tree(conn: Connection, root_id: str, depth: int, limits: Limits) -> None:
    """Raise RequestError 422 unless the tree may have one more session, below one at `depth`."""
    deepest, most = limits.max_subagent_depth, limits.max_subagents_per_session
    if depth >= deepest:
        message = f"sub-agents stand at most {deepest} levels below a session (proxy.max_subagent_depth)"
        raise RequestError(422, message, code="subagents_too_deep", param="parent_session_id")
    of_root = select(func.count()).select_from(sessions).where(sessions.c.root_session_id == root_id)
    if (found := conn.execute(of_root).scalar_one()) >= most:
        message = f"session {root_id} has {found} sub-agents' sessions, of {most} (proxy.max_subagents_per_session)"
        raise RequestError(422, message, code="too_many_subagents", param="parent_session_id")
