"""On GPUs that engines share with the trainer, a part starts only when it may, and a dead one's memory is free."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from databases import Databases
from run_records import create_run

from agentrl.launch import shared_gpus
from agentrl.launch.shared_gpus import SharedGpus
from agentrl.store import Database
from agentrl.store.training import memory_leases, trainer_epochs

URL = "http://127.0.0.1:30000"


@pytest.fixture
def database(databases: Databases) -> Iterator[Database]:
    with databases.lent("sqlite") as url:
        opened = Database(url)
        yield opened
        opened.close()


@pytest.fixture
def run_id(database: Database) -> str:
    return database.transact(create_run)


@pytest.fixture
def epoch(database: Database, run_id: str) -> int:
    return database.transact(trainer_epochs.begin_epoch, run_id)


@pytest.fixture
def shared(database: Database, run_id: str, monkeypatch: pytest.MonkeyPatch) -> SharedGpus:
    monkeypatch.setattr(shared_gpus, "POLL_S", 0.01)
    return SharedGpus(database, run_id, {"engine-0": URL}, 60.0)


async def test_an_engine_starts_when_the_trainers_turn_is_over(
    shared: SharedGpus, database: Database, run_id: str, epoch: int
) -> None:
    assert database.transact(memory_leases.grant, run_id, epoch, 60.0, "r") == []
    await shared.may_start("trainer")  # it is no engine
    await shared.may_start("engine-1")  # not of this machine
    starting = asyncio.create_task(shared.may_start("engine-0"))
    assert not (await asyncio.wait([starting], timeout=0.1))[0]
    database.transact(memory_leases.end, run_id, epoch, "r")
    await starting
    assert database.transact(memory_leases.grant, run_id, epoch, 60.0, "r") == [URL]
    await shared.ended("engine-0")
    assert database.transact(memory_leases.grant, run_id, epoch, 60.0, "r") == []


async def test_a_trainer_that_died_loses_its_turn_at_once(
    shared: SharedGpus, database: Database, run_id: str, epoch: int
) -> None:
    database.transact(memory_leases.grant, run_id, epoch, 60.0, "r")
    await shared.ended("proxy")
    assert database.query(memory_leases.is_held, run_id)
    await shared.ended("trainer")
    assert not database.query(memory_leases.is_held, run_id)


async def test_parts_that_share_nothing_wait_for_nothing(database: Database, run_id: str, epoch: int) -> None:
    database.transact(memory_leases.grant, run_id, epoch, 60.0, "r")
    alone = SharedGpus(database, run_id, {}, 60.0)
    await alone.may_start("engine-0")
    await alone.ended("engine-0")
    await alone.ended("trainer")
    assert database.query(memory_leases.is_held, run_id)
