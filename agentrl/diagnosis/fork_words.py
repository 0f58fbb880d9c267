"""Quotes the difference between two messages or two lists of tools."""

from __future__ import annotations

from agentrl.diagnosis.forks import Fork, MessageDivergence
from agentrl.domain.schemas import Json
from agentrl.rendering.messages import text_of
from agentrl.visible import visible

QUOTE_CHARS = 48


def change(found: MessageDivergence | None) -> str:
    """Quote the changed text as `: “…” became “…”`; empty when it is the same."""
    if found is None or found.before is None or found.now is None:
        return ""
    before, now = words(found.before), words(found.now)
    if before == now:
        return ""
    shared = min(len(before), len(now))
    start = max(0, next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), shared) - 12)
    return f": {quote(before, start)} became {quote(now, start)}"


def words(message: Json) -> str:
    """Format a message on one line: its text, and its tool calls as name(arguments)."""
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
    content = message.get("content")
    text = (
        text_of(message) if not isinstance(content, list) else " ".join(str(part.get("text", "")) for part in content)
    )
    return visible(" ".join([text, *calls] if text else calls))


def quote(text: str, start: int) -> str:
    """Quote at most QUOTE_CHARS of a text, from `start`."""
    part = text[start : start + QUOTE_CHARS]
    return f"“{'…' if start else ''}{part}{'…' if start + QUOTE_CHARS < len(text) else ''}”"


def changed_tools(fork: Fork) -> str:
    """List added and removed tools as `: with A, B, without C`; empty when the names are the same."""
    if fork.messages is not None or fork.tokens is None:
        return ""
    before, now = (
        {tool["function"]["name"] for tool in tools or []} for tools in (fork.tokens.other.tools, fork.call.tools)
    )
    parts = [
        f"{word} {', '.join(sorted(names))}"
        for word, names in (("with", now - before), ("without", before - now))
        if names
    ]
    return f": {', '.join(parts)}" if parts else ""
