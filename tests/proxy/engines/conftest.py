"""Replicas of a run that have pools of engines, without HTTP of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from databases import Databases
from replica_fleet import ReplicaFleet
from run_records import create_run

from agentrl.configs.run_config import RunConfig
from agentrl.store import Database
from agentrl.store.sessions.session_limits import Limits


@pytest.fixture
async def replicas(databases: Databases, database_kind: str, tiny_model: Path) -> AsyncIterator[ReplicaFleet]:
    with databases.lent(database_kind) as url:
        database = Database(url)
        with database.write() as conn:
            run_id = create_run(conn, task_data=[{}], steps=10, base_model=tiny_model)
        limits = Limits.of(RunConfig.model_validate({"name": "r", "model": "tiny", "agent": "a:B", "tasks": "t"}))
        async with aiohttp.ClientSession() as http:
            yield ReplicaFleet(database, run_id, http, tiny_model, limits)
        database.close()
