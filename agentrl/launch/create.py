"""`agentrl run create`: creates a run in the database without starting processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json
from agentrl.launch import code_facts, run_folder
from agentrl.launch.tasks import dataset_facts, task_ingestion
from agentrl.launch.tasks.task_ingestion import Progress
from agentrl.models import resolve_model
from agentrl.rollout.held_out import settings_of
from agentrl.rollout.rewards.scored_agent import check_agent
from agentrl.store import Connection, Database, runs, task_rows
from agentrl.store.task_rows import NewSource
from agentrl.visible import say

ENDED = ("finished", "failed")
"""The states in which a run takes no further tasks."""


def create_run(config: RunConfig, key: str, show: Callable[[Progress], None] = lambda progress: None) -> str:
    """Create the run of `config`, its folder and its tasks; returns its database URL. Raises UserError for an invalid
    config.

    A run without agent or tasks serves programs that agentrl does not start. A run that only records needs no weights.
    If an earlier call was killed while it stored the tasks, this one stores the rest. `show` gets the progress. The
    tasks of a function without `limit` are stored as the run takes them, until the run ends.
    """
    if config.runs_agents:
        check_agent(config)
    code_facts.check_functions(config)
    settings_of(config)
    sources = task_ingestion.check(config)
    datasets = dataset_facts.facts_of(config)
    model = resolve_model(config.model, weights=config.steps > 0)
    url = run_folder.database_url(config)
    with run_folder.locked(config.run_dir):
        database = Database(url)
        try:
            database.upgrade()
            config = task_ingestion.with_known_steps(database, config)
            run_id = database.query(_unfinished, config)
            if run_id is None:
                run_folder.check_new(config, url)
                run_id = database.transact(insert, config, model, key, sources, datasets)
            else:
                database.transact(_continued, run_id, config, key)
            for changed in database.transact(code_facts.record, run_id, code_facts.facts_of(config)):
                say(changed, err=True)
            run_folder.write_config(config, config.run_dir / "config.yaml")
            run_folder.remember_database(config.run_dir, url)
            for progress in task_ingestion.ingest(database, run_id, config, only_endless_wait=True):
                show(progress)
                if progress.waits:
                    if database.query(runs.get, run_id).status in ENDED:
                        break
                    time.sleep(task_ingestion.POLL_S)
            if config.epochs is not None:
                counted = task_ingestion.with_steps(database, run_id, config)
                run_folder.write_config(counted, config.run_dir / "config.yaml")
        finally:
            database.close()
    return url


def _unfinished(conn: Connection, config: RunConfig) -> str | None:
    """The run of this name, if not all of its tasks are stored."""
    found = runs.find(conn, config.name)
    if found is None or all(source.complete for source in task_rows.sources(conn, found.id)):
        return None
    return str(found.id)


def _continued(conn: Connection, run_id: str, config: RunConfig, key: str) -> None:
    run_folder.check_resume(runs.get(conn, run_id).config, config)
    runs.reopen(conn, run_id, key=key, config=run_folder.stored(config), steps=config.steps)


def insert(
    conn: Connection, config: RunConfig, model: Path, key: str, sources: list[NewSource], datasets: dict[str, Json]
) -> str:
    """Insert a run with its sources of tasks, and record its `datasets`; returns its id. Raises UserError when the
    name is taken.
    """
    run_id = runs.create(
        conn,
        name=config.name,
        config=run_folder.stored(config),
        sources=sources,
        base_model=str(model),
        key=key,
        seed=config.seed,
        steps=config.steps,
    )
    dataset_facts.record(conn, run_id, datasets)
    return run_id
