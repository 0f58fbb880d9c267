"""Audit of rewards, and the credit that follows from those that are applied."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.domain import credit
from agentrl.domain.credit import CallFact, SessionRewards
from agentrl.domain.schemas import InteractionStatus
from agentrl.store.audit.group_rows import CLOCK_SLACK_S, GroupRows, from_the_top, step_of
from agentrl.store.audit.lineage_audit import Lineage


@dataclass(frozen=True, slots=True)
class Credit:
    calls: dict[str, float]
    episode: float
    rewarded: bool


def check_rewards(rows: GroupRows, lineage: Lineage) -> Iterator[str]:
    step = step_of(rows, lineage)
    newest: dict[tuple[Any, ...], float] = {}
    for reward in rows.rewards:
        name, call = f"rewards {reward.id}", rows.calls.get(reward.interaction_id)
        if reward.run_id != rows.group.run_id:
            yield f"{name}: it is of another run than its session"
        if (reward.scope == "session") != (reward.interaction_id is None):
            yield f"{name}: scope {reward.scope} does not fit call {reward.interaction_id}"
        if reward.interaction_id is not None and (call is None or call.session_id != reward.session_id):
            yield f"{name}: its call {reward.interaction_id} is not of its session"
        if not math.isfinite(reward.value):
            yield f"{name}: its value is {reward.value}"
        if rows.group.is_eval and not reward.applied:
            yield f"{name}: it is not applied to an evaluation"
        if reward.applied and step is not None and reward.created_at > step.started_at + CLOCK_SLACK_S:
            yield f"{name}: it is applied, though it came after step {step.id} had leased the group"
        if (
            rows.group.finished_at is not None
            and rows.group.state == "rejected"
            and reward.applied
            and (reward.created_at > rows.group.finished_at + CLOCK_SLACK_S)
        ):
            yield f"{name}: it is applied, though it came after the group was rejected"
        fact = (reward.session_id, reward.interaction_id, reward.scope, reward.name)
        if reward.created_at < newest.get(fact, -math.inf) - CLOCK_SLACK_S:
            yield f"{name}: it supersedes a reward that came after it"
        newest[fact] = reward.created_at


def credit_of_sessions(rows: GroupRows, discount: float) -> dict[str, Credit]:
    """Credit of every session, from the applied rewards alone; sub-agents inherit from the session above."""
    facts: dict[str, list[tuple[str | None, str, str, float]]] = {sid: [] for sid in rows.sessions}
    calls: dict[str, list[CallFact]] = {sid: [] for sid in rows.sessions}
    for reward in rows.rewards:
        if reward.applied:
            facts[reward.session_id].append((reward.interaction_id, reward.scope, reward.name, reward.value))
    for call in rows.calls.values():
        if call.status == InteractionStatus.COMPLETE:
            parent = rows.calls.get(call.parent_id)
            earlier = parent is not None and (parent.seq or 0) < (call.seq or 0)  # broken rows may form a loop
            fact = CallFact(call.id, call.parent_id if earlier else None, call.role)
            calls[call.session_id].append(fact)
    done: dict[str, Credit] = {}
    for session_id in from_the_top(rows):
        own = credit.counting(facts[session_id])
        above = done.get(rows.sessions[session_id].parent_session_id or "")
        rewarded = own.any or (above is not None and above.rewarded)
        if above is not None and above.rewarded and not own.any:
            own = SessionRewards(session=above.episode)
        by_call = credit.call_returns(calls[session_id], own, discount)
        episode = above.episode if above is not None else credit.outcome(calls[session_id], by_call)
        done[session_id] = Credit(by_call, episode, rewarded)
    return done
