"""Messages of a conversation, and a fork as the doctor reports it."""

from __future__ import annotations

import io
from typing import Any

from agentrl.console import Console
from agentrl.diagnosis.report import Report
from agentrl.doctor.show import show

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


S, U1, U2, U3 = says("system", "be brief"), says("user", "one"), says("user", "two"), says("user", "three")


def the_fork(report: Report, reason: str | None) -> Any:
    """The only fork; what a person reads of it is on the screen."""
    (fork,) = report.forks
    assert fork.reason == reason
    assert report.advice(fork).cause in on_screen(report)
    return fork


def on_screen(report: Report) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=200))
    return out.getvalue()
