"""Coding agents are recognised, and their own switches named."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.diagnosis import coders
from agentrl.diagnosis.record import Session, read
from agentrl.domain.schemas import ForkReason


def session(*, client: str | None = None, command: str | None = None, code: str | None = None) -> Session:
    """A session without calls, in which one was refused if there is a `code`."""
    summary: dict[str, Any] = {
        "session_id": "s",
        "parent_session_id": None,
        "metadata": {"doctor": command} if command else {},
        "status": "completed",
        "is_eval": False,
        "error": None,
        "rewards": [],
    }
    refusals = [{"status": 400, "code": code, "message": "no", "client": client}] if code else []
    return read(summary, [], refusals)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"client": "codex_exec", "code": "x"}, "Codex"),
        ({"client": "claude-cli", "code": "x"}, "Claude Code"),
        ({"client": "OpenAI", "command": "/opt/bin/mini -y -m openai/default", "code": "x"}, "mini-swe-agent"),
        ({"command": "env A=b npx opencode run hi"}, "OpenCode"),
        ({"command": "qwen --yolo"}, "Qwen Code"),
        ({"command": "python minimal.py"}, None),
        ({}, None),
    ],
)
def test_an_agent_is_known_by_its_calls_else_by_its_command(facts: dict[str, Any], name: str | None) -> None:
    found = coders.of(session(**facts))
    assert (found and found.name) == name


@pytest.mark.parametrize("coder", coders.CODERS, ids=lambda coder: coder.name)
def test_the_advice_names_the_setting_for_each_problem(coder: coders.Coder) -> None:
    client = coder.clients[0]
    silent = session(command=coder.commands[0])
    assert coders.lines(silent, []) == [f"{coder.name}: {coder.address}"]
    assert coders.lines(session(client=client, code="model_not_found"), []) == [f"{coder.name}: {coder.model}"]
    assert coders.lines(session(client=client, code="context_length_exceeded"), []) == [
        f"{coder.name}: {coder.smaller}"
    ]
    forked = coders.lines(session(client=client, code="x"), [ForkReason.OTHER_AGENT, ForkReason.COMPACTED])
    assert forked == [f"{coder.name}: {switch}" for switch in (coder.quieter, coder.longer) if switch]


def test_every_agent_has_its_section() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs" / "frameworks.md").read_text()
    for coder in coders.CODERS:
        assert f"### {coder.name}\n" in page, coder.name
