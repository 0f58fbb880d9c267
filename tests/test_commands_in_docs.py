"""Every `agentrl` command in README and the docs has a subcommand, options and arguments that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("", "bash", "console", "sh", "shell")
ENDS = ("&", "&&", "||", "|", ";", ">")


def commands() -> list[Any]:
    """The arguments of each command, by its page."""
    found = []
    for page in PAGES:
        for language, block in FENCED.findall(page.read_text()):
            if language not in SHELL:
                continue
            for line in block.replace("\\\n", " ").splitlines():
                inner = re.search(r"\$\((agentrl [^)]*)\)", line)
                found += [
                    pytest.param(words, id=f"{page.name}: agentrl {' '.join(words)}"[:90])
                    for words in [_arguments(inner[1] if inner else line)]
                    if words
                ]
    return found


def _arguments(line: str) -> list[str]:
    """What stands behind `agentrl`; empty for another command, and for `agentrl COMMAND` in a synopsis."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # not a shell's
        return []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if not words or words[0].rpartition("/")[2] != "agentrl":
        return []
    end = next((index for index, word in enumerate(words) if word in ENDS), len(words))
    return [] if words[1:2] in ([], ["COMMAND"]) else words[1:end]


@pytest.mark.parametrize("words", commands())
def test_the_command_line_accepts_each_documented_command(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while below := getattr(command, "commands", None):
        if rest[0].startswith("-") and command.invoke_without_command:
            break
        assert rest[0] in below
        command = below[rest.pop(0)]
    command.make_context(words[0], rest)


def test_the_documentation_has_commands() -> None:
    assert len(commands()) > 40
