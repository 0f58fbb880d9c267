"""Audit of paths: the trajectories of a session are its root-to-leaf paths, and one of them owns each output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from agentrl.domain.schemas import GONE, InteractionStatus, Role, SessionStatus
from agentrl.store.audit.group_rows import GroupRows, sessions_above


def check_paths(rows: GroupRows) -> Iterator[str]:
    """Check that the trajectories of a session are its root-to-leaf paths, and that one of them owns each output."""
    owners: Counter[str] = Counter()
    covered: set[str] = set()
    for trajectory in rows.trajectories.values():
        path, above = rows.paths.get(trajectory.id, []), None
        fault = None if path and [row.position for row in path] == list(range(len(path))) else "is not dense"
        for row in path:
            call = rows.calls.get(row.interaction_id)
            if call is None or call.session_id != trajectory.session_id or call.parent_id != above:
                fault = "does not follow its calls' parents"
            elif call.status != InteractionStatus.COMPLETE:
                fault = f"has call {call.id}, which is {call.status}"
            elif call.role == Role.UPSTREAM:
                fault = f"has call {call.id}, which the policy did not answer"
            owners[row.interaction_id] += row.owned
            covered.add(row.interaction_id)
            above = row.interaction_id
        if fault is None and trajectory.leaf_id != above:
            fault = f"ends at {above}, not at its leaf {trajectory.leaf_id}"
        if (
            fault is None
            and trajectory.tokens != rows.calls[above or ""].prompt_tokens + rows.calls[above or ""].output_tokens
        ):
            fault = f"has other than {trajectory.tokens} tokens"
        if fault is not None:
            yield f"trajectories {trajectory.id}: its path {fault}"
    inner = {call.parent_id for call in rows.calls.values() if call.status == InteractionStatus.COMPLETE}
    leaves = Counter(trajectory.leaf_id for trajectory in rows.trajectories.values())
    for call in rows.calls.values():
        session = rows.sessions[call.session_id]
        trains = session.built and not session.is_eval and session.status == SessionStatus.COMPLETED
        trains = trains and not any(parent.status in GONE for parent in sessions_above(rows, session))
        if not (trains and call.status == InteractionStatus.COMPLETE and call.role != Role.UPSTREAM):
            continue
        if call.id not in covered:
            yield f"interactions {call.id}: it is complete, its session is built, and it is in no trajectory"
        elif owners[call.id] != 1:
            yield f"interactions {call.id}: {owners[call.id]} trajectories own its output"
        elif leaves[call.id] != (call.id not in inner):
            yield f"interactions {call.id}: it is the leaf of {leaves[call.id]} trajectories"
