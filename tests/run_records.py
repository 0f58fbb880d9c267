"""Runs in a database, as tests need them: what a test does not name has a default."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from agentrl.domain.schemas import Json
from agentrl.store import runs


def create_run(
    conn: Connection,
    *,
    name: str = "test",
    config: Json | None = None,
    task_data: list[Json] | None = None,
    base_model: Path | str = "tiny",
    key: str = "run-key",
    steps: int = 1,
) -> str:
    """Create a run with one empty task, for `steps` steps; returns its id."""
    return runs.create(
        conn,
        name=name,
        config=config or {},
        task_data=[{}] if task_data is None else task_data,
        base_model=str(base_model),
        key=key,
        seed=0,
        steps=steps,
    )
