"""Real SGLang servers for tests, and the weight versions that a run gives them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.domain.schemas import VersionState
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import Server, free_port, launch
from agentrl.store import Database
from agentrl.store.tables import weight_versions

START_TIMEOUT_S = 570.0
"""A machine that is busy with other tests starts a server slowly."""
ENGINE_KEY = "arl-engine-of-tests-0123456789abcdef"


@contextmanager
def serving(model: Path, log_file: Path, max_running_requests: int = 8, **settings: Any) -> Iterator[Server]:
    """A healthy server until the block ends."""
    spec = EngineSpec(
        model=model, port=free_port(), log_file=log_file, max_running_requests=max_running_requests, **settings
    )
    server = launch(spec)
    try:
        asyncio.run(server.wait_healthy(START_TIMEOUT_S))
        yield server
    finally:
        server.stop()


def add_version(database: Database, run_id: str, version: int, folder: Path, checksum: str | None = None) -> None:
    """Record a version as a trainer does before it is published."""
    row = weight_versions.insert().values(
        run_id=run_id,
        version=version,
        parent_version=version - 1,
        step=version,
        path=str(folder),
        checksum=checksum,
        state=VersionState.PENDING,
        created_at=0.0,
    )
    with database.write() as conn:
        conn.execute(row)
