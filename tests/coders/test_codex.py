"""Codex, unchanged: with a URL, a key and a model it does a job of two tool calls, and the doctor is content."""

from __future__ import annotations

import json
from pathlib import Path

import apprentice
from desk import Desk, Work

from agentrl.doctor.verdict import Answer
from agentrl.schemas import Json

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


def codex(desk: Desk, coders: Path, job: str = apprentice.JOB) -> Work:
    settings = desk.home / ".codex"
    settings.mkdir()
    (settings / "config.toml").write_text(QUIET + PROVIDER.replace("URL", desk.url))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    return desk.work([coders / "codex", "exec", *options, job], {"OPENAI_API_KEY": "{key}"})


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
    assert "tools that only a provider runs were left out, the policy does not know of them: web_search" in (
        found.verdict.notes
    )
