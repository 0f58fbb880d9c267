"""A run whose engine and trainer take turns with the memory goes on after either was killed in the trainer's turn.

The engine is a fake in a process of its own; the supervisor, the proxy, the worker and the trainer are real. A trainer
that is to be caught in its turn is stopped first, so that the turn is still its own when a process is killed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fake_engine_run
import pytest
from chaos import losses
from chaos.run import NAME, Run
from sqlalchemy import text

from agentrl.processes import guard
from agentrl.store import Database, events, runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 6
TURN = """
    SELECT l.epoch, e.state FROM memory_leases l JOIN runs r ON r.id = l.run_id JOIN engines e ON e.run_id = r.id
    WHERE r.name = :name AND l.version IS NULL
"""


@pytest.fixture
def run(tmp_path: Path, empty_database_url: str) -> Iterator[Run]:
    """A run whose engine releases its memory during the trainer's steps."""
    run = Run(
        tmp_path.resolve(),
        empty_database_url,
        2,
        STEPS,
        think_s=0.05,
        command=(sys.executable, fake_engine_run.__file__),
        changes={"resources": {"colocated": True}},
    )
    yield run
    run.stop()


def trainer_has_the_memory(run: Run) -> bool:
    """Whether it is the trainer's turn, and the engine has released its memory."""
    with run.database.connect() as conn:
        return [row.state for row in conn.execute(text(TURN), {"name": NAME})] == ["released"]


@contextmanager
def caught_in_turn(run: Run, after_step: int) -> Iterator[None]:
    """The trainer stands still in its turn while the block runs, after that step was published."""
    for position in run.follow():
        if position.step < after_step or not trainer_has_the_memory(run):
            continue
        below = run.parts()["trainer"].children(recursive=True)
        stopped = [process for process in below if guard.__file__ not in process.cmdline()]
        for process in stopped:
            process.suspend()
        if caught := trainer_has_the_memory(run):
            yield
        for process in stopped:
            if process.is_running():
                process.resume()
        if caught:
            return


@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql"])
def test_a_run_reaches_its_last_step_after_trainer_and_engine_were_killed_in_the_trainers_turn(run: Run) -> None:
    run.start()
    with caught_in_turn(run, after_step=1):
        assert run.kill("trainer")
    with caught_in_turn(run, after_step=3):
        assert run.kill("engine")
        while "engine" in run.parts():
            time.sleep(0.05)
    for _ in run.follow():
        pass

    found = losses.check(run)
    assert found.details == []
    assert found.violations == []
    assert min(found.responses, found.rewards, found.trained) > STEPS * 4
    database = Database(run.database_url)
    run_id = database.query(runs.by_name, NAME).id
    died = [event.data["part"] for event in database.query(events.of_run, run_id, "part_died")]
    returned = [event.data["why"] for event in database.query(events.of_run, run_id, "memory_returned")]
    database.close()
    assert died == ["trainer", "engine-0"]
    assert returned == ["the trainer ended"]
