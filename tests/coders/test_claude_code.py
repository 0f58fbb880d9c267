"""Claude Code, unchanged: with a URL, a key and a model it does a job of two tool calls, and the doctor is content."""

from __future__ import annotations

import base64
from pathlib import Path

import apprentice
import pytest
from apprentice import Script, call, last_turn
from desk import Desk, Work

from agentrl.diagnosis.verdict import Answer

pytestmark = pytest.mark.long

QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
"""Only silences what would go elsewhere than to the proxy."""
GIVEN = {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "{key}", "ANTHROPIC_MODEL": "default"}


def claude(coders: Path, *options: str) -> list[str | Path]:
    return [coders / "claude", "-p", apprentice.JOB, "--allowedTools", "Bash", *options]


def check_done(desk: Desk, work: Work) -> None:
    """The job is done by two calls and an answer, in one trajectory that can be trained."""
    assert work.status == 0, work.said + work.error
    assert apprentice.ANSWER in work.said
    assert (desk.folder / "answer.txt").read_text() == apprentice.SECRET + "\n"
    found = work.report
    assert found.verdict.answer is Answer.TRAINABLE, found.verdict
    called = [call.turns[-1].get("tool_calls") for call in found.session.calls]
    assert [bool(calls) for calls in called] == [True, True, False]
    assert found.figures.trajectories == 1
    assert found.session.refusals == []


@pytest.mark.parametrize("options", [(), ("--bare",)], ids=["plain", "bare"])
def test_a_job_is_done_and_can_be_trained(desk: Desk, coders: Path, options: tuple[str, ...]) -> None:
    check_done(desk, desk.work(claude(coders, *options), GIVEN | QUIET))


def test_the_agent_sdk_does_the_job(desk: Desk, coders: Path) -> None:
    command = [coders / "python", Path(__file__).parent / "programs" / "agent_sdk.py", apprentice.JOB]
    check_done(desk, desk.work(command, GIVEN | QUIET))


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_an_image_that_it_reads_is_replaced_and_counted(desk: Desk, coders: Path, script: Script) -> None:
    picture = desk.folder / "dot.png"
    picture.write_bytes(PNG)

    def next_line(prompt: str) -> str:
        return "A picture." if last_turn(prompt)[0] == "tool" else call("Read", file_path=str(picture))

    script.next_line = next_line
    work = desk.work([coders / "claude", "-p", "What is in dot.png?"], GIVEN | QUIET)
    assert work.status == 0, work.said + work.error
    assert "A picture." in work.said
    assert work.report.verdict.answer is Answer.TRAINABLE
    assert any("1 attachment in tools' results was replaced" in note for note in work.report.verdict.notes)


def test_a_tool_that_it_loads_is_called_and_the_prompt_only_grows(desk: Desk, coders: Path, script: Script) -> None:
    def next_line(prompt: str) -> str:
        role, said = last_turn(prompt)
        if role != "tool":
            return call("ToolSearch", query="select:CronList", max_results=1)
        return "CronList()" if "<functions>" in said else "No jobs."

    script.next_line = next_line
    work = desk.work([coders / "claude", "-p", "Which cron jobs are there?"], GIVEN | QUIET)
    assert work.status == 0, work.said + work.error
    names = [one["function"]["name"] for c in work.report.session.calls for one in c.turns[-1].get("tool_calls") or []]
    assert names == ["ToolSearch", "CronList"]
    assert work.report.figures.trajectories == 1
    assert work.report.verdict.answer is Answer.TRAINABLE
