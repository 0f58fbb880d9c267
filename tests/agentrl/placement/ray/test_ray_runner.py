"""The actor of a rank says why its task runner ended, and how often it ended in a row because its input was wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.placement.ray import ray_runner
from agentrl.placement.ray.ray_runner import PYTHON, RayRunner
from agentrl.processes.restarts import Backoff

RUNNER = """
import sys, time
from pathlib import Path

starts, line = Path(sys.argv[1], "starts"), "agentrl: host h does not see /runs/r/.secrets"
starts.write_text(starts.read_text() + "." if starts.exists() else ".")
if len(starts.read_text()) <= int(sys.argv[2]):
    print("starting")
    sys.exit(print(line, file=sys.stderr) or int(sys.argv[3]))
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.02)
"""
"""Ends so many times with a status; the next start waits for a file and ends with status 0."""


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runner, "_ray_address", lambda: "10.0.0.1")
    monkeypatch.setattr(Backoff, "after", lambda self, lived_s: 0.0)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("status", "reason", "refusals"),
    [
        (2, "host h does not see /runs/r/.secrets", 3),
        (1, "its runner ended with status 1: agentrl: host h does not see /runs/r/.secrets", 0),
    ],
)
def test_the_reason_is_the_last_line_of_the_runner_that_ended(tmp_path: Path, capfd, status, reason, refusals):
    runner = RayRunner([PYTHON, "-c", RUNNER, str(tmp_path), "3", str(status)], 0, 1.0)
    until(lambda: (tmp_path / "starts").exists() and len((tmp_path / "starts").read_text()) == 4)
    ended, _, said, counted = runner.state()
    assert (ended, said, counted) == (False, reason, refusals)
    (tmp_path / "go").touch()
    until(lambda: runner.state()[0])
    assert capfd.readouterr().err.count("does not see") == 3  # in Ray's log of the worker
