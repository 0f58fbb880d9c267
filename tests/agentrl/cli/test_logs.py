"""`agentrl logs`: the last lines of each process under its name, and later ones until Ctrl-C."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.launch.views import run_logs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, `runs/mine`."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    (folder / "logs").mkdir(parents=True)
    (folder / "agentrl.db").touch()
    (folder / "logs" / "proxy.log").write_text("a\nb\n")
    (folder / "logs" / "engine-0.log").write_text("\x1b[31mred\n")
    return folder


def logs(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["logs", *map(str, arguments)])


def test_the_last_lines_of_each_process_are_shown_under_its_name(run: Path) -> None:
    assert logs(run, "-n", "1").stdout.splitlines() == ["engine-0 | \\x1b[31mred", "proxy    | b"]
    assert logs("--part", "proxy").stdout.splitlines() == ["proxy | a", "proxy | b"]


def test_an_unknown_run_or_part_is_named(run: Path) -> None:
    assert "mine" in str(logs("min").exception)
    assert "no log of 'proxi'" in str(logs(run, "--part", "proxi").exception)


def test_new_lines_are_shown_until_ctrl_c(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def follow(folder: Path, names: object) -> Iterator[tuple[str, str]]:
        yield "proxy", "c"
        raise KeyboardInterrupt

    monkeypatch.setattr(run_logs, "follow", follow)
    done = logs(run, "-n", "0", "--follow", "--part", "proxy")
    assert (done.exit_code, done.stdout) == (0, "proxy | c\n")


def test_without_a_name_the_newest_run_is_shown(run: Path) -> None:
    other = run.parent / "later"
    (other / "logs").mkdir(parents=True)
    (other / "agentrl.db").touch()
    (other / "logs" / "proxy.log").write_text("later\n")
    for folder, time in ((run, 1), (other, 2)):
        (folder / "config.yaml").touch()
        os.utime(folder / "config.yaml", (time, time))
        os.utime(folder / "agentrl.db", (time, time))
    assert logs().stdout == "proxy | later\n"
