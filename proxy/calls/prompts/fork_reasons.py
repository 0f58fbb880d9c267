"""Finds the role and the fork reason of a call: reads the session's conversations, and asks the rules (`fork_rules`).

The conversations are read only for a call that does not extend the deepest recorded call.
"""

from __future__ import annotations

from collections.abc import Collection

from agentrl.domain.schemas import ForkReason
from agentrl.proxy.calls.prompts.fork_rules import FIRST, Place, judge, judge_branch
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.run_store import RunStore
from agentrl.store.calls import conversations, running_calls
from agentrl.store.calls.conversations import Conversation, History


async def place(store: RunStore, session_id: str, request: ModelRequest) -> Place:
    """The place of a call whose conversation does not extend a recorded one."""

    def decide(history: History) -> Place:
        return judge(history.recorded, request.messages, request.tools, history.under_way) if history.any else FIRST

    found = await store.read_then(decide, conversations.history, session_id)
    if found.summary is not None:
        await store.write(running_calls.mark_summary, found.summary)
    return found


async def why_not_deeper(
    store: RunStore, session_id: str, request: ModelRequest, covered: int, below: Collection[str]
) -> ForkReason | None:
    """Why a call extends the recorded call of its first `covered` messages, and not one of the calls `below` it."""

    def decide(recorded: dict[str, Conversation]) -> ForkReason | None:
        return judge_branch(list(recorded.values()), request.messages, covered, below)

    return await store.read_then(decide, conversations.of_session, session_id)
