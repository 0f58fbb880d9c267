"""Mistakes in the arguments of any command: one line, status 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from agentrl.cli.main import app, main


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command that does something, by its words."""
    below = getattr(command, "commands", {})
    for name, one in below.items():
        yield from commands(one, (*path, name))
    if not below:
        yield path


COMMANDS = sorted(commands(typer.main.get_command(app)))


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int | str | None:
    for name in ("DATABASE_URL", "ADMIN_KEY", "RUN_KEY", "PROXY_URL"):
        monkeypatch.delenv(f"AGENTRL_{name}", raising=False)
    monkeypatch.setattr(sys, "argv", ["agentrl", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unknown_option_is_refused_with_the_help_command(command, monkeypatch, capsys):
    assert run(monkeypatch, *command, "--no-such-option") == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("agentrl: no such option: --no-such-option")
    assert err.endswith(f"agentrl {' '.join(command)} --help\n")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_option_has_a_help(command):
    found = typer.main.get_command(app)
    for word in command:
        found = found.commands[word]
    assert found.help
    assert [one.name for one in found.params if not (getattr(one, "help", None) or getattr(one, "hidden", False))] == []


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("proxy", "--engine", "u"), "agentrl: missing option '--run'"),
        (("proxy", "--port", "eighty"), "agentrl: invalid value for '--port': Input should be a valid integer"),
        (("no-such-command",), "agentrl: no such command 'no-such-command'; see agentrl --help\n"),
        (("db", "no-such-command"), "agentrl: no such command 'no-such-command'; see agentrl db --help\n"),
        (("train",), "agentrl: missing argument 'config'; see agentrl train --help\n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_other_mistakes_are_one_line(args, line, monkeypatch, capsys):
    assert run(monkeypatch, *args) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(line)


def test_help_and_version_are_no_mistakes(monkeypatch, capsys):
    assert not run(monkeypatch, "--help")
    assert not run(monkeypatch, "--version")
    assert run(monkeypatch) == 2
    assert "Usage" in capsys.readouterr().out


def test_an_aborted_prompt_exits_with_status_1(monkeypatch, capsys):
    def asked() -> None:
        raise typer.Abort

    monkeypatch.setattr("agentrl.cli.main.app", lambda **_: asked())
    assert run(monkeypatch) == 1
    assert capsys.readouterr().err == "agentrl: aborted\n"
