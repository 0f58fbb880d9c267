"""Corrects the roles of calls once a session has ended: calls without tools beside an agent with tools.

A call gets its role when it begins; the first call of a session is `main`, even if it only asks for a title. The ended
session shows the difference. Where main calls with tools exist, a conversation of one call without tools becomes
`side`, unless one of these main calls has the same system prompt (numbers and dates aside). A role that the caller set
with `X-Turn-Type` stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select, update

from agentrl.domain.schemas import STARTS, Json, Role
from agentrl.rendering.divergence import PlainMessages, fingerprint, mark, plain
from agentrl.store.calls import conversations, deliveries
from agentrl.store.calls.policy_calls import OF_THE_POLICY
from agentrl.store.calls.shared_contents import load_contents
from agentrl.store.tables import interactions, sessions

SAID = "turn_type"
"""The option of a call that holds the caller's `X-Turn-Type`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The facts that decide the role of a delivered call. `agent` is the fingerprint of its system prompt."""

    id: str
    role: str
    fresh: bool  # it began a new conversation; it does not fork from a recorded one
    alone: bool  # no call extends it
    tools: bool
    agent: str
    said: bool  # its caller set its role


def reassign(conn: Connection, session_id: str) -> None:
    """Change calls that are not turns of the agent to `side`, in an ended session."""
    if found := become_side(conn, session_id):
        conn.execute(update(interactions).where(interactions.c.id.in_(found)).values(role=Role.SIDE))


def side_at_end(conn: Connection, session_id: str) -> set[str]:
    """The ids of the calls that become side calls if the session completes now: those of `become_side`, and those whose
    answer no client received, which are left as they are in evaluations.
    """
    is_eval = conn.execute(select(sessions.c.is_eval).where(sessions.c.id == session_id)).scalar_one()
    lost = set() if is_eval else deliveries.undelivered(conn, session_id)
    return become_side(conn, session_id) | lost


def become_side(conn: Connection, session_id: str) -> set[str]:
    """The ids of the calls that `reassign` changes if the session ends now."""
    columns = interactions.c
    rows = conn.execute(
        select(
            columns.id,
            columns.parent_id,
            columns.role,
            columns.fork_reason,
            columns.system_hash,
            columns.tools_hash,
            columns.options,
        )
        .where(columns.session_id == session_id, *OF_THE_POLICY)
        .order_by(columns.seq)
    ).all()
    shares = {row.tools_hash is None for row in rows if row.role in (Role.MAIN, Role.SUBAGENT)}
    if len(shares) < 2:  # all with tools or all without: most sessions
        return set()
    prompts = load_contents(conn, {row.system_hash for row in rows if row.system_hash is not None})
    agents = {key: " ".join(fingerprint(plain(prompts.get(key, [])))) for key in {row.system_hash for row in rows}}
    parents = {row.parent_id for row in rows}
    turns = [
        Turn(
            id=row.id,
            role=row.role,
            fresh=row.parent_id is None and row.fork_reason in STARTS,
            alone=row.id not in parents,
            tools=row.tools_hash is not None,
            agent=agents[row.system_hash],
            said=SAID in (row.options or {}),
        )
        for row in rows
    ]
    found = side_calls(turns)
    return found - _handed_over(conn, session_id, found) if found else found


def side_calls(turns: Sequence[Turn]) -> set[str]:
    """The ids of the calls that become `side` calls."""
    armed = {turn.agent for turn in turns if turn.tools and turn.role == Role.MAIN}
    talks = {turn.agent for turn in turns if not turn.tools and not (turn.fresh and turn.alone)}
    return {
        turn.id
        for turn in turns
        if armed
        and turn.role in (Role.MAIN, Role.SUBAGENT)
        and not turn.said
        and not turn.tools
        and turn.agent not in armed | talks
    }


def _handed_over(conn: Connection, session_id: str, call_ids: Collection[str]) -> set[str]:
    """The calls whose conversation another one continues: it begins with the same messages, system prompts aside.

    Raw prompts count as continued: they do not show where system prompt and tools end.
    """
    talks = conversations.of_session(conn, session_id)
    known = PlainMessages()
    marks: dict[int, str] = {}  # computed once per message: the calls of a path share messages

    def marked(message: Json) -> str:
        return marks.get(id(message)) or marks.setdefault(id(message), mark(message))

    spoken = {call_id: [marked(message) for message in known.of(one.messages)] for call_id, one in talks.items()}

    def taken_over(own: Sequence[str]) -> bool:
        return any(len(other) > len(own) and other[: len(own)] == own for other in spoken.values())

    raw = {call_id for call_id in call_ids if talks[call_id].messages[0]["role"] == "raw"}
    return raw | {call_id for call_id in call_ids if taken_over(spoken[call_id])}
