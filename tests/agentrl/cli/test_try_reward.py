"""`agentrl try-reward` on a file, and on a recorded run."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import UserError
from agentrl.rollout.rewards.reward_trial import LONGEST_LINE

CONFIG = """
name: r
model: tiny
tasks: t.jsonl
reward:
  processes: 1
  retries: 0
  components:
    right: {function: "tried:right"}
    length: {function: "tried:length", weight: 0.5}
"""
FUNCTIONS = """
def right(completion, answer):
    return completion == answer

def length(completion):
    if completion == "bad":
        raise ValueError("no length")
    return len(completion)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "tried.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(*words: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["try-reward", "run.yaml", *words])
    if isinstance(done.exception, UserError):
        raise done.exception
    return done.exit_code, done.output.splitlines()


def test_the_answers_of_a_file_are_scored(folder: Path) -> None:
    (folder / "a.jsonl").write_text(
        '{"prompt": "?", "answer": "42", "completion": "42"}\n\n{"prompt": "?", "answer": "7", "completion": "bad"}\n'
    )
    status, (first, second, summary) = lines("--answers", "a.jsonl")
    assert status == 1
    assert first.startswith("0: right 1 + length 1 = 2  ")
    assert first.endswith("'42'")
    assert "ValueError: no length" in second
    assert summary.startswith("2 answers, 1 failed; mean right 1.000, length 1.000; slowest ")
    assert lines("--answers", "a.jsonl", "--limit", "1")[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "line 1 is not JSON"), ('{"prompt": "?"}', "with the text `completion`"), ("\n", "no answer to score")],
)
def test_a_file_without_answers_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        lines("--answers", "a.jsonl")


def test_there_is_one_source() -> None:
    with pytest.raises(UserError, match="either --answers FILE or --run NAME"):
        lines()


def test_a_config_without_a_reward_has_nothing_to_try(folder: Path) -> None:
    (folder / "run.yaml").write_text("name: r\nmodel: tiny\nagent: a:B\ntasks: t.jsonl\n")
    with pytest.raises(UserError, match=r"^run\.yaml has no `reward`$"):
        lines("--answers", "a.jsonl")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("absent.jsonl", "No such file"),
        (".", "Is a directory"),
        ("long.jsonl", "line 1 must be"),
        ("bytes.jsonl", "can't decode byte 0xff"),
        ("deep.jsonl", "line 1 is not JSON"),
    ],
)
def test_answers_that_cannot_be_read_are_named(folder: Path, answers: str, message: str) -> None:
    (folder / "long.jsonl").write_text('{"completion": "' + "x" * LONGEST_LINE + '"}\n')
    (folder / "deep.jsonl").write_text("[" * 100_000)
    (folder / "bytes.jsonl").write_bytes(b'{"completion": "\xff"}\n')
    with pytest.raises(UserError, match=rf"^--answers: .*{answers}.*{message}"):
        lines("--answers", answers)
