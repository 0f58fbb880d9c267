"""Notes on a session's calls: refused calls, and inputs and parameters that were left out or replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.diagnosis.record import Session
from agentrl.diagnosis.words import count, some
from agentrl.domain.schemas import UNREAD, Json
from agentrl.rendering.messages import role_of, text_of
from agentrl.store.events import REFUSALS_KEPT
from agentrl.visible import visible

MOST = 5
"""Maximum number of kinds to list."""
_TODO = {
    "model_not_found": "name it 'default'",
    "context_length_exceeded": "ask for fewer tokens (max_tokens), or shorten the conversation",
    "unsupported_parameter": "leave it out",
}
_API_NAMES = {"max_new_tokens": "max_tokens"}


def refused(refusals: Sequence[Json]) -> list[str]:
    """One line per kind of refusal, the most frequent first."""
    kinds = Counter((one["status"], one["code"], one["message"]) for one in refusals)
    found = []
    for (status, code, message), n in kinds.most_common(MOST):
        many = len(refusals) >= REFUSALS_KEPT and n > 1
        how_often = f"{count(n, 'call')}{' or more' if many else ''} {'was' if n == 1 else 'were'} refused"
        todo = f": {_TODO[code]}" if code in _TODO else ""
        found.append(f"{how_often} ({status}): {visible(message)}{todo}")
    if len(kinds) > MOST:
        found.append(f"{len(kinds) - MOST} more kinds of refusals; --json has them all")
    return found


def left_out(session: Session) -> list[str]:
    """One line for attachments in tool results and one for tools that providers run: the policy sees neither."""
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


def unread(session: Session) -> int:
    """The number of images and files in tool results that were replaced by text. Repeated ones count once."""
    found = {
        message["tool_call_id"]: text_of(message).count(UNREAD)
        for call in session.delivered
        for message in call.turns
        if role_of(message) == "tool"
    }
    return sum(found.values())


def replaced(session: Session) -> list[str]:
    """One line per replaced sampling parameter, with the requested values and the value used."""
    names = dict.fromkeys(name for call in session.delivered for name in call.replaced)
    return [_line(session, name) for name in names]


def _line(session: Session, name: str) -> str:
    calls = [call for call in session.delivered if name in call.replaced]
    asked = Counter(_value(call.replaced[name]) for call in calls)
    got = dict.fromkeys(_value(call.used.get(name)) for call in calls)
    wanted = ", ".join(f"{value} ({n})" if len(asked) > 1 else value for value, n in asked.most_common())
    whose = "the evaluation's" if session.is_eval else "the run's"
    if name == "max_new_tokens":
        whose += ", or what the context had room for"
    return (
        f"{count(len(calls), 'call')} asked for {_API_NAMES.get(name, name)} {wanted} and got {whose}: {', '.join(got)}"
    )


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
