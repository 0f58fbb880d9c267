"""The supervisor of `agentrl train`: starts the processes of a run on this machine, restarts them, and ends them.

    engines ─┐                          (after a restart the proxy reloads the run's version)
    proxy ───┼─ services: run until the workers are done
    trainer ─┤
    rollout ─┴─ workers: exit when the run is finished and evaluated

The processes share only the database and the proxy's address, so each can be restarted at any time. The supervisor
reads the run's state from the database in a thread, and retries while the database is unavailable for some seconds
(`Database.transact`, `query`). Ctrl-C stops the processes; the same command resumes the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from agentrl.configs import cautions
from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError, ConfigError, EngineUnavailable, root_cause
from agentrl.launch import connect, create, curve, parts, run_folder, snapshot, summary
from agentrl.launch.live_panel import Display
from agentrl.launch.part_process import Part, keep_running
from agentrl.launch.parts import Plan
from agentrl.launch.starts import Starts
from agentrl.models import resolve_model
from agentrl.processes.children import kill_tree
from agentrl.rollout.agent import load_agent, load_tasks
from agentrl.rollout.held_out import settings_of
from agentrl.store import Connection, Database, activity, engine_turns, events, runs
from agentrl.store.db.codec import new_id
from agentrl.trainer.metrics import metric_sinks

POLL_S = 1.0
STOPPED = "stopped"


class Stopped(AgentRLError):
    """The user stopped the run; the same command resumes it."""


def train(config: RunConfig, console: Console, *, from_base: bool = False) -> Json:
    """Run `config` to its end, or resume it; returns the summary. Raises UserError and Stopped.

    `from_base`: train a run without usable checkpoints again from the base weights, instead of raising.
    """
    check_trainable(config)
    admin_key, run_key = connect.choose_keys(os.environ)
    with run_folder.locked(config.run_dir):
        check_agent(config)
        with console.status(f"preparing model {config.model}"):
            model = resolve_model(config.model)
        proxy_port, engine_ports, moved = connect.choose_ports(config)
        plan = Plan(
            config=config,
            model=model,
            database_url=run_folder.database_url(config),
            admin_key=admin_key,
            run_key=run_key,
            proxy_port=proxy_port,
            engine_ports=engine_ports,
            engine_keys=connect.choose_engine_keys(os.environ, config, engine_ports),
            from_base=from_base,
        )
        database = Database(plan.database_url)
        try:
            database.upgrade()
            run_id, status = open_run(database, plan)
            run_folder.write_config(config, plan.config_file)
            run_folder.remember_database(config.run_dir, plan.database_url)
            if status == "finished" and (config.run_dir / "summary.json").exists():
                console.print(f"run {config.name} is finished; give more steps, or another name")
            else:
                with connect.env_file(plan) as env_file, Display(config, console) as display:
                    if moved:
                        display.note(moved)
                    for caution in cautions.of(config):
                        display.note(caution)
                    display.note(f"proxy: {plan.proxy_url}; other programs: . {env_file}")
                    _supervised(plan, database, run_id, display)
            return report(plan, database, run_id)
        finally:
            database.close()


def check_trainable(config: RunConfig) -> None:
    """Raise ConfigError for a config that is valid for recording but not for training."""
    missing = [key for key in ("agent", "tasks") if getattr(config, key) is None]
    if missing:
        raise ConfigError(f"`agentrl train` needs {' and '.join(missing)} in the config, to run the agent on the tasks")
    if config.steps == 0:
        raise ConfigError("steps: 0 trains nothing; use `agentrl run create` for a run that only records")


def check_agent(config: RunConfig) -> None:
    """Load the agent, tasks and metric sinks, so that errors appear before any process starts."""
    load_agent(config.agent, config.agent_args)
    load_tasks(config.tasks, seed=config.seed, limit=1)
    settings_of(config)
    metric_sinks.require(config.metrics)


def open_run(database: Database, plan: Plan) -> tuple[str, str]:
    """Create the run, or reopen the existing run of this name; returns its id and status.

    Raises UserError when the folder has checkpoints of a run that is not in the database.
    """
    config = plan.config
    known = database.query(runs.find, config.name) is not None
    return database.transact(_open_run, plan, [] if known else load_tasks(config.tasks, seed=config.seed))


def _open_run(conn: Connection, plan: Plan, task_data: list[Json]) -> tuple[str, str]:
    config = plan.config
    stored = run_folder.stored(config)
    existing = runs.find(conn, config.name)
    if existing is not None:
        run_folder.check_resume(existing.config, config)
        runs.reopen(conn, existing.id, key=plan.run_key, config=stored, steps=config.steps)
        engine_turns.forget(conn, existing.id, keep=[url.rstrip("/") for url in config.engine.urls])
        return existing.id, runs.get(conn, existing.id).status
    run_folder.check_new(config, plan.database_url)
    return create.insert(conn, config, plan.model, plan.run_key, task_data), "running"


def report(plan: Plan, database: Database, run_id: str) -> Json:
    """Write `summary.json` and `curve.png` from the store."""
    now = database.query(snapshot.take, run_id)
    wall_s = sum(row.data["wall_s"] for row in database.query(events.of_run, run_id, STOPPED))
    tokens = database.query(activity.total_output_tokens, run_id)
    result = summary.summarize(now, plan.config.evaluation.main_setting, wall_s, tokens)
    run_dir = plan.config.run_dir
    summary.write(result, run_dir / "summary.json")
    curve.save_png(run_dir / "curve.png", plan.config.name, result["rewards"], result["evaluations"])
    return result


def _supervised(plan: Plan, database: Database, run_id: str, display: Display) -> None:
    """Run the parts to their end, and record the duration and the outcome."""
    started = time.monotonic()
    outcome, error = "paused", None
    try:
        asyncio.run(_main(plan, database, run_id, display))
        outcome = "finished"
    except AgentRLError as problem:
        if not isinstance(problem, Stopped):
            outcome, error = "failed", str(problem)
        raise
    finally:
        database.transact(_close_run, run_id, outcome, error, time.monotonic() - started, new_id())


async def _main(plan: Plan, database: Database, run_id: str, display: Display) -> None:
    pids: dict[str, int] = {}
    work = asyncio.ensure_future(_run_parts(plan, database, run_id, display, pids))
    with _signals(work, display, pids):
        await asyncio.wait([work])
    if work.cancelled():
        raise Stopped(f"stopped; the same command resumes {plan.config.run_dir}")
    if (problem := work.exception()) is not None:
        raise root_cause(problem)


async def _run_parts(plan: Plan, database: Database, run_id: str, display: Display, pids: dict[str, int]) -> None:
    """Run the parts in two nested groups: the workers end before the services that they use."""
    starts = Starts(plan.config.engine.start_timeout_s)
    engines_by_name = dict(zip((part.name for part in parts.engines(plan)), plan.engine_urls, strict=False))

    def keep(part: Part) -> Coroutine[None, None, None]:
        async def record(kind: str, **data: object) -> None:
            facts = {"part": part.name, **data}
            await asyncio.to_thread(database.transact, events.record, run_id, kind, facts, "train", new_id())

        async def started(pid: int) -> None:
            pids[part.name] = pid
            if part.name in engines_by_name:
                starts.started(engines_by_name[part.name])
            await record("part_started", pid=pid)

        async def died(status: int) -> None:
            display.note(f"{part.name} ended with status {status}: restarting it ({part.log_file})")
            await record("part_died", status=status)

        return keep_running(part, max_restarts=plan.config.max_restarts, on_start=started, on_death=died)

    def finished() -> bool:
        run = database.query(runs.get, run_id)
        return bool(run.published_step >= run.target_steps)

    async with asyncio.TaskGroup() as services:
        background = [services.create_task(keep(part)) for part in [*parts.engines(plan), parts.proxy(plan)]]
        watch = services.create_task(_watch(database, run_id, display, starts))
        async with asyncio.TaskGroup() as workers:
            workers.create_task(keep(parts.trainer(plan, finished)))
            await _until_serving(plan, database, run_id, display)
            workers.create_task(keep(parts.rollout(plan, finished)))
        for task in [*background, watch]:
            task.cancel()


async def _watch(database: Database, run_id: str, display: Display, starts: Starts) -> None:
    """Update the display, and set the run to finished when its last step is published.

    Raises AgentRLError with the run's error when the run has failed, for example through failing sessions. Raises
    EngineUnavailable for an engine that is not serving `engine.start_timeout_s` after its start.
    """
    while True:
        now = await asyncio.to_thread(database.query, snapshot.take, run_id, display.shown_step)
        starts.check(now.engines)
        if "serving" in now.engines.values():
            display.update(now)
        if now.status == "failed":
            run = await asyncio.to_thread(database.query, runs.get, run_id)
            raise AgentRLError(f"run {run.name} failed: {run.error or 'no reason recorded'}")
        if now.published_step >= now.target_steps and now.status == "running":
            await asyncio.to_thread(database.transact, runs.set_status, run_id, "finished")
        await asyncio.sleep(POLL_S)


async def _until_serving(plan: Plan, database: Database, run_id: str, display: Display) -> None:
    """Wait until the proxy has a serving engine. Raises EngineUnavailable after `engine.start_timeout_s`."""
    started, limit_s = time.monotonic(), plan.config.engine.start_timeout_s
    while "serving" not in (await asyncio.to_thread(database.query, snapshot.take, run_id)).engines.values():
        elapsed_s = time.monotonic() - started
        if elapsed_s > limit_s:
            raise EngineUnavailable(f"no engine is serving after {limit_s:g} s (see {plan.config.run_dir / 'logs'})")
        display.starting(f"starting the engine: {elapsed_s:.0f} s")
        await asyncio.sleep(POLL_S)
    display.note("an engine is serving")


@contextmanager
def _signals(work: asyncio.Future[None], display: Display, pids: dict[str, int]) -> Iterator[None]:
    """On the first Ctrl-C or SIGTERM stop cleanly; on the second kill the processes."""
    loop = asyncio.get_running_loop()
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if stopping:
            for pid in pids.values():
                kill_tree(pid)
        else:
            stopping = True
            display.note("stopping; press Ctrl-C again to kill the processes")
            work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _close_run(conn: Connection, run_id: str, outcome: str, error: str | None, wall_s: float, event_id: str) -> None:
    if runs.get(conn, run_id).status != "failed":  # else the run already has its error
        runs.set_status(conn, run_id, outcome, error)
    events.record(conn, run_id, STOPPED, {"wall_s": wall_s, "as": outcome}, "train", event_id)
