"""The order in which a session's calls are listed: a chain runs straight down, a branch moves to the right."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.diagnosis.record import Call, Session


def rows(session: Session) -> Iterator[tuple[Call, str]]:
    """Calls with their prefix in the tree drawing; undelivered calls come last."""
    for root in session.children.get(0, []):
        yield from _rows(session, root, "", "● ")
    for call in session.calls:
        if not call.delivered:
            yield call, "○ "


def _rows(session: Session, call: Call, indent: str, mark: str) -> Iterator[tuple[Call, str]]:
    stack = [(call, indent, mark)]
    while stack:
        call, indent, mark = stack.pop()
        yield call, indent + mark
        below = session.children.get(call.number, [])
        if below:
            stack.append((below[0], indent, "│ "))
        inner = indent + ("│ " if len(below) > 1 else "")
        stack += [(child, inner, "└ ") for child in reversed(below[1:])]
