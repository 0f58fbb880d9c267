"""Audit of a group's state and of its sessions: states, sizes, the tree of sub-agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Row

from agentrl.domain.schemas import GREEDY_BELOW, TRAINED, SessionStatus, StepState
from agentrl.store.audit.group_rows import GroupRows
from agentrl.store.audit.lineage_audit import Lineage

_STATES = {  # state of a training group → states of its trajectories, and of the step that leased it
    "running": ({"ready", "rejected"}, ()),
    "ready": ({"ready", "rejected"}, ()),
    "leased": ({"leased", "stale", "rejected"}, (StepState.STARTED,)),
    "trained": ({"trained", "stale", "rejected"}, TRAINED),
    "stale": ({"stale", "rejected"}, ()),
    "rejected": ({"rejected"}, ()),
}


def check_group(rows: GroupRows, lineage: Lineage) -> Iterator[str]:
    group, name = rows.group, f"groups {rows.group.id}"
    unbuilt = sum(not session.built for session in rows.sessions.values())
    waits = group.due_at is not None  # for sessions that may join it
    if (group.state == "running") != (unbuilt > 0 or waits):
        more = ", and waits for more" if waits else ""
        yield f"{name}: it is {group.state} with {unbuilt} sessions that are not built{more}"
    if (group.state == "running") != (group.finished_at is None):
        yield f"{name}: it is {group.state}, finished at {group.finished_at}"
    roots = sorted(s.sample_index for s in rows.sessions.values() if s.parent_session_id is None)
    if roots != list(range(len(roots) if waits else group.size - group.missing)):
        given_up = f" less {group.missing}" if group.missing else ""
        yield f"{name}: its size is {group.size}{given_up}, its sessions are numbered {roots}"
    elif waits and not 0 < len(roots) < group.size:
        yield f"{name}: it waits for more sessions, but has {len(roots)} of {group.size}"
    baselines = [s for s in rows.sessions.values() if s.is_baseline and s.parent_session_id is None]
    if len(baselines) > 1 or any(s.sample_index != group.size - 1 for s in baselines):
        yield f"{name}: its greedy sessions are numbered {sorted(s.sample_index for s in baselines)}"
    if baselines and group.state in ("ready", "leased", "trained") and baselines[0].status != SessionStatus.COMPLETED:
        yield f"{name}: it is {group.state}, but its greedy session is {baselines[0].status}"
    if group.name is None and (waits or group.missing):
        yield f"{name}: it has no name, so no session can join it, but it waits for some or lacks {group.missing}"
    if group.missing < 0 or (group.missing and (waits or unbuilt)):
        yield f"{name}: it lacks {group.missing} sessions, although it waits for some or has {unbuilt} unbuilt ones"
    if group.cursor is not None and group.cursor >= lineage.run.data_cursor:
        yield f"{name}: its cursor {group.cursor} was never given out"
    if group.is_eval:
        if group.state not in ("running", "evaluated"):
            yield f"{name}: an evaluation is {group.state}"
        if rows.trajectories:
            yield f"{name}: an evaluation has trajectories"
        return
    if group.state not in _STATES:
        yield f"{name}: it is {group.state}, but no evaluation"
        return
    allowed, of_step = _STATES[group.state]
    states = Counter(t.state for t in rows.trajectories.values())
    for trajectory in rows.trajectories.values():
        if trajectory.state not in allowed:
            yield f"trajectories {trajectory.id}: it is {trajectory.state} in a group that is {group.state}"
    if group.state in ("ready", "leased", "trained", "stale") and not states[group.state]:
        yield f"{name}: it is {group.state}, but none of its trajectories is"
    leased_by = {t.lease_step_id for t in rows.trajectories.values() if t.lease_step_id is not None}
    if len(leased_by) != bool(of_step):
        yield f"{name}: it is {group.state}, leased by {len(leased_by)} steps"
    for step_id in sorted(leased_by):
        step = lineage.steps.get(step_id)
        if step is None or step.state not in of_step:
            yield f"{name}: it is {group.state}, but step {step_id} is {step.state if step else 'of another run'}"


def check_session(rows: GroupRows, session: Row[Any]) -> Iterator[str]:
    name, parent = f"sessions {session.id}", rows.sessions.get(session.parent_session_id)
    if (session.run_id, session.is_eval) != (rows.group.run_id, rows.group.is_eval):
        yield f"{name}: run or kind differ from its group's"
    if (session.status == SessionStatus.OPEN) != (session.ended_at is None):
        yield f"{name}: it is {session.status}, ended at {session.ended_at}"
    if session.built and session.status in (SessionStatus.OPEN, SessionStatus.CLOSING):
        yield f"{name}: it is built, but {session.status}"
    if session.parent_session_id is not None:
        if parent is None or parent.id == session.id:
            yield f"{name}: its parent {session.parent_session_id} is not of its group"
        elif session.built and not parent.built:
            yield f"{name}: it is built before its parent {parent.id}"
        elif session.status == SessionStatus.OPEN and parent.status != SessionStatus.OPEN:
            yield f"{name}: it is open, but its parent {parent.id} has ended"
        elif (session.root_session_id, session.depth) != (parent.root_session_id or parent.id, parent.depth + 1):
            yield f"{name}: its root or its depth does not follow from its parent {parent.id}"
    elif (session.root_session_id, session.depth) != (None, 0):
        yield f"{name}: it has no parent, but the root {session.root_session_id} at depth {session.depth}"
    if parent is not None and session.is_baseline != parent.is_baseline:
        yield f"{name}: it is a baseline or not, other than its parent {parent.id}"
    if session.is_baseline:
        if session.is_eval:
            yield f"{name}: it is a baseline of an evaluation"
        for call in rows.calls_of(session.id):
            if call.temperature >= GREEDY_BELOW:
                yield f"interactions {call.id}: it has temperature {call.temperature:g} in a greedy session"
    seqs = [call.seq for call in rows.calls_of(session.id) if call.seq is not None]
    if seqs != list(range(1, session.seq + 1)):
        yield f"{name}: its seq is {session.seq}, its calls have {seqs}"
    paths = sum(t.session_id == session.id for t in rows.trajectories.values())
    counted = paths if session.built and not session.is_eval else None
    if session.trajectories != counted:
        yield f"{name}: its count of trajectories is {session.trajectories}, its rows say {counted}"
    if paths and not (session.built and session.status == SessionStatus.COMPLETED):
        yield f"{name}: it has trajectories, but is {session.status}{'' if session.built else ' and not built'}"
