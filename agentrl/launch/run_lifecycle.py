"""How a run begins and ends, wherever its processes are: its row, its folder, its watch, its summary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl import trace_endpoint
from agentrl.configs.engine_config import engine_url
from agentrl.configs.episodes.teachers import is_folder, teachers_of
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError, ConfigError, root_cause
from agentrl.launch import code_facts, create, run_folder
from agentrl.launch.parts import scorer_models
from agentrl.launch.tasks import dataset_facts, task_ingestion
from agentrl.launch.views import curve, log_follower, snapshot, summary
from agentrl.launch.views.live_panel import Display
from agentrl.launch.views.snapshot import Snapshot
from agentrl.models import resolve_model
from agentrl.models.same_tokens import check_same_tokens
from agentrl.rollout.held_out import settings_of
from agentrl.rollout.rewards import scored_agent
from agentrl.storage.object_store import ObjectStore
from agentrl.storage.storage_probe import probe
from agentrl.store import Connection, Database, activity, engine_claims, events, runs
from agentrl.store.db.codec import new_id
from agentrl.store.task_rows import NewSource
from agentrl.store.training import memory_leases
from agentrl.trainer.metrics import metric_sinks
from agentrl.visible import say

POLL_S = 1.0
STOPPED = "stopped"


class Stopped(AgentRLError):
    """The user stopped the run; the same command resumes it."""


class Detached(Stopped):
    """The supervisor ended alone. The run goes on, and another supervisor attaches to it."""


def check_trainable(config: RunConfig) -> None:
    """Raise ConfigError for a config that is valid for recording but not for training."""
    missing = ([] if config.runs_agents else ["agent"]) + ([] if config.tasks is not None else ["tasks"])
    if missing:
        raise ConfigError(f"`agentrl train` needs {' and '.join(missing)} in the config, to run the agent on the tasks")
    if config.steps == 0:
        raise ConfigError("steps: 0 trains nothing; use `agentrl run create` for a run that only records")


def check_agent(config: RunConfig) -> None:
    """Load the agent, the user's functions, tasks, metric sinks and the encoder of spans, and try the storage, so that
    errors appear before any process starts.
    """
    scored_agent.check_agent(config)
    code_facts.check_functions(config)
    task_ingestion.check(config)
    settings_of(config)
    metric_sinks.require(config.metrics)
    trace_endpoint.require(config.metrics.traces)
    if config.storage.url is not None:
        probe(ObjectStore(config.storage.url))


def open_run(database: Database, config: RunConfig, model: Path, run_key: str) -> tuple[str, str]:
    """Create the run with its first tasks, or reopen the existing run of this name; returns its id and status.

    Raises UserError when the folder has checkpoints of a run that is not in the database.
    """
    log_follower.check(config, model)
    known = database.query(runs.find, config.name) is not None
    config = task_ingestion.with_known_steps(database, config)
    sources = [] if known else task_ingestion.check(config)
    if not known:
        run_folder.check_new(config, database.url)
    run_id, status = database.transact(_open_run, config, model, run_key, sources, dataset_facts.facts_of(config))
    for changed in database.transact(code_facts.record, run_id, code_facts.facts_of(config)):
        say(changed, err=True)
    for progress in task_ingestion.ingest(database, run_id, config):
        if progress.usable:
            break
    return run_id, status


def _open_run(
    conn: Connection, config: RunConfig, model: Path, run_key: str, sources: list[NewSource], datasets: dict[str, Json]
) -> tuple[str, str]:
    stored = run_folder.stored(config)
    existing = runs.find(conn, config.name)
    if existing is not None:
        run_folder.check_resume(existing.config, config)
        dataset_facts.check_unchanged(conn, existing.id, datasets)
        runs.reopen(conn, existing.id, key=run_key, config=stored, steps=config.steps)
        memory_leases.forget(conn, existing.id)
        engine_claims.forget(conn, existing.id, keep=[*map(engine_url, config.engine.urls)])
        return existing.id, runs.get(conn, existing.id).status
    return create.insert(conn, config, model, run_key, sources, datasets), "running"


def report(config: RunConfig, database: Database, run_id: str) -> Json:
    """Write `summary.json`, `curve.png` and the rest of the trajectories' text from the store."""
    log_follower.finish(config, database, run_id, say)
    now = database.query(snapshot.take, run_id)
    wall_s = sum(row.data["wall_s"] for row in database.query(events.of_run, run_id, STOPPED))
    tokens = database.query(activity.total_output_tokens, run_id)
    result = summary.summarize(now, config.evaluation.main_setting, wall_s, tokens)
    run_dir = config.run_dir
    summary.write(result, run_dir / "summary.json")
    curve.save_png(run_dir / "curve.png", config.name, result["rewards"], result["evaluations"])
    return result


