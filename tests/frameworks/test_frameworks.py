"""The newest SDKs and agent frameworks, unchanged, on real SGLang: what they leave behind is token-exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from arena import Arena
from conversation import EXPECTED, check_one_trajectory, played, tool_calls

from agentrl.domain.schemas import ForkReason, Role
from agentrl.store.audit import run_audit

pytestmark = [pytest.mark.engine, pytest.mark.long]
PROGRAMS = [
    "openai_chat sdk",
    "openai_responses stateful",
    "openai_responses stateless",
    "anthropic_messages sdk",
    "openai_agents responses",
    "openai_agents server",
    "openai_agents chat",
    "langgraph_agent openai",
    "langgraph_agent responses",
    "langgraph_agent anthropic",
    "pydantic_ai_agent chat",
    "pydantic_ai_agent responses",
    "pydantic_ai_agent anthropic",
]


@pytest.fixture(scope="module")
def python(frameworks: Path) -> Path:
    return frameworks


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_agent_leaves_one_exact_trajectory(arena: Arena, caller_model: Path, program: str) -> None:
    check_one_trajectory(arena, caller_model, program)


def test_an_agent_behind_a_tool_is_a_branch_of_its_own(arena: Arena) -> None:
    """The Agents SDK runs it in the same session: a fork by another agent, and the main agent is one trajectory."""
    for episode in played(arena, "openai_agents subagent", EXPECTED):
        by_role = {
            role: [call for call in episode.calls if call["role"] == role] for role in (Role.MAIN, Role.SUBAGENT)
        }
        assert [call["answer"]["content"] for call in by_role[Role.SUBAGENT]] == ["47", "94"]
        assert [call["bridged"] for call in by_role[Role.MAIN]] == [False, True, True, True]
        assert [call["fork_reason"] for call in by_role[Role.SUBAGENT]] == ["other_agent", "new_conversation"]
        assert len(episode.trajectories) == 3


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_smolagents_writes_its_history_anew(arena: Arena, choice: str) -> None:
    """It sends tool calls and results back as text: no call extends an earlier one, and each fork says why.

    It asks for a tool call every time, which here takes a grammar, whose calls are not trained; with `auto` they are.
    """
    for episode in played(arena, f"smolagents_agent {choice}", ["47", "94"]):
        assert [name for name, _ in tool_calls(episode)] == ["calc", "final_answer"] * 2
        assert {"structural_tag" in call["params"] for call in episode.calls} == {choice == "required"}
        assert len(episode.trajectories) == len(episode.calls) == 4
        assert episode.forks == [ForkReason.HISTORY_EDITED] * 3


def test_the_audit_finds_no_violation(arena: Arena) -> None:
    with arena.database.read() as conn:
        assert list(run_audit.scan(conn, arena.run_id)) == []
