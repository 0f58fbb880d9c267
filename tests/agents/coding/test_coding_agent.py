"""The coding agent: what its program may do, and that the tests of the repository give the reward."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.agents.coding import coding_agent
from agentrl.agents.coding.broken_modules import MODULES, heldout_tasks, tasks, train_tasks
from agentrl.agents.coding.coding_agent import CodingAgent, passed, read, write
from agentrl.errors import UserError

EXTRA = {"base_url": "http://127.0.0.1:1/sessions/ses-1/v1", "api_key": "the-key"}
TASK = {
    "prompt": "Repair {key}.",
    "files": {"a/b.py": "wrong"},
    "tests": {"test_b.py": "from a.b import x"},
}


def program(code: str) -> CodingAgent:
    return CodingAgent([sys.executable, "-c", code, "{prompt}", "{url}", "{key}", "{home}"])


async def test_a_program_that_repairs_the_repository_earns_the_reward() -> None:
    code = "import pathlib; assert pathlib.Path('a/b.py').read_text() == 'wrong'; open('a/b.py', 'w').write('x = 1')"
    assert await program(code).run(TASK, **EXTRA) == 1.0
    assert await program("").run(TASK, **EXTRA) == 0.0


async def test_a_program_gets_the_session_and_a_home_of_its_own(tmp_path: Path) -> None:
    code = """
import os, pathlib, sys
said, url, key, home = sys.argv[1:]
assert (said, url, key) == ("Repair " + "{" + "key}.", "http://127.0.0.1:1/sessions/ses-1", "the-key"), sys.argv
assert os.environ["HOME"] == home and os.path.isdir(home) and os.getcwd() != home
assert os.environ["OPENAI_BASE_URL"] == url + "/v1" and os.environ["OPENAI_API_KEY"] == key
pathlib.Path("a/b.py").write_text("x = 1")
"""
    assert await program(code).run(TASK, **EXTRA) == 1.0


@pytest.mark.usefixtures("bubblewrap")
async def test_a_program_writes_in_its_folder_only(tmp_path: Path) -> None:
    code = f"""
try:
    open({str(tmp_path / "elsewhere")!r}, "w")
except OSError:
    open("a/b.py", "w").write("x = 1")
"""
    assert await program(code).run(TASK, **EXTRA) == 1.0


@pytest.fixture
def tool() -> Iterator[Path]:
    """A program in the folder for temporary files. It writes beside its repository where it may."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder, "tool")
        path.write_text("#!/bin/sh\necho 'x = 1' > a/b.py && touch /tmp/own && ! touch $0.changed\n")
        path.chmod(0o755)
        yield path
        assert [found.name for found in Path(folder).iterdir()] == ["tool"]


@pytest.mark.usefixtures("bubblewrap")
async def test_a_program_that_is_installed_in_the_folder_for_temporary_files_is_found(tool: Path) -> None:
    assert await CodingAgent([str(tool)]).run(TASK, **EXTRA) == 1.0


@pytest.fixture
def bubblewrap() -> None:
    if coding_agent.choose(None) != "bubblewrap":
        pytest.skip("no isolation by bubblewrap: it is not installed, or not allowed")


async def test_a_program_whose_time_is_over_is_ended_and_its_work_counts() -> None:
    agent = program("import time; open('a/b.py', 'w').write('x = 1'); open('done', 'w'); time.sleep(600)")
    agent.time_s = 3.0
    assert await agent.run(TASK, **EXTRA) == 1.0


@pytest.mark.parametrize(
    "name", [name if name in ("words", "ledger") else pytest.param(name, marks=pytest.mark.long) for name in MODULES]
)
async def test_each_fault_is_found_by_the_tests_and_the_right_module_passes(name: str) -> None:
    source, tests, faults = MODULES[name]
    test = {f"test_{name}.py": tests}
    assert await passed({f"{name}.py": source.encode()}, test) == 1.0
    for right, wrong in faults:
        assert source.replace(right, wrong) != source, right
        assert await passed({f"{name}.py": source.replace(right, wrong).encode()}, test) == 0.0, wrong


async def test_a_module_that_ends_the_process_passes_no_test() -> None:
    tests = {"test_a.py": "import a\nassert a.x == 1", "test_b.py": "pass"}
    for code in ("raise SystemExit(0)", "import os; os._exit(0)"):
        assert await passed({"a.py": code.encode(), "test_b.py": b"broken("}, tests) == 0.5


def test_a_repository_is_read_without_links_and_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "r", {"a.py": "1", "deep/b.py": "22"})
    (tmp_path / "r" / "secret").symlink_to("/etc/passwd")
    (tmp_path / "r" / "folder").symlink_to("/etc")
    assert read(tmp_path / "r") == {"a.py": b"1", "deep/b.py": b"22"}
    monkeypatch.setattr(coding_agent, "MOST_BYTES", 2)
    with pytest.raises(UserError, match="more than 500 files or 2 bytes"):
        read(tmp_path / "r")


@pytest.mark.parametrize("path", ["../x", "/tmp/x"])
def test_a_path_that_leads_out_of_the_repository_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match="leads out of the repository"):
        write(tmp_path / "r", {path: ""})


@pytest.mark.parametrize(
    ("name", "error"), [("cluade", "did you mean 'claude'"), (["no-such-program"], "cannot run 'no-such-program'")]
)
def test_a_program_that_does_not_exist_is_refused(name: Any, error: str) -> None:
    with pytest.raises(UserError, match=error):
        CodingAgent(name)


def test_held_out_faults_are_not_trained() -> None:
    held_out = [str(task) for task in heldout_tasks()]
    assert held_out
    assert len(tasks()) == len({str(task) for task in tasks()}) == 12
    assert not set(held_out) & {str(task) for task in train_tasks()}
