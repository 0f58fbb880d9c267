"""Audit of a group: runs every check on the group and all rows that belong to it."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.store.audit.call_checks import check_call, check_tokens
from agentrl.store.audit.group_rows import GroupRows
from agentrl.store.audit.lineage_audit import Lineage
from agentrl.store.audit.path_checks import check_paths
from agentrl.store.audit.reward_checks import check_rewards
from agentrl.store.audit.session_checks import check_group, check_session
from agentrl.store.audit.trajectory_checks import StepTotals, check_trajectories


def check(rows: GroupRows, lineage: Lineage, totals: dict[str, StepTotals]) -> Iterator[str]:
    """Every violation in a group; adds what its step trained to `totals`."""
    yield from check_group(rows, lineage)
    for session in rows.sessions.values():
        yield from check_session(rows, session)
    for call in rows.calls.values():
        yield from check_call(rows, call, lineage)
    yield from check_tokens(rows)
    yield from check_rewards(rows, lineage)
    yield from check_paths(rows)
    yield from check_trajectories(rows, lineage, totals)
