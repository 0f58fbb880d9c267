"""The script of docs/scripts.md as a whole run with a fake engine: killed on the way, started again, finished."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_engine_run
import psutil
import pytest

from agentrl.store import Database, events
from agentrl.store.tables import runs, step_trajectories, steps

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
DOCS = Path(__file__).parents[2] / "docs" / "scripts.md"
LAUNCHER = """
import runpy, sys
sys.path.insert(0, {folder!r})
import fake_engine_run
fake_engine_run.start_fake_engines()
sys.argv = ["digits.py"]
runpy.run_path("digits.py", run_name="__main__")
"""


def trainer_of(run: psutil.Process) -> psutil.Process | None:
    """The trainer's process."""
    for child in run.children(recursive=True):
        try:
            words = child.cmdline()
            if "trainer" in words and "guard.py" not in " ".join(words):
                return child
        except psutil.Error:
            continue
    return None


def is_trained(folder: Path) -> bool:
    """Whether the run has a step."""
    return any((folder / "runs" / "digits" / "checkpoints").glob("step-*"))


def test_the_script_of_the_docs_trains_and_survives_kill_9(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(import random\n.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "digits.py").write_text(code)
    (tmp_path / "launch.py").write_text(LAUNCHER.format(folder=str(Path(fake_engine_run.__file__).parent)))

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "launch.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    first = start()
    try:
        deadline = time.monotonic() + 400
        while not is_trained(tmp_path):
            assert first.poll() is None, first.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        trainer = trainer_of(psutil.Process(first.pid))
        if trainer is not None:
            trainer.kill()  # the supervisor starts it again
        everyone = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGKILL)
        first.wait()
        _, left = psutil.wait_procs(everyone, timeout=60)
        assert left == []
    finally:
        first.kill()
        first.wait()
    second = start()
    try:
        output, _ = second.communicate(timeout=400)
    finally:
        second.kill()
        second.wait()
    assert second.returncode == 0, output[-4000:]
    database = Database(f"sqlite:///{tmp_path}/runs/digits/agentrl.db")
    with database.read() as conn:
        run = conn.execute(runs.select()).one()
        survived = conn.execute(steps.select().where(steps.c.state == "published").order_by(steps.c.step)).all()
        trained = conn.execute(
            step_trajectories.select().where(step_trajectories.c.step_id.in_([step.id for step in survived]))
        ).all()
        (code_event,) = events.of_run(conn, run.id, "code")
    database.close()
    assert (run.status, run.published_step) == ("finished", 4)
    assert [step.step for step in survived] == [1, 2, 3, 4]
    assert len({row.trajectory_id for row in trained}) == len(trained)
    assert set(code_event.data["keys"]) == {"reward.reward", "trainer.script"}
