"""mini-swe-agent, unchanged: with a URL, a key and a model it does a job by shell, and the doctor is content."""

from __future__ import annotations

from pathlib import Path

import apprentice
import pytest
from desk import Desk, Work

from agentrl.diagnosis.verdict import Answer

pytestmark = pytest.mark.long

GIVEN = {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}"}
QUIET = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""No questions about a first key, no price of a model that has none, no list of prices from the net."""


def mini(desk: Desk, coders: Path) -> Work:
    command = [coders / "mini", "-y", "--exit-immediately", "-m", "openai/default", "-t", apprentice.JOB]
    return desk.work([*command, "-o", desk.home / "done.json"], GIVEN | QUIET)


def test_a_job_is_done_and_can_be_trained(desk: Desk, coders: Path) -> None:
    work = mini(desk, coders)
    assert work.status == 0, work.said + work.error
    assert (desk.folder / "answer.txt").read_text() == apprentice.SECRET + "\n"
    found = work.report
    assert found.verdict.answer is Answer.TRAINABLE, found.verdict
    called = [call.turns[-1]["tool_calls"][0]["function"]["name"] for call in found.session.calls]
    assert called == ["bash"] * 3
    assert found.figures.trajectories == 1
    assert found.session.refusals == []
