"""A worker whose sessions all fail slows down, and stops when the run is stopped."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.rollout.episode import Outcome
from agentrl.rollout.pace import Pace
from agentrl.rollout.worker_display import Progress

WELL, BADLY = Outcome(session_id="s", reward=1.0, error=None), Outcome(session_id="s", reward=None, error="boom")


async def test_pauses_grow_with_groups_that_fail_whole_up_to_a_second_a_session() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert "the last sessions all failed" in progress.line()

    progress = Progress()
    pace = Pace(progress, sleep)
    for outcomes in ([WELL] * 4, [BADLY, BADLY, BADLY, WELL], *[[BADLY] * 4] * 5, [WELL] * 4, [BADLY] * 2, [BADLY] * 2):
        pace.saw(outcomes)
        await pace.wait()
    assert slept == [0.5, 1.0, 2.0, 4.0, 4.0, 0.5, 1.0]
    assert "failed" not in progress.line()


async def test_waiting_sessions_start_one_by_one_and_all_at_once_after_a_success() -> None:
    asleep, go_on, slept = asyncio.Event(), asyncio.Event(), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        asleep.set()
        await go_on.wait()

    pace = Pace(Progress(), sleep)
    pace.saw([BADLY])
    waiting = [asyncio.create_task(pace.wait()) for _ in range(5)]
    await asleep.wait()
    pace.saw([WELL])
    go_on.set()
    await asyncio.gather(*waiting)
    assert slept == [0.5]


AGENT = """
class Agent:
    async def run(self, data, **extra):
        raise RuntimeError("no SDK")

def tasks():
    return [{"n": 1}]
"""


@pytest.mark.parametrize("evaluated", [False, True])
def test_the_command_ends_with_the_reason_of_a_failed_run(tmp_path: Path, proxy: Any, evaluated: bool) -> None:
    """The proxy stops the run: the worker says why in one line and exits with status 2."""
    (tmp_path / "broken.py").write_text(AGENT)
    evaluation = ", evaluation: {tasks: 'broken:tasks', size: 1}" if evaluated else ""
    (tmp_path / "run.yaml").write_text(
        f"{{name: r, model: tiny, agent: 'broken:Agent', tasks: 'broken:tasks'{evaluation}}}"
    )
    proxy.groups_left, proxy.most_failures, proxy.faulty = 100, 4, True
    command = [sys.executable, "-m", "agentrl", "rollout", "--config", "run.yaml"]
    env = os.environ | {"AGENTRL_PROXY_URL": proxy.url, "AGENTRL_RUN_KEY": "k"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "agentrl: run r is failed: 4 sessions in a row failed: RuntimeError: no SDK\n"
    assert proxy.groups_left > 80
