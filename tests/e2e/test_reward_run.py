"""A whole run of a dataset and reward functions, whose rollout worker is killed on the way."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import fake_engine_run
import psutil
import pytest
from sqlalchemy import select

from agentrl.store import Database
from agentrl.store.tables import groups, interactions, rewards, sessions

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
CONFIG = """
name: r
model: tiny
tasks: shapes:tasks
agent_args: {max_tokens: 6}
reward:
  components:
    vowels: {function: "shapes:vowels"}
    rank: {function: "shapes:rank", weight: 0.5}
steps: 4
rollout: {group_size: 4, max_concurrent_groups: 4, dump_to_file: true}
trainer: {groups_per_step: 2, device: cpu}
evaluation: {tasks: "shapes:tasks", size: 2}
"""
FUNCTIONS = """
def tasks():
    return [{"prompt": word} for word in ("abcd", "bcde", "cdef")]

def vowels(completion):
    return sum(letter in "aeiou" for letter in completion) / max(len(completion), 1)

def rank(prompts, completions):
    return [len(set(text)) / 10 for text in completions]
"""


def hosts(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if "reward_host" in " ".join(child.cmdline())]


def worker_with_rewards(run: psutil.Process) -> tuple[psutil.Process, list[psutil.Process]] | None:
    """The rollout worker, once it runs reward functions."""
    for child in run.children(recursive=True):
        try:
            words = child.cmdline()
            if "guard.py" not in " ".join(words) and "rollout" in words and (found := hosts(child)):
                return child, found
        except psutil.Error:
            continue
    return None


def test_a_run_with_reward_functions_goes_on_after_its_worker_was_killed(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "shapes.py").write_text(FUNCTIONS)
    command = [sys.executable, fake_engine_run.__file__, "train", "run.yaml"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        found, deadline = None, time.monotonic() + 300
        while found is None:
            assert run.poll() is None, run.stdout.read()
            assert time.monotonic() < deadline
            found = worker_with_rewards(psutil.Process(run.pid))
            time.sleep(0.1)
        worker, running = found
        worker.kill()
        _, left = psutil.wait_procs(running, timeout=20)
        assert left == []
        output, _ = run.communicate(timeout=300)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, output[-4000:]
    assert "4 steps in" in output
    database = Database(f"sqlite:///{tmp_path}/runs/r/agentrl.db")
    with database.read() as conn:
        recorded = {(row.name, row.source) for row in conn.execute(rewards.select())}
        answered = select(sessions.c.group_id).join(interactions, interactions.c.session_id == sessions.c.id)
        answered = answered.where(interactions.c.status == "complete", groups.c.id == sessions.c.group_id)
        over = select(groups.c.id, groups.c.is_eval).where(groups.c.state != "running", answered.exists())
        ended = {row.id: row.is_eval for row in conn.execute(over)}
    database.close()
    assert recorded == {("vowels", "shapes:vowels"), ("rank", "shapes:rank")}
    files = [file.relative_to(tmp_path / "runs/r") for file in (tmp_path / "runs/r").glob("*rollout/*/*")]
    assert {file.stem: file.parts[0] == "eval-rollout" for file in files} == ended
    assert len(files) == len(ended) >= 12
