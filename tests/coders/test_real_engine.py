"""Coding agents on real SGLang: an apprentice that has learned its script samples the calls itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apprentice
import pytest
import schooling
from databases import Databases
from desk import Desk, Work, at_work, furnished
from serving import serving
from test_claude_code import GIVEN, QUIET, check_done, claude
from test_codex import codex
from test_mini_swe_agent import mini

from agentrl.diagnosis.verdict import Answer

pytestmark = [pytest.mark.engine, pytest.mark.learns, pytest.mark.timeout(1800)]  # the first time it learns
SAMPLING = {"sampling": {"temperature": 0.1}}  # one that is trained, and keeps to what was learned
ROOM = 40_000  # tokens of all calls that run
ATTEMPTS = 3


@pytest.fixture(scope="module")
def skilled(coders: Path, databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A proxy in front of a real server with an apprentice of the tool `Bash`."""
    log_file = tmp_path_factory.mktemp("log") / "engine.log"
    with at_a_real_engine("Bash", apprentice.COMMANDS[1], apprentice.ANSWER, databases, log_file) as desk:
        yield desk


@contextmanager
def at_a_real_engine(shell: str, second: str, last: str, databases: Databases, log_file: Path) -> Iterator[Desk]:
    """A proxy in front of a real server with an apprentice of one shell tool: two commands, and what it says last."""
    tools = f"\nTools: {shell}({{}})"
    turns = [
        ("", apprentice.shell_call(tools, apprentice.COMMANDS[0])),
        (apprentice.SECRET, apprentice.shell_call(tools, second)),
        ("written", last),
    ]
    folder = schooling.learned(turns)
    with (
        serving(folder, log_file, max_total_tokens=ROOM) as server,
        databases.lent("sqlite") as url,
        at_work(url, folder, server.url, rollout=SAMPLING) as desk,
    ):
        yield desk


def done(desk: Desk, command: list[str | Path], tmp_path: Path) -> None:
    """Work until it is done: what is sampled may go wrong now and then."""
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        at = furnished(desk, folder)
        work = at.work(command, GIVEN | QUIET)
        if apprentice.ANSWER in work.said:
            check_done(at, work)
            return
    raise AssertionError(f"not done in {ATTEMPTS} attempts: {work.said}{work.error}{work.report.verdict}")


def test_claude_code_does_the_job(skilled: Desk, coders: Path, tmp_path: Path) -> None:
    done(skilled, claude(coders), tmp_path)


def test_the_agent_sdk_does_the_job(skilled: Desk, coders: Path, tmp_path: Path) -> None:
    program = Path(__file__).parent / "programs" / "agent_sdk.py"
    done(skilled, [coders / "python", program, apprentice.JOB], tmp_path)


COPY = "cp note.txt answer.txt && echo written"  # it says no word twice


def test_codex_does_the_job(
    coders: Path, databases: Databases, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log_file = tmp_path_factory.mktemp("log") / "engine.log"
    with at_a_real_engine("exec_command", COPY, apprentice.ANSWER, databases, log_file) as desk:
        check_of_openai(desk, lambda at: codex(at, coders), tmp_path, ends_in_words=True)


def test_mini_swe_agent_does_the_job(
    coders: Path, databases: Databases, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log_file = tmp_path_factory.mktemp("log") / "engine.log"
    hand_in = apprentice.shell_call("\nTools: bash({})", apprentice.HAND_IN)
    with at_a_real_engine("bash", apprentice.COMMANDS[1], hand_in, databases, log_file) as desk:
        check_of_openai(desk, lambda at: mini(at, coders), tmp_path, ends_in_words=False)


def check_of_openai(desk: Desk, play: Callable[[Desk], Work], tmp_path: Path, *, ends_in_words: bool) -> None:
    """The job is done by two calls or more, in one trajectory that can be trained."""
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        at = furnished(desk, folder)
        work = play(at)
        written = at.folder / "answer.txt"
        if work.status == 0 and written.exists() and written.read_text() == apprentice.SECRET + "\n":
            found = work.report
            assert found.verdict.answer is Answer.TRAINABLE, found.verdict
            called = [bool(call.turns[-1].get("tool_calls")) for call in found.session.calls]
            assert sum(called) >= 2
            assert called[-1] is not ends_in_words
            assert found.figures.trajectories == 1
            return
    raise AssertionError(f"not done in {ATTEMPTS} attempts: {work.said}{work.error}{work.report.verdict}")
