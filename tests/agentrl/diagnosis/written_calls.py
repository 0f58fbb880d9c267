"""Calls that are written down, not recorded."""

from __future__ import annotations

from typing import Any

from agentrl.diagnosis.record import Call


def call(number: int = 1, parent: Call | None = None, **facts: Any) -> Call:
    """A delivered call; what a test does not name has a default."""
    usual = {
        "id": f"call-{number}",
        "role": "main",
        "dialect": "openai.chat",
        "status": "complete",
        "reason": None,
        "finish": "stop",
        "error": None,
        "temperature": 1.0,
        "modified": False,
        "retry": 0,
        "digest": "d",
        "choice": None,
    }
    return Call(number=number, parent=parent, **usual | facts)