async def watch(database: Database, run_id: str, display: Display, check: Callable[[Snapshot], None]) -> None:
    """Update the display, and set the run to finished when its last step is published.

    Raises AgentRLError with the run's error when the run has failed, for example through failing sessions, and what
    `check` raises.
    """
    while True:
        now = await asyncio.to_thread(database.query, snapshot.take, run_id, display.shown_step)
        check(now)
        if "serving" in now.engines.values():
            display.update(now)
        if now.status == "failed":
            run = await asyncio.to_thread(database.query, runs.get, run_id)
            raise AgentRLError(f"run {run.name} failed: {run.error or 'no reason recorded'}")
        if now.published_step >= now.target_steps and now.status == "running":
            await asyncio.to_thread(database.transact, runs.set_status, run_id, "finished")
        await asyncio.sleep(POLL_S)


@contextmanager
def outcome_recorded(database: Database, run_id: str) -> Iterator[None]:
    """Record how the block ended, and its duration: `finished`, `failed` with the error, or `paused` when stopped.

    Nothing is recorded for Detached.
    """
    started = time.monotonic()
    outcome: str | None = "paused"
    error = None
    try:
        yield
        outcome = "finished"
    except Detached:
        outcome = None
        raise
    except AgentRLError as problem:
        if not isinstance(problem, Stopped):
            outcome, error = "failed", str(problem)
        raise
    finally:
        if outcome is not None:
            database.transact(_close_run, run_id, outcome, error, time.monotonic() - started, new_id())


def check_other_models(config: RunConfig, model: Path) -> None:
    """Raise ModelFolderError when the folder of a teacher, or of a model that the critic starts from, is missing or has
    other tokens than the run's model.
    """
    for teacher in filter(is_folder, teachers_of(config.trainer.teacher)):
        check_same_tokens(model, resolve_model(teacher))
    if config.trainer.critic_from is not None:
        check_same_tokens(model, resolve_model(str(config.trainer.critic_from)), "trainer.critic_from")


def check_scorers(config: RunConfig) -> None:
    """Raise ModelFolderError when a reward model that the run serves itself is missing."""
    for model in scorer_models(config):
        resolve_model(model)


def check_ended(work: asyncio.Future[None], run_dir: Path) -> None:
    """Raise Stopped when the run's work was cancelled, and the first cause when it failed."""
    if work.cancelled():
        raise Stopped(f"stopped; the same command resumes {run_dir}")
    if (problem := work.exception()) is not None:
        raise root_cause(problem)


def check_database(config: RunConfig, database: Database) -> None:
    """Raise ConfigError for a run on several hosts whose store is a SQLite file."""
    if database.is_sqlite:
        raise ConfigError(f"placement: {config.placement} needs PostgreSQL, for hosts cannot share a SQLite file")


def _close_run(conn: Connection, run_id: str, outcome: str, error: str | None, wall_s: float, event_id: str) -> None:
    if runs.get(conn, run_id).status != "failed":  # else the run already has its error
        runs.set_status(conn, run_id, outcome, error)
    events.record(conn, run_id, STOPPED, {"wall_s": wall_s, "as": outcome}, "train", event_id)
