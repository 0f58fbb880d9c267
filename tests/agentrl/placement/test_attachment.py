"""A supervisor attaches to what runs, and first takes away what an earlier supervisor had begun to stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.launch import placed_run
from agentrl.placement.part_spec import PartSpec
from agentrl.placement.scheduler import RunnerState
from agentrl.store import Database, part_ranks, runs
from agentrl.store.tables import runs as runs_table

SPEC = PartSpec(name="trainer", argv=("train",), ends=True)
HERE = {"host": "a", "address": "10.0.0.1", "lease_s": 60.0}


class Ended:
    """A scheduler that starts each task runner once. A runner that is to stop ends at once, for good."""

    def __init__(self, database: Database, run_id: str) -> None:
        self.database, self.run_id = database, run_id
        self.runners: dict[str, bool] = {}
        """Part → whether its runner works."""

    def check(self, parts: Sequence[PartSpec]) -> None: ...

    def apply(self, parts: Sequence[PartSpec]) -> None:
        for part in parts:
            self.runners.setdefault(part.name, self.wanted(part.name))

    def states(self) -> list[RunnerState]:
        return []

    def remove(self, *, kill: bool = False) -> None:
        self.runners.clear()

    def wanted(self, part: str) -> bool:
        order = self.database.query(part_ranks.order, self.run_id, part)
        return order is not None and order.wanted == "running" and order.failure is None


@pytest.fixture
def scheduler(db: Database, run_id: str, tmp_path: Path) -> Ended:
    scheduler = Ended(db, run_id)
    placed_run.begin(db, run_id, scheduler, [SPEC], tmp_path)
    assert scheduler.runners == {"trainer": True}
    return scheduler


def end(conn, run_id, runner, status, attempt=1):
    part_ranks.claim(conn, run_id, "trainer", 0, runner, **HERE)
    part_ranks.announce(conn, run_id, "trainer", 0, runner, attempt, {})
    part_ranks.release(conn, run_id, "trainer", 0, runner, status)


def publish_all(conn, run_id):
    step = runs.get(conn, run_id).target_steps
    conn.execute(runs_table.update().where(runs_table.c.id == run_id).values(published_step=step))


def test_runners_that_an_earlier_supervisor_stopped_before_it_died_are_placed_anew(db, run_id, scheduler, tmp_path):
    db.transact(part_ranks.stop, run_id)
    scheduler.runners["trainer"] = False  # it has ended; the supervisor dies before it takes the runner away
    placed_run.begin(db, run_id, scheduler, [SPEC], tmp_path)
    assert scheduler.runners == {"trainer": True}


def test_runners_of_parts_that_were_given_up_are_placed_anew(db, run_id, scheduler, tmp_path):
    db.transact(part_ranks.give_up, run_id, "trainer", "died 6 times")
    scheduler.runners["trainer"] = False
    placed_run.begin(db, run_id, scheduler, [SPEC], tmp_path)
    assert scheduler.runners == {"trainer": True}


def test_runners_that_were_done_are_placed_anew_when_the_run_gets_more_steps(db, run_id, scheduler, tmp_path):
    db.transact(end, run_id, "first", 0)
    db.transact(publish_all, run_id)
    scheduler.runners["trainer"] = False
    placed_run.begin(db, run_id, scheduler, [SPEC], tmp_path)
    assert scheduler.runners == {"trainer": False}  # the run is over
    steps = db.query(runs.get, run_id).target_steps + 1
    db.transact(lambda conn: conn.execute(runs_table.update().values(target_steps=steps)))
    placed_run.begin(db, run_id, scheduler, [SPEC], tmp_path)
    assert scheduler.runners == {"trainer": True}


def test_a_run_that_goes_on_is_left_alone(db, run_id, scheduler, tmp_path):
    gone = PartSpec(name="engine-1", argv=("serve",))
    placed_run.begin(db, run_id, scheduler, [SPEC, gone], tmp_path)
    placed_run.begin(db, run_id, scheduler, [SPEC], tmp_path)  # engine-1 is to stop
    kept = scheduler.runners
    placed_run.begin(db, run_id, scheduler, [SPEC], tmp_path)
    assert scheduler.runners is kept
    assert kept == {"trainer": True, "engine-1": True}
    assert db.query(part_ranks.order, run_id, "trainer").attempt == 1
