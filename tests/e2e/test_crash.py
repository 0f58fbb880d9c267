"""The short version of `make crash`: kill -9 to every part of a real run, and to its supervisor; nothing is lost.

The engine is the test session's, so that a killed supervisor is back in seconds; tests/e2e/test_run.py kills an engine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chaos import killer, losses
from chaos.killer import Outcome
from chaos.run import SUPERVISOR, Run
from sqlalchemy import func, insert, select, update

from agentrl.engine.server_process import Server
from agentrl.store import Database
from agentrl.store.tables import step_trajectories, steps

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 20


@pytest.fixture
def run(tmp_path: Path, empty_database_url: str, sglang_engine: Server) -> Iterator[Run]:
    run = Run(tmp_path.resolve(), empty_database_url, 2, STEPS, engine_url=sglang_engine.url, think_s=0.1)
    yield run
    run.stop()


@pytest.mark.parametrize("database_kind", ["postgresql"])  # test_run.py and `make crash` kill parts of runs on SQLite
def test_nothing_is_lost_when_processes_are_killed(run: Run) -> None:
    rng = random.Random(run.seed)
    parts = [*killer.FREQUENT, SUPERVISOR]
    rng.shuffle(parts)
    kills = [replace(killer.planned(rng, part), pause_s=rng.random()) for part in parts]
    outcome = Outcome()
    killer.disturb(run, kills, outcome, say=lambda _: None)
    assert [kill.part for kill in outcome.kills] == parts

    found = losses.check(run)
    assert found.details == []
    assert found.violations == []
    assert min(found.responses, found.rewards, found.trained) > STEPS * 4

    check_that_the_check_sees(run)


def check_that_the_check_sees(run: Run) -> None:
    """Every kind of loss, one of each, is found."""
    lines = [json.loads(line) for line in run.ledger.read_text().splitlines()]
    call, other = [line for line in lines if line["kind"] == "call"][:2]
    reward, lost = [line for line in lines if line["kind"] == "reward"][:2]
    forged = [call | {"id": "0" * 32}, other | {"digest": "?"}, lost | {"key": "?"}, reward | {"value": 7.0}]
    with run.ledger.open("a") as ledger:
        ledger.writelines(json.dumps(line) + "\n" for line in forged)
    database = Database(run.database_url)
    with database.write() as conn:
        trained = conn.execute(select(step_trajectories).order_by(step_trajectories.c.trajectory_id)).first()
        other_step = select(steps.c.id).where(steps.c.id != trained.step_id, steps.c.state == "published").limit(1)
        again = trained._asdict() | {"step_id": conn.execute(other_step).scalar_one()}
        conn.execute(insert(step_trajectories).values(again))
        first = select(func.min(steps.c.id)).scalar_subquery()
        conn.execute(update(steps).where(steps.c.id == first).values(epoch=steps.c.epoch + 100))
    database.close()
    run.steps += 1
    found = losses.check(run)
    assert found.violations
    assert found.losses.pop("trained_twice") > 0
    assert found.losses.pop("two_trainers") > 0
    assert found.losses.pop("missing_steps") == 2  # the run is not at its last step, and the step is not published
    assert found.losses == {
        "missing_responses": 1,
        "changed_responses": 1,
        "missing_rewards": 1,
        "changed_rewards": 1,
        "missing_trajectories": 0,
        "leftover_processes": 0,
    }
