"""Coding agents on real SGLang: an apprentice that has learned its script samples the calls itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apprentice
import pytest
import schooling
from databases import Databases
from desk import Desk, at_work, furnished
from serving import serving
from test_claude_code import GIVEN, QUIET, check_done, claude

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]  # the first time it learns
SAMPLING = {"sampling": {"temperature": 0.1}}  # one that is trained, and keeps to what was learned
ROOM = 40_000  # tokens of all calls that run
ATTEMPTS = 3


@pytest.fixture(scope="module")
def skilled(coders: Path, databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A proxy in front of a real server with an apprentice of the tool `Bash`."""
    bash = "\nTools: Bash({})"
    turns = [
        ("", apprentice.shell_call(bash, apprentice.COMMANDS[0])),
        (apprentice.SECRET, apprentice.shell_call(bash, apprentice.COMMANDS[1])),
        ("written", apprentice.ANSWER),
    ]
    folder = schooling.learned(turns)
    log_file = tmp_path_factory.mktemp("log") / "engine.log"
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
