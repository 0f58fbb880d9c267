"""What a call is that extends no recorded one: its role, and why it forks."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.proxy.dialects.base import ModelRequest
from agentrl.proxy.state import ProxyState
from agentrl.proxy.tree import Tree
from agentrl.schemas import ForkReason, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a call stands in its session."""

    role: Role
    reason: ForkReason | None


async def place(state: ProxyState, session_id: str, tree: Tree, request: ModelRequest) -> Place:
    """The place of a call whose conversation extends no recorded one."""
    answered = any(message["role"] == "assistant" for message in request.messages)
    return Place(role=Role.MAIN, reason=ForkReason.HISTORY_EDITED if answered and tree.nodes else None)
