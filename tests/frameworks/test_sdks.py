"""The official SDKs, in the versions that agentrl itself uses, on real SGLang: they leave token-exact trajectories."""

from __future__ import annotations

from pathlib import Path

import pytest
from arena import Arena
from conversation import EXPECTED, check_one_trajectory, played

from agentrl.store.audit import run_audit

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("program", ["openai_chat sdk", "openai_responses stateful", "anthropic_messages sdk"])
def test_an_sdk_leaves_one_exact_trajectory(arena: Arena, caller_model: Path, program: str) -> None:
    check_one_trajectory(arena, caller_model, program)


def test_raw_prompts_that_grow_leave_one_exact_trajectory(arena: Arena) -> None:
    """Completions: the program writes the prompt and reads the tool call out of the text."""
    said = ["calc(12+35)", EXPECTED[0], "calc(47*2)", EXPECTED[1]]
    for episode in played(arena, "openai_completions sdk", EXPECTED):
        assert [call["answer"]["content"] for call in episode.calls] == said
        assert episode.forks == []
        assert len(episode.trajectories) == 1


def test_the_store_holds_together(arena: Arena) -> None:
    with arena.database.read() as conn:
        assert list(run_audit.scan(conn, arena.run_id)) == []
