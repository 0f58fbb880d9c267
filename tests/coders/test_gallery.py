"""The coding agent of the gallery, with programs that people use: they repair a repository by one shell command."""

from __future__ import annotations

import os
from pathlib import Path

import apprentice
import pytest
from apprentice import Script, last_turn, shell_call
from desk import Desk

from agentrl.agents.coding.broken_modules import MODULES, tasks
from agentrl.agents.coding.coding_agent import CodingAgent

pytestmark = pytest.mark.long

NAME = "spans"
RIGHT, WRONG = MODULES[NAME][2][2]
REPAIR = f"sed -i 's/{WRONG}/{RIGHT}/' {NAME}.py && echo written"


@pytest.mark.parametrize("program", ["claude", "codex", "mini"])
async def test_a_repository_is_repaired(
    desk: Desk, coders: Path, script: Script, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setenv("PATH", f"{coders}:{os.environ['PATH']}")
    script.next_line = repaired
    opened = desk.post("/sessions", {})
    task = next(
        one for one in tasks() if WRONG in one["files"].get(f"{NAME}.py", "") and RIGHT not in str(one["files"])
    )
    agent = CodingAgent(program, time_s=240)
    assert await agent.run(task, base_url=opened["base_url"], api_key=opened["api_key"]) == 1.0


def repaired(prompt: str) -> str:
    """The command that repairs the module, then the end of the work."""
    role, said = last_turn(prompt)
    if apprentice.OF_MINI in said:
        return shell_call(prompt, apprentice.HAND_IN)
    return "It is repaired." if role == "tool" else shell_call(prompt, REPAIR)
