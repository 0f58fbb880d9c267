"""The supervisor of a run on many hosts: writes what the run wants, lets a scheduler place it, and follows it in SQL.

    parts, secrets ──► placement.check ──► placement.apply ──► watch until finished ──► stop ──► remove

It sees no process. Task runners start, restart and end the commands, and the database says how they are. So it may die
at any time: the same command attaches to the run again, and nothing is started twice.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.domain.schemas import Json
from agentrl.engine.engine_keys import new_key as new_engine_key
from agentrl.environment import ADMIN_KEY, DATABASE_URL, ENGINE_KEY, RUN_KEY, STORAGE
from agentrl.errors import AgentRLError
from agentrl.launch import connect, run_folder, run_lifecycle
from agentrl.launch.placed_parts import placed_parts
from agentrl.launch.run_lifecycle import POLL_S, Detached
from agentrl.launch.tasks import task_ingestion
from agentrl.launch.views import log_follower
from agentrl.launch.views.live_panel import Display
from agentrl.models import resolve_model
from agentrl.placement.folder_proof import add_token
from agentrl.placement.part_spec import PartSpec
from agentrl.placement.run_secrets import SECRETS_FILE, adopt_storage, read_secrets, write_secrets
from agentrl.placement.runner_watch import watch_runners
from agentrl.placement.scheduler import Placement
from agentrl.storage.storage_users import storage_users
from agentrl.store import Connection, Database, part_ranks


def train(config: RunConfig, console: Console, placement: Placement, *, from_base: bool = False) -> Json:
    """Run `config` to its end on the hosts of a scheduler, resume it, or attach to it; returns the summary.

    Raises UserError and Stopped.
    """
    run_lifecycle.check_trainable(config)
    adopt_storage(config.run_dir)
    with run_folder.locked(config.run_dir):
        run_lifecycle.check_agent(config)
        database_url = run_folder.database_url(config)
        database = Database(database_url)
        run_lifecycle.check_database(config, database)
        specs = parts_of(config, from_base)
        placement.check(specs)
        with console.status(f"preparing model {config.model}"):
            model = resolve_model(config.model)
            run_lifecycle.check_other_models(config, model)
        try:
            database.upgrade()
            keys = secrets_of(config, database_url)
            run_id, status = run_lifecycle.open_run(database, config, model, keys[RUN_KEY])
            if config.epochs is not None:
                with console.status("storing all tasks, whose number gives the steps of `epochs`"):
                    config = task_ingestion.with_steps(database, run_id, config)
            run_folder.write_config(config, config.run_dir / "config.yaml")
            run_folder.remember_database(config.run_dir, database_url)
            write_secrets(config.run_dir, keys)
            if status == "finished" and (config.run_dir / "summary.json").exists():
                console.print(f"run {config.name} is finished; give more steps, or another name")
            else:
                begin(database, run_id, placement, specs, config.run_dir)
                with Display(config, console) as display, run_lifecycle.outcome_recorded(database, run_id):
                    asyncio.run(_main(config, database, run_id, placement, display))
            return run_lifecycle.report(config, database, run_id)
        finally:
            database.close()


def parts_of(config: RunConfig, from_base: bool = False) -> list[PartSpec]:
    """The parts of the run. On a device `auto` they take GPUs: clusters without any say `cpu`."""
    return placed_parts(
        config,
        (config.run_dir / "config.yaml").resolve(),
        engines_on_gpu=config.engine.device != "cpu",
        trainer_on_gpu=config.trainer.device != "cpu",
        from_base=from_base,
    )


def secrets_of(config: RunConfig, database_url: str) -> dict[str, str]:
    """The run's secrets: from the environment, else those that its processes have, else new ones.

    Those of the object storage are from the environment, into which `adopt_storage` has put those of the processes.
    """
    before: Mapping[str, str] = {}
    if (config.run_dir / SECRETS_FILE).exists():
        before = read_secrets(config.run_dir)
    admin_key, run_key = connect.choose_keys({**before, **os.environ})
    engine_key = os.environ.get(ENGINE_KEY) or before.get(ENGINE_KEY) or new_engine_key()
    ours = {DATABASE_URL: database_url, ADMIN_KEY: admin_key, RUN_KEY: run_key, ENGINE_KEY: engine_key}
    storage = STORAGE & os.environ.keys() if storage_users(config) else ()
    return ours | {name: os.environ[name] for name in sorted(storage)}


def begin(database: Database, run_id: str, placement: Placement, specs: list[PartSpec], run_dir: Path) -> None:
    """Declare and place the parts, or attach to those that run.

    When an earlier supervisor died while it stopped them, its stop is finished first: schedulers do not start a task
    runner again that has ended because it was to stop.
    """
    if database.query(part_ranks.are_over, run_id, [spec.name for spec in specs]):
        asyncio.run(_stop(database, run_id, placement))
    proof = {"folder_token": add_token(run_dir)}
    declared = {spec.name: spec.model_dump(mode="json") | proof for spec in specs}
    database.transact(part_ranks.declare, run_id, declared)
    placement.apply(specs)


async def _main(config: RunConfig, database: Database, run_id: str, placement: Placement, display: Display) -> None:
    """Follow the run until it ends or Ctrl-C; then stop all parts. A second Ctrl-C kills them.

    Raises Detached, and stops nothing, on SIGTERM where the scheduler moves the supervisor to another host.
    """
    work = asyncio.ensure_future(_follow(config, database, run_id, placement, display))
    loop = asyncio.get_running_loop()
    asked, moved = 0, False

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            display.note("stopping all parts; press Ctrl-C again to kill them")
            work.cancel()
        else:
            placement.remove(kill=True)

    def leave() -> None:
        nonlocal moved
        moved = True
        work.cancel()

    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGTERM, leave if placement.moves_supervisor else stop)
    await asyncio.wait([work])
    if moved and work.cancelled():
        raise Detached("this supervisor ends; all parts go on, and the next supervisor follows them")
    await _stop(database, run_id, placement)
    run_lifecycle.check_ended(work, config.run_dir)


async def _follow(config: RunConfig, database: Database, run_id: str, placement: Placement, display: Display) -> None:
    """Show the run's state until it is finished and its workers have ended. Raises AgentRLError when a part fails."""
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(run_lifecycle.watch(database, run_id, display, lambda now: None))
        asking = group.create_task(watch_runners(placement, database, run_id, display.note, config.max_restarts))
        storing = group.create_task(task_ingestion.follow(database, run_id, config, display.note))
        dumping = group.create_task(log_follower.follow(config, database, run_id, display.note))
        said: set[str] = set()
        while not await asyncio.to_thread(database.query, part_ranks.ended_by_themselves, run_id):
            if failed := await asyncio.to_thread(database.query, part_ranks.failures, run_id):
                raise AgentRLError("; ".join(failed.values()))
            for line in await asyncio.to_thread(database.query, _places, run_id):
                if line not in said:
                    said.add(line)
                    display.note(line)
            await asyncio.sleep(POLL_S)
        watching.cancel()
        asking.cancel()
        storing.cancel()
        dumping.cancel()


def _places(conn: Connection, run_id: str) -> list[str]:
    """A line for each start of a process: what runs where."""
    running = [rank for rank in part_ranks.ranks(conn, run_id) if rank.state == "running"]
    return [f"{rank.part}/{rank.rank} runs on {rank.host} (start {rank.starts})" for rank in running]


async def _stop(database: Database, run_id: str, placement: Placement) -> None:
    """Ask all parts to stop, wait until their runners have ended, and take them away."""
    await asyncio.to_thread(database.transact, part_ranks.stop, run_id)
    while any(rank.live for rank in await asyncio.to_thread(database.query, part_ranks.ranks, run_id)):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    await asyncio.to_thread(placement.remove)
