"""`agentrl run create`: creates a run in the database without starting processes."""

from __future__ import annotations

from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json
from agentrl.launch import dataset_facts, run_folder
from agentrl.models import resolve_model
from agentrl.rollout.agent import load_tasks
from agentrl.rollout.held_out import settings_of
from agentrl.rollout.rewards.scored_agent import check_agent
from agentrl.store import Connection, Database, runs


def create_run(config: RunConfig, key: str) -> str:
    """Create the run of `config` and its folder; returns its database URL. Raises UserError for an invalid config.

    A run without agent or tasks serves programs that agentrl does not start. A run that only records needs no weights.
    """
    if config.runs_agents:
        check_agent(config)
    settings_of(config)
    task_data = [] if config.tasks is None else load_tasks(config.tasks, seed=config.seed, storage=config.storage)
    datasets = dataset_facts.facts_of(config)
    model = resolve_model(config.model, weights=config.steps > 0)
    url = run_folder.database_url(config)
    with run_folder.locked(config.run_dir):
        run_folder.check_new(config, url)
        database = Database(url)
        try:
            database.upgrade()
            database.transact(insert, config, model, key, task_data, datasets)
        finally:
            database.close()
        run_folder.write_config(config, config.run_dir / "config.yaml")
        run_folder.remember_database(config.run_dir, url)
    return url


def insert(
    conn: Connection, config: RunConfig, model: Path, key: str, task_data: list[Json], datasets: dict[str, Json]
) -> str:
    """Insert a run with its tasks, and record its `datasets`; returns its id. Raises UserError when the name is
    taken.
    """
    run_id = runs.create(
        conn,
        name=config.name,
        config=run_folder.stored(config),
        task_data=task_data,
        base_model=str(model),
        key=key,
        seed=config.seed,
        steps=config.steps,
    )
    dataset_facts.record(conn, run_id, datasets)
    return run_id
