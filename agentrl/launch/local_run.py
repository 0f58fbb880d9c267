"""The supervisor of `agentrl train`: starts the processes of a run on this machine, restarts them, and ends them.

    engines ─┐                          (after a restart the proxy reloads the run's version)
    proxy ───┼─ services: run until the workers are done
    scorers ─┤
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
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import httpx

from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.domain.schemas import Json
from agentrl.errors import EngineUnavailable
from agentrl.launch import connect, parts, run_folder
from agentrl.launch.part_process import Part, keep_running
from agentrl.launch.parts import Plan
from agentrl.launch.run_lifecycle import (
    POLL_S,
    check_agent,
    check_ended,
    check_other_models,
    check_scorers,
    check_trainable,
    open_run,
    outcome_recorded,
    report,
    watch,
)
from agentrl.launch.shared_gpus import SharedGpus
from agentrl.launch.starts import Starts
from agentrl.launch.tasks import task_ingestion
from agentrl.launch.views import log_follower, snapshot
from agentrl.launch.views.live_panel import Display
from agentrl.models import resolve_model
from agentrl.placement.plan_table import plan_lines
from agentrl.processes.children import kill_tree
from agentrl.store import Database, events, runs
from agentrl.store.db.codec import new_id


def train(config: RunConfig, console: Console, *, from_base: bool = False) -> Json:
    """Run `config` to its end, or resume it; returns the summary. Raises UserError and Stopped.

    `from_base`: train a run without usable checkpoints again from the base weights, instead of raising.
    """
    check_trainable(config)
    admin_key, run_key = connect.choose_keys(os.environ)
    assignment = parts.assign_here(config)
    with run_folder.locked(config.run_dir):
        check_agent(config)
        with console.status(f"preparing model {config.model}"):
            model = resolve_model(config.model)
            check_other_models(config, model)
            check_scorers(config)
        proxy_port, engine_ports, moved = connect.choose_ports(config)
        plan = Plan(
            config=config,
            model=model,
            database_url=run_folder.database_url(config),
            admin_key=admin_key,
            run_key=run_key,
            proxy_port=proxy_port,
            engine_ports=engine_ports,
            scorer_ports=parts.choose_scorer_ports(config, {proxy_port, *engine_ports}),
            engine_keys=connect.choose_engine_keys(os.environ, config, engine_ports),
            assignment=assignment,
            from_base=from_base,
        )
        database = Database(plan.database_url)
        try:
            database.upgrade()
            run_id, status = open_run(database, config, model, run_key)
            if config.epochs is not None:
                with console.status("storing all tasks, whose number gives the steps of `epochs`"):
                    config = task_ingestion.with_steps(database, run_id, config)
                plan = replace(plan, config=config)
            run_folder.write_config(config, plan.config_file)
            run_folder.remember_database(config.run_dir, plan.database_url)
            if status == "finished" and (config.run_dir / "summary.json").exists():
                console.print(f"run {config.name} is finished; give more steps, or another name")
            else:
                with connect.env_file(plan) as env_file, Display(config, console) as display:
                    if moved:
                        display.note(moved)
                    for line in [*plan_lines(assignment), *parts.sharing_lines(config, assignment)]:
                        display.note(line)
                    for caution in config.cautions:
                        display.note(caution)
                    display.note(f"proxy: {plan.proxy_url}; other programs: . {env_file}")
                    display.note(f"dashboard: agentrl ui {config.name}, or {plan.proxy_url}/ui/ with the run's key")
                    with outcome_recorded(database, run_id):
                        asyncio.run(_main(plan, database, run_id, display))
            return report(config, database, run_id)
        finally:
            database.close()


async def _main(plan: Plan, database: Database, run_id: str, display: Display) -> None:
    pids: dict[str, int] = {}
    work = asyncio.ensure_future(_run_parts(plan, database, run_id, display, pids))
    with _signals(work, display, pids):
        await asyncio.wait([work])
    check_ended(work, plan.config.run_dir)


async def _run_parts(plan: Plan, database: Database, run_id: str, display: Display, pids: dict[str, int]) -> None:
    """Run the parts in two nested groups: the workers end before the services that they use."""
    start_timeout_s = plan.config.engine.start_timeout_s
    starts = Starts(start_timeout_s)
    engines_by_name = dict(zip((part.name for part in parts.engines(plan)), plan.engine_urls, strict=False))
    shared = SharedGpus(database, run_id, engines_by_name if plan.takes_turns else {}, start_timeout_s)

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
            await shared.ended(part.name)
            await record("part_died", status=status)

        return keep_running(
            part,
            max_restarts=plan.config.max_restarts,
            before_start=partial(shared.may_start, part.name),
            on_start=started,
            on_death=died,
        )

    def finished() -> bool:
        run = database.query(runs.get, run_id)
        return bool(run.published_step >= run.target_steps)

    async with asyncio.TaskGroup() as services:
        serving = [*parts.engines(plan), parts.proxy(plan), *parts.scorers(plan)]
        background = [services.create_task(keep(part)) for part in serving]
        watching = services.create_task(watch(database, run_id, display, lambda now: starts.check(now.engines)))
        storing = services.create_task(task_ingestion.follow(database, run_id, plan.config, display.note))
        dumping = services.create_task(log_follower.follow(plan.config, database, run_id, display.note))
        async with asyncio.TaskGroup() as workers:
            workers.create_task(keep(parts.trainer(plan, finished)))
            await _until_serving(plan, database, run_id, display)
            await _until_scoring(plan, display)
            for part in parts.rollouts(plan, finished):
                workers.create_task(keep(part))
        for task in [*background, watching, storing, dumping]:
            task.cancel()


async def _until_serving(plan: Plan, database: Database, run_id: str, display: Display) -> None:
    """Wait until the proxy has a serving engine. Raises EngineUnavailable after `engine.start_timeout_s`."""

    async def is_serving() -> bool:
        return "serving" in (await asyncio.to_thread(database.query, snapshot.take, run_id)).engines.values()

    await _until(is_serving, plan, display, "the engine", "no engine is serving")
    display.note("an engine is serving")


async def _until_scoring(plan: Plan, display: Display) -> None:
    """Wait until each scorer of the run answers. Raises EngineUnavailable after `engine.start_timeout_s`."""
    async with httpx.AsyncClient(timeout=POLL_S, trust_env=False) as http:
        for model, url in plan.scorers.items():
            scorer = f"the scorer of {model}"
            await _until(partial(_answers, http, f"{url}/health"), plan, display, scorer, f"{scorer} does not answer")


async def _until(
    ready: Callable[[], Awaitable[bool]], plan: Plan, display: Display, starting: str, problem: str
) -> None:
    """Wait until `ready`, and show what is starting. Raises EngineUnavailable after `engine.start_timeout_s`."""
    started, limit_s = time.monotonic(), plan.config.engine.start_timeout_s
    while not await ready():
        elapsed_s = time.monotonic() - started
        if elapsed_s > limit_s:
            raise EngineUnavailable(f"{problem} after {limit_s:g} s (see {plan.config.run_dir / 'logs'})")
        display.starting(f"starting {starting}: {elapsed_s:.0f} s")
        await asyncio.sleep(POLL_S)


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).is_success
    except httpx.TransportError:
        return False


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
