"""Finds the role and the fork reason of a call: reads the session's conversations, and asks the rules (`fork_rules`).

Only a call that extends no recorded one, or not the deepest one, pays for reading them.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection

from agentrl.domain.schemas import ForkReason
from agentrl.proxy.calls.fork_rules import FIRST, Place, judge, judge_branch
from agentrl.proxy.dialects.dialect import ModelRequest
from agentrl.proxy.run_store import RunStore
from agentrl.store.calls import conversations, running_calls


async def place(store: RunStore, session_id: str, request: ModelRequest) -> Place:
    """The place of a call whose conversation extends no recorded one."""

    def read(conn: Connection) -> Place:
        if not conversations.any_of(conn, session_id):
            return FIRST
        recorded = list(conversations.of_session(conn, session_id).values())
        return judge(recorded, request.messages, request.tools, conversations.under_way(conn, session_id))

    found = await store.read(read)
    if found.summary is not None:
        await store.write(running_calls.mark_summary, found.summary)
    return found


async def why_not_deeper(
    store: RunStore, session_id: str, request: ModelRequest, covered: int, below: Collection[str]
) -> ForkReason | None:
    """Why a call that extends a recorded one by its first `covered` messages extends none of the calls `below` that."""

    def read(conn: Connection) -> ForkReason | None:
        recorded = list(conversations.of_session(conn, session_id).values())
        return judge_branch(recorded, request.messages, covered, below)

    return await store.read(read)
