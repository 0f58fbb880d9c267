"""Returns of sessions: reads calls and applied rewards; `domain.credit` computes the returns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Select, select

from agentrl.domain import credit
from agentrl.domain.credit import CallFact, SessionRewards
from agentrl.domain.schemas import InteractionStatus, SessionStatus
from agentrl.store import family
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import interactions, rewards, sessions

Rescore = Callable[[str, SessionRewards], SessionRewards]
"""Given a session's id and its rewards, returns the rewards to use instead (`agentrl replay --rescore`)."""

Given = tuple[str | None, str, str, float]
"""A reward: call id, scope, name, value."""


@dataclass(frozen=True, slots=True)
class SessionReturns:
    """A session's credit: a return for each call that carries value, and the episode's return for baselines."""

    episode_id: str
    episode_return: float
    calls: dict[str, float]
    rewarded: bool  # by a reward of its own, or of the session that it inherits from
    named: Mapping[str, float] = field(default_factory=dict)  # the episode's return from the rewards of each name alone
    last: str | None = None  # the episode's last main call, in a root session that has one


def applied(conn: Connection, session_ids: Sequence[str] | Select[Any]) -> Mapping[str, SessionRewards]:
    """The counted, applied rewards of each session; `session_ids` may be a query."""
    counted = {sid: credit.counting(of_session) for sid, of_session in _given(conn, session_ids).items()}
    return defaultdict(SessionRewards, counted)


def recorded(conn: Connection, session_ids: Sequence[str] | Select[Any]) -> Mapping[str, list[tuple[str, float]]]:
    """(name, value) of each counted, applied reward of each session, oldest name first."""
    found = {
        sid: [(name, value) for (_, _, name), value in credit.newest(of_session).items()]
        for sid, of_session in _given(conn, session_ids).items()
    }
    return defaultdict(list, found)


def _given(conn: Connection, session_ids: Sequence[str] | Select[Any]) -> dict[str, list[Given]]:
    """All applied rewards of each session, oldest first."""
    facts: dict[str, list[Given]] = defaultdict(list)
    chosen = [session_ids] if isinstance(session_ids, Select) else parts(session_ids)
    for some in chosen:
        rows = conn.execute(
            select(rewards.c.session_id, rewards.c.interaction_id, rewards.c.scope, rewards.c.name, rewards.c.value)
            .where(rewards.c.session_id.in_(some), rewards.c.applied.is_(True))
            .order_by(rewards.c.id)
        )
        for row in rows:
            facts[row.session_id].append((row.interaction_id, row.scope, row.name, row.value))
    return facts


def of_sessions(
    conn: Connection, session_ids: Sequence[str], discount: float, rescore: Rescore | None = None
) -> dict[str, SessionReturns]:
    """Returns of sessions. A sub-agent's session without a reward inherits the return of the session above it."""
    above = family.lineage(conn, session_ids)
    facts = applied(conn, list(above))
    if rescore is not None:
        facts = {sid: rescore(sid, facts[sid]) for sid in above}
    calls = _calls(conn, list(above))
    done: dict[str, SessionReturns] = {}
    for session_id, parent_id in above.items():
        own = facts[session_id]
        over = done[parent_id] if parent_id is not None else None
        rewarded = own.any
        if over is not None and not own.any and over.rewarded:
            own, rewarded = SessionRewards(session=over.episode_return), True
        by_call = credit.call_returns(calls[session_id], own, discount)
        if over is not None:
            episode_return, named = over.episode_return, over.named
        else:
            episode_return = credit.outcome(calls[session_id], by_call)
            named = (
                dict.fromkeys(own.named, episode_return)
                if len(own.named) == 1
                else credit.named_outcomes(calls[session_id], own, discount)
            )
        done[session_id] = SessionReturns(
            episode_id=over.episode_id if over else session_id,
            episode_return=episode_return,
            calls=by_call,
            rewarded=rewarded,
            named=named,
            last=None if over else next((call.id for call in reversed(calls[session_id]) if call.is_main), None),
        )
    return {sid: done[sid] for sid in session_ids}


def of_baselines(
    conn: Connection, group_ids: Sequence[str], discount: float, rescore: Rescore | None = None
) -> dict[str, float]:
    """The returns of the greedy sessions of groups, by group; without those that did not complete or have no reward."""
    rows = conn.execute(
        select(sessions.c.id, sessions.c.group_id).where(
            sessions.c.group_id.in_(group_ids),
            sessions.c.is_baseline.is_(True),
            sessions.c.parent_session_id.is_(None),
            sessions.c.status == SessionStatus.COMPLETED,
        )
    ).all()
    credited = of_sessions(conn, [row.id for row in rows], discount, rescore) if rows else {}
    return {row.group_id: credited[row.id].episode_return for row in rows if credited[row.id].rewarded}


def _calls(conn: Connection, session_ids: Sequence[str]) -> dict[str, list[CallFact]]:
    """The delivered calls of each session, in the order they were made."""
    calls: dict[str, list[CallFact]] = {sid: [] for sid in session_ids}
    rows = conn.execute(
        select(interactions.c.id, interactions.c.session_id, interactions.c.parent_id, interactions.c.role)
        .where(interactions.c.session_id.in_(session_ids), interactions.c.status == InteractionStatus.COMPLETE)
        .order_by(interactions.c.seq)
    )
    for row in rows:
        calls[row.session_id].append(CallFact(row.id, row.parent_id, row.role))
    return calls
