"""Reports inputs that a text-only policy does not see: attachments in tool results, and tools that providers run."""

from __future__ import annotations

from agentrl.doctor.record import Session
from agentrl.doctor.words import count, some
from agentrl.domain.schemas import UNREAD
from agentrl.rendering.messages import role_of, text_of
from agentrl.visible import visible


def unread(session: Session) -> int:
    """The number of images and files in tool results that were replaced by text. Repeated ones count once."""
    found = {
        message["tool_call_id"]: text_of(message).count(UNREAD)
        for call in session.delivered
        for message in call.turns
        if role_of(message) == "tool"
    }
    return sum(found.values())


def lines(session: Session) -> list[str]:
    """One line per kind."""
    found = []
    if n := unread(session):
        found.append(
            f"{count(n, 'attachment')} in tools' results {'was' if n == 1 else 'were'} replaced by the text "
            f'"{UNREAD}": the policy reads text only'
        )
    tools = dict.fromkeys(visible(tool) for call in session.calls for tool in call.left_out)
    if tools:
        found.append(f"tools that only a provider runs were left out of the prompt: {some(tools)}")
    return found
