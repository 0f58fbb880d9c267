"""Admission of groups: workers and outside programs that wait take places in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from concurrent_writes import counters
from sqlalchemy import update

from agentrl.domain.schemas import SessionStatus
from agentrl.errors import RequestError
from agentrl.store import Database, runs
from agentrl.store.sessions import (
    group_admission,
    group_starts,
    session_limits,
)
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import runs as runs_table


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the test is, who was refused still waits."""
    monkeypatch.setattr(group_admission, "WAITS_S", 1e6)


class Turns:
    """Workers and outside programs that ask for the places of a run."""

    def __init__(self, db: Database, run_id: str, limits: session_limits.Limits, places: int) -> None:
        self.db, self.run_id = db, run_id
        self.limits = replace(limits, max_concurrent_groups=places, groups_per_step=100, group_size=1)
        self.had: list[tuple[str, str]] = []  # who plays, and the session

    def ask(self, who: str) -> bool:
        """Whether a place was to be had; who gets none waits."""
        outside = who == "outside"
        try:
            new = self.db.transact(
                group_starts.start_group,
                self.run_id,
                self.limits,
                [f"key {len(self.had)}"],
                owner=None if outside else "worker",
            )
        except RequestError as error:
            if error.code != group_admission.NO_CAPACITY:
                raise
            self.db.transact(group_admission.note_waiting, self.run_id, outside=outside)
            return False
        self.had.append((who, new.session_ids[0]))
        return True

    def free(self, which: int = -1) -> None:
        self.db.transact(sealing.end, self.had[which][1], SessionStatus.ABANDONED, None, self.limits)


@pytest.mark.usefixtures("patient")
def test_one_place_alternates_between_workers_and_outside_programs(db, run_id, limits):
    turns = Turns(db, run_id, limits, places=1)
    assert turns.ask("worker")
    assert not turns.ask("outside")
    for last, first in (("worker", "outside"), ("outside", "worker"), ("worker", "outside")):
        turns.free()
        assert not turns.ask(last), "it had the last place"
        assert turns.ask(first)
    turns.free()
    assert turns.ask("worker")
    turns.free()
    assert turns.ask("worker"), "nobody waits"


@pytest.mark.usefixtures("patient")
def test_several_places_alternate_between_workers_and_outside_programs(db, run_id, limits):
    turns = Turns(db, run_id, limits, places=3)
    assert [turns.ask("worker") for _ in range(3)] == [True] * 3
    assert not turns.ask("outside")
    turns.free(0)
    turns.free(1)
    assert turns.ask("worker")
    assert not turns.ask("worker")
    assert turns.ask("outside")


@pytest.mark.usefixtures("patient")
def test_a_refused_client_stops_counting_as_waiting(db, run_id, limits):
    turns = Turns(db, run_id, limits, places=1)
    assert turns.ask("worker")
    assert not turns.ask("outside")
    turns.free()
    assert not turns.ask("worker")
    with db.write() as conn:
        conn.execute(
            update(runs_table).values(outside_asked_at=runs_table.c.outside_asked_at - group_admission.WAITS_S)
        )
    assert turns.ask("worker")


def test_a_stopped_run_admits_no_group(db, run_id, limits):
    db.transact(runs.set_status, run_id, "stopping")
    with pytest.raises(RequestError) as caught, db.write() as conn:
        group_admission.admit(conn, run_id, limits, outside=False)
    assert (caught.value.status, caught.value.code) == (409, "run_stopping")
    assert counters(db, run_id) == (0, 0, 0)
