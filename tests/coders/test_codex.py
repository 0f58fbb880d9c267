"""Codex, unchanged: with a URL, a key and a model it does a job of two tool calls, and the doctor is content."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import apprentice
import pytest
from apprentice import Script, call, last_turn
from desk import Desk, Work

from agentrl.diagnosis.verdict import Answer
from agentrl.domain.schemas import Json

pytestmark = pytest.mark.long

PROVIDER = """
model = "default"
model_provider = "agentrl"

[model_providers.agentrl]
name = "agentrl"
base_url = "URL/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
"""How Codex is told a URL, a key and a model. A session key names its session, so the file is the same for all."""
QUIET = "check_for_update_on_startup = false\nanalytics.enabled = false\n"
"""Only silences what would go elsewhere than to the proxy."""


def codex(desk: Desk, coders: Path, model: str = "default") -> Work:
    settings = desk.home / ".codex"
    settings.mkdir()
    (settings / "config.toml").write_text(QUIET + PROVIDER.replace("URL", desk.url).replace("default", model))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    return desk.work([coders / "codex", "exec", *options, apprentice.JOB], {"OPENAI_API_KEY": "{key}"})


def events(work: Work) -> list[Json]:
    return [json.loads(line) for line in work.said.splitlines() if line.startswith("{")]


def test_a_job_is_done_and_can_be_trained(desk: Desk, coders: Path) -> None:
    work = codex(desk, coders)
    assert work.status == 0, work.said + work.error
    assert (desk.folder / "answer.txt").read_text() == apprentice.SECRET + "\n"
    said = [event["item"]["text"] for event in events(work) if event.get("item", {}).get("type") == "agent_message"]
    assert said == [apprentice.ANSWER]
    found = work.report
    assert found.verdict.answer is Answer.TRAINABLE, found.verdict
    called = [call.turns[-1].get("tool_calls") for call in found.session.calls]
    assert [bool(calls) for calls in called] == [True, True, False]
    assert found.figures.trajectories == 1
    assert found.session.refusals == []
    assert "tools that only a provider runs were left out of the prompt: web_search" in (found.verdict.notes)


def test_an_error_that_no_retry_mends_is_told_once(desk: Desk, coders: Path) -> None:
    work = codex(desk, coders, model="gpt-oops")
    assert work.status != 0
    assert "no model 'gpt-oops'" in work.said
    assert [(one["status"], one["code"]) for one in work.report.session.refusals] == [(400, "model_not_found")]
    assert work.report.verdict.answer is Answer.NOT_TRAINABLE
    assert "name it 'default'" in work.report.verdict.problems[0]


def test_a_function_of_a_namespace_is_called(desk: Desk, coders: Path, script: Script) -> None:
    """`multi_agent_v1` is the only namespace that it has of itself; its sub-agent speaks in the same session."""

    def next_line(prompt: str) -> str:
        _, said = last_turn(prompt)
        if "Rested." in said:  # in the result, or in the notification behind it
            return "All is known."
        if '"agent_id"' in said:
            return call("multi_agent_v1__wait_agent", targets=[json.loads(said.partition("<|im_end|>")[0])["agent_id"]])
        if said.startswith("Rest."):
            return "Rested."
        return call("multi_agent_v1__spawn_agent", message="Rest.")

    script.next_line = next_line
    work = codex(desk, coders)
    assert work.status == 0, work.said + work.error
    done = [event["item"] for event in events(work) if event["type"] == "item.completed"]
    assert [(one["tool"], one["status"]) for one in done if "tool" in one] == [
        ("spawn_agent", "completed"),
        ("wait", "completed"),
    ]
    calls = work.report.session.calls
    named = [one["function"]["name"] for one in calls for one in one.turns[-1].get("tool_calls") or []]
    assert named == ["multi_agent_v1__spawn_agent", "multi_agent_v1__wait_agent"]
    roles = Counter(call.role for call in calls)
    assert roles == {"main": 3, "subagent": 1}
    assert [fork.reason for fork in work.report.forks] == ["other_agent"]
