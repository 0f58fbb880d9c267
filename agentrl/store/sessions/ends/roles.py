"""Roles that only the whole session shows, judged once it has ended: what came before the agent with tools.

A call gets its role when it begins (`proxy.branches`), and the first one is `main` as long as nothing else is known. A
title or a probe that comes first is told from the agent by what follows: a conversation without tools and of one call,
under a system prompt (numbers and dates aside) that no main call with tools had, is `side` beside such main calls. So
it is when it comes second. What the caller said in `X-Turn-Type` stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select, update

from agentrl.domain.schemas import STARTS, Json, Role
from agentrl.rendering.divergence import fingerprint, mark, plain
from agentrl.store.calls import conversations
from agentrl.store.calls.policy_calls import OF_THE_POLICY
from agentrl.store.calls.shared_contents import load_contents
from agentrl.store.tables import interactions

SAID = "turn_type"
"""The option of a call that keeps what its caller said of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What decides about a delivered call. `agent` is the fingerprint of its system prompt."""

    id: str
    role: str
    fresh: bool  # it began a conversation, and none that had been recorded another way
    alone: bool  # no call goes on from it
    tools: bool
    agent: str
    said: bool  # its caller named its role


def reassign(conn: Connection, session_id: str) -> None:
    """Make `side` what only looked like turns of the agent, in a session that takes no calls any more."""
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
    if len(shares) < 2:  # all with tools or all without: the usual session
        return
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
    if found:
        found -= _handed_over(conn, session_id, found)
    if found:
        conn.execute(update(interactions).where(columns.id.in_(found)).values(role=Role.SIDE))


def side_calls(turns: Sequence[Turn]) -> set[str]:
    """The calls that are no turns of their agent, by their place among the others."""
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
    """Those of the calls whose conversation another agent took over: it begins with theirs, system prompts aside.

    So are raw prompts, in which nothing says where the system prompt and the tools end.
    """
    talks = conversations.of_session(conn, session_id)
    known: dict[int, Json] = {}
    marks: dict[int, str] = {}  # of each message once: the calls of a path share theirs

    def marked(message: Json) -> str:
        return marks.get(id(message)) or marks.setdefault(id(message), mark(message))

    spoken = {call_id: [marked(message) for message in plain(one.messages, known)] for call_id, one in talks.items()}

    def taken_over(own: Sequence[str]) -> bool:
        return any(len(other) > len(own) and other[: len(own)] == own for other in spoken.values())

    raw = {call_id for call_id in call_ids if talks[call_id].messages[0]["role"] == "raw"}
    return raw | {call_id for call_id in call_ids if taken_over(spoken[call_id])}
