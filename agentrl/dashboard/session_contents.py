"""A session's calls and forks as templates show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from agentrl.diagnosis.forks import Fork
from agentrl.diagnosis.record import Call, Session
from agentrl.diagnosis.report import Report, neighbourhood
from agentrl.diagnosis.tree_rows import rows
from agentrl.domain.schemas import Json
from agentrl.rendering.messages import text_of


def tree(report: Report) -> list[Json]:
    """The calls in the order of the token tree, with their depth and their fork."""
    forks = {fork.call.number: _fork(report, fork) for fork in report.forks}
    return [
        {
            "call": call,
            "depth": min(8, max(0, len(lead) // 2 - 1)),
            "ended": call.finish or call.status if call.status == "complete" else call.status,
            "versions": ", ".join(map(str, call.versions)) or "–",
            "fork": forks.get(call.number),
        }
        for call, lead in rows(report.session)
    ]


def forks_of(report: Report) -> list[Json]:
    """The forks with cause, advice and cost, and the text around the first different token."""
    return [_fork(report, fork) for fork in report.forks]


def turns(session: Session, calls: Sequence[Call]) -> list[Json]:
    """The messages that each call adds, its tools if they are others than before, and its rewards."""
    return [
        {
            "call": call,
            "messages": [_message(one) for one in _added(call)],
            "tools": _tools(call),
            "rewards": [reward for reward in session.rewards if reward.get("interaction_id") == call.id],
        }
        for call in calls
    ]


def _added(call: Call) -> list[Json]:
    if call.parent is None:
        return call.messages
    return call.turns[len(call.parent.turns) :]


def _tools(call: Call) -> list[str]:
    if call.parent is not None and call.tools == call.parent.tools:
        return []
    return [orjson.dumps(tool, option=orjson.OPT_INDENT_2).decode() for tool in call.tools or []]


def _message(message: Json) -> Json:
    content = message.get("content")
    if isinstance(content, list):
        text = "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
    else:
        text = text_of(message)
    return {
        "role": str(message.get("role", "")),
        "reasoning": message.get("reasoning_content") or "",
        "text": text,
        "calls": [_tool_call(one) for one in message.get("tool_calls") or []],
    }


def _tool_call(call: Json) -> Json:
    function: Any = call.get("function") or {}
    return {"name": str(function.get("name", "")), "arguments": str(function.get("arguments", ""))}


def _fork(report: Report, fork: Fork) -> Json:
    advised, near = report.advice(fork), neighbourhood(report, fork)
    return {
        "call": fork.call.number,
        "kind": fork.kind.replace("_", " "),
        "cause": ("" if advised.certain else "probably: ") + advised.cause,
        "todo": advised.todo,
        "cost": fork.cost_tokens,
        "theirs": near and near.theirs,
        "ours": near and near.ours,
    }
