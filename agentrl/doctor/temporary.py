"""A temporary run for one examination: an engine and a proxy with a database in a temporary folder."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.errors import EngineUnavailable
from agentrl.files import last_lines
from agentrl.launch import connect, parts, run_folder
from agentrl.launch.part_process import keep_running
from agentrl.launch.parts import Plan
from agentrl.launch.views import snapshot
from agentrl.store import Connection, Database, runs

POLL_S = 0.25
NAME = "doctor"

OnProgress = Callable[[float, str], None]
"""Called while the engine starts, with the elapsed seconds and the last line of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A temporary proxy: its URL, a run key, and the model's folder."""

    url: str
    key: str
    model: str


@asynccontextmanager
async def place(model: Path, on_progress: OnProgress) -> AsyncIterator[Place]:
    """Start an engine and a proxy for `model`; both end with the block.

    Raises EngineUnavailable, PartFailed or UserError; in an exception group once the block has begun.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as folder:
        plan = _plan(model, Path(folder))
        database = Database(plan.database_url)
        try:
            database.upgrade()
            run_id = database.transact(_create_run, plan)
            async with asyncio.TaskGroup() as services:
                tasks = [
                    services.create_task(keep_running(part, max_restarts=0))
                    for part in [*parts.engines(plan), parts.proxy(plan)]
                ]
                await _until_serving(plan, database, run_id, on_progress)
                yield Place(url=plan.proxy_url, key=plan.run_key, model=str(model))
                for task in tasks:  # after an error they are cancelled already
                    task.cancel()
        finally:
            database.close()


def _create_run(conn: Connection, plan: Plan) -> str:
    """Insert the run, with one task."""
    return runs.create(
        conn,
        name=NAME,
        config=run_folder.stored(plan.config),
        task_data=[{}],
        base_model=str(plan.model),
        key=plan.run_key,
        seed=plan.config.seed,
        steps=plan.config.steps,
    )


def _plan(model: Path, folder: Path) -> Plan:
    config = RunConfig(
        name=NAME,
        model=str(model),
        agent="agentrl.agents.reverse:ReverseAgent",
        tasks="agentrl.agents.reverse:train_tasks",
        steps=1,
        runs_dir=folder,
    )
    proxy_port, engine_ports = parts.choose_ports(config)
    return Plan(
        config=config,
        model=model,
        database_url=f"sqlite:///{folder / 'doctor.db'}",
        admin_key=f"arl-admin-{secrets.token_urlsafe(24)}",
        run_key=f"arl-run-{secrets.token_urlsafe(24)}",
        proxy_port=proxy_port,
        engine_ports=engine_ports,
        engine_keys=connect.choose_engine_keys({}, config, engine_ports),
    )


async def _until_serving(plan: Plan, database: Database, run_id: str, on_progress: OnProgress) -> None:
    started, limit_s = time.monotonic(), plan.config.engine.start_timeout_s
    log = plan.config.run_dir / "logs" / "engine-0.log"
    while "serving" not in (await asyncio.to_thread(database.query, snapshot.take, run_id)).engines.values():
        elapsed_s, last_line = time.monotonic() - started, "".join(last_lines(log))
        if elapsed_s > limit_s:
            raise EngineUnavailable(f"the engine is not serving after {limit_s:g} s: {last_line}")
        on_progress(elapsed_s, last_line)
        await asyncio.sleep(POLL_S)
