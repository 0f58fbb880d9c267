"""Slurm's commands as shell scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Script = Callable[[str, str], None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Makes a command of Slurm a shell script. There are no other commands than these and `cat`."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(commands))

    def made(name: str, text: str) -> None:
        file = commands / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    return made
