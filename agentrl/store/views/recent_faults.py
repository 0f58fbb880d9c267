"""What went wrong lately: failed sessions and calls, forks, truncations and tools, counted over the newest rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, select

from agentrl.domain.schemas import ENDED, STARTS, Json, SessionStatus
from agentrl.store.db import codec
from agentrl.store.tables import interaction_data, interactions, sessions
from agentrl.store.views import run_extent

SESSIONS, CALLS, TOOL_CALLS = 200, 1000, 120
"""How many of the newest rows are read."""
ERROR_BEGINS = ("error", "exception", "traceback", "failed", '{"error"', '{"detail"')
"""How a tool's result begins, in lower case, when the tool has failed."""


def of_run(conn: Connection, run_id: str) -> Json:
    """Faults among the newest sessions, calls and tool results of a run."""
    extent = run_extent.of_run(conn, run_id)
    return {
        "sessions": _sessions(conn, run_id, *extent),
        "calls": _calls(conn, run_id, *extent),
        "tools": _tools(conn, run_id, *extent),
    }


def _sessions(conn: Connection, run_id: str, first: str, end: str) -> Json:
    """The failures among the newest ended training sessions: count, most frequent error, and since when all fail."""
    s = sessions.c
    rows = conn.execute(
        select(s.id, s.status, s.error, s.ended_at)
        .where(s.run_id == run_id, s.id > first, s.id < end, s.is_eval.is_(False), s.status.in_(ENDED))
        .order_by(s.id.desc())
        .limit(SESSIONS)
    ).all()
    failed = [row for row in rows if row.status == SessionStatus.FAILED]
    errors = Counter(_kind(row.error) for row in failed)
    error, times = errors.most_common(1)[0] if errors else (None, 0)
    streak = next((n for n, row in enumerate(rows) if row.status != SessionStatus.FAILED), len(rows))
    return {
        "ended": len(rows),
        "failed": len(failed),
        "error": error,
        "error_times": times,
        "example": next((row.id for row in failed if _kind(row.error) == error), None),
        "streak": streak,
        "all_fail_since": rows[streak - 1].ended_at if streak else None,
    }


def _calls(conn: Connection, run_id: str, first: str, end: str) -> Json:
    """The faults among the newest calls: forks by reason, ends at the length limit, and errors."""
    c = interactions.c
    rows = conn.execute(
        select(c.session_id, c.status, c.fork_reason, c.finish_reason, c.error)
        .where(c.run_id == run_id, c.id > first, c.id < end)
        .order_by(c.id.desc())
        .limit(CALLS)
    ).all()
    forks = Counter(row.fork_reason for row in rows if row.fork_reason not in STARTS)
    example = {row.fork_reason: row.session_id for row in reversed(rows)}
    return {
        "calls": len(rows),
        "forks": [{"reason": reason, "calls": n, "example": example[reason]} for reason, n in forks.most_common()],
        "truncated": sum(row.finish_reason == "length" for row in rows),
        "truncated_example": next((row.session_id for row in rows if row.finish_reason == "length"), None),
        "failed": sum(row.status in ("failed", "lost") for row in rows),
        "failed_example": next((row.session_id for row in rows if row.status in ("failed", "lost")), None),
        "error": next((_kind(row.error) for row in rows if row.error), None),
    }


def _tools(conn: Connection, run_id: str, first: str, end: str) -> list[Json]:
    """Tool results in the newest prompts: the count by tool, and the errors among them."""
    c, parent = interactions.c, interaction_data.alias("parent_data")
    rows = conn.execute(
        select(c.session_id, interaction_data.c.new_messages, parent.c.answer)
        .join(interaction_data, interaction_data.c.interaction_id == c.id)
        .join(parent, parent.c.interaction_id == c.parent_id)
        .where(c.run_id == run_id, c.id > first, c.id < end, c.tools_hash.is_not(None), c.status == "complete")
        .order_by(c.id.desc())
        .limit(TOOL_CALLS)
    ).all()
    found: dict[str, Json] = {}
    for row in rows:
        names = dict(_asked(codec.unpack_json(row.answer)))
        for message in codec.unpack_json(row.new_messages):
            if message.get("role") != "tool":
                continue
            name = str(names.get(message.get("tool_call_id")) or message.get("name") or "a tool")[:100]
            of_tool = found.setdefault(name, {"name": name, "results": 0, "errors": 0, "example": None, "error": None})
            of_tool["results"] += 1
            text = _text(message.get("content"))
            if text.lstrip().lower().startswith(ERROR_BEGINS):
                of_tool["errors"] += 1
                of_tool["example"] = of_tool["example"] or row.session_id
                of_tool["error"] = of_tool["error"] or text[:200]
    return sorted(found.values(), key=lambda one: (-one["errors"], one["name"]))


def _asked(answer: Any) -> Iterable[tuple[str, str]]:
    """The ids and names of an answer's tool calls."""
    for call in (answer or {}).get("tool_calls") or []:
        yield str(call.get("id")), str(call.get("function", {}).get("name", ""))


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _kind(error: str | None) -> str:
    """The first line of an error: errors of one kind have it in common."""
    return (error or "no reason given").strip().split("\n", 1)[0][:200]
