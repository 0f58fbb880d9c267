"""A rollout worker: runs training groups and evaluations until the run is finished. Step 0 is evaluated first."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Sequence

from agentrl import environment
from agentrl.client import AsyncClient
from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.errors import root_cause
from agentrl.rollout.agent_processes.agent_pool import agents_of
from agentrl.rollout.group_filter import load_accept
from agentrl.rollout.heart import beating
from agentrl.rollout.held_out import Evaluator, Setting, settings_of
from agentrl.rollout.http import agent_http
from agentrl.rollout.pace import RunFailed
from agentrl.rollout.runner import is_finished, run_groups
from agentrl.rollout.worker_display import Progress, shown

START_PATIENCE_S = 900.0
"""How long to wait for the proxy or its engines to start."""


async def work(
    config: RunConfig,
    settings: Sequence[Setting],
    *,
    base_url: str | None,
    api_key: str | None,
    owner: str,
    console: Console,
) -> None:
    """Run until the run is finished. Can be called again after a crash; it abandons the groups that `owner` left.

    Each call is a new instance (`OWNER/INSTANCE`). So a late request of a dead instance does not count for its
    successor, and the sessions that it opened are abandoned too.
    """
    owner = f"{owner}/{secrets.token_hex(4)}"
    progress = Progress()
    async with (
        agents_of(config) as agent,
        AsyncClient(base_url, api_key, timeout_s=START_PATIENCE_S, on_wait=progress.waits) as client,
        agent_http(config.proxy.request_timeout_s) as http,
        shown(progress, console),
        beating(client, owner, progress.running_now),
    ):
        evaluator = Evaluator(
            client,
            agent,
            settings,
            samples=config.evaluation.samples,
            every=config.evaluation.every,
            owner=owner,
            http=http,
            timeout_s=config.rollout.timeout_s,
            max_concurrent=config.evaluation.max_concurrent,
            progress=progress.beside(),
        )
        await client.request("POST", "/groups/abandon", {"owner": owner})
        run = await client.request("GET", "/api/run")
        if int(run["published_step"]) == 0:  # evaluate the base weights before training
            await evaluator.catch_up(run)
        async with asyncio.TaskGroup() as parts:
            parts.create_task(evaluator.follow())
            if not is_finished(run):
                await run_groups(
                    client,
                    agent,
                    http=http,
                    timeout_s=config.rollout.timeout_s,
                    max_concurrent_groups=config.rollout.max_concurrent_groups,
                    owner=owner,
                    progress=progress,
                    accept=load_accept(config.rollout.accept),
                )


def run_worker(
    config: RunConfig, *, base_url: str | None = None, api_key: str | None = None, owner: str | None = None
) -> None:
    """Run `work` to its end. SIGTERM and Ctrl-C abandon the open sessions first. Raises RunFailed.

    The agent runs in this process, so the run's key is removed from the environment, and, once the evaluations' tasks
    are read, the access to the object storage.
    """
    api_key = api_key or os.environ.get(environment.RUN_KEY)
    environment.drop_secrets()
    settings = settings_of(config)
    environment.drop_storage()
    name = owner or f"{socket.gethostname()}-{os.getpid()}"

    async def main() -> None:
        proxy = {"base_url": base_url, "api_key": api_key}
        task = asyncio.ensure_future(work(config, settings, **proxy, owner=name, console=Console()))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        await task

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        raise SystemExit(143) from None
    except BaseExceptionGroup as errors:
        stopped = errors.subgroup(RunFailed)
        if stopped is None:
            raise
        raise root_cause(stopped) from None
