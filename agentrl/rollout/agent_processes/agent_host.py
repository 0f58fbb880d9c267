"""A process that runs agents: `python -m agentrl.rollout.agent_processes.agent_host N`, N an open socket.

It has the agent of the run, its reward functions and its HTTP clients, and runs any number of episodes at the same
time. It ends with its connection; a guard ends it when the worker dies. On Linux it is forked from a template, which
has called `preload`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from functools import partial
from typing import Any

from agentrl.client import error_text
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError
from agentrl.processes.hosted import inherited, line, rss_mb
from agentrl.rollout.agent import Agent, import_agent
from agentrl.rollout.agent_processes.agent_messages import LONGEST_LINE_BYTES, result_json
from agentrl.rollout.agent_processes.first_uses import use_once
from agentrl.rollout.agent_processes.own_priority import OwnPriority
from agentrl.rollout.episode_stats import run_measured
from agentrl.rollout.http import AgentHttp, agent_http
from agentrl.rollout.rewards.scored_agent import agent_of


def preload(setup: Json) -> None:
    """Import what an agent needs, and use it once. Raises UserError."""
    config = RunConfig.model_validate(setup["config"])
    import_agent(config.agent)
    asyncio.run(use_once(config.proxy.request_timeout_s))


async def main(connected: str) -> None:
    """Load the agent, and run episodes until the connection ends."""
    reader, writer = await asyncio.open_unix_connection(sock=inherited(connected), limit=LONGEST_LINE_BYTES)

    def send(message: Json) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(line(message))

    setup = json.loads(await reader.readline())
    config = RunConfig.model_validate(setup["config"])
    try:
        async with agent_of(config) as agent, agent_http(config.proxy.request_timeout_s) as http:
            send({"ready": {"pid": os.getpid()}})
            with OwnPriority() as priority:
                await _serve(reader, agent, http, send, priority)
    except AgentRLError as error:
        send({"error": str(error)})
        await writer.drain()


async def _serve(reader: asyncio.StreamReader, agent: Agent, http: AgentHttp, send: Any, priority: OwnPriority) -> None:
    running: dict[int, asyncio.Task[None]] = {}
    try:
        while text := await reader.readline():
            message = json.loads(text)
            if "id" in message:
                number = message["id"]
                running[number] = task = asyncio.create_task(_episode(number, message, agent, http, send))
                task.add_done_callback(partial(_forget, running, number))
            elif "cancel" in message:
                if cancelled := running.get(message["cancel"]):
                    cancelled.cancel()
            else:
                send({"pong": message["ping"], "rss_mb": rss_mb(), "slowed": priority.slowed})
    finally:
        for task in list(running.values()):
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def _episode(number: int, message: Json, agent: Agent, http: AgentHttp, send: Any) -> None:
    extra = dict(message["extra"])
    of_session = http.extra(extra.pop("base_url"), extra.pop("api_key"))
    try:
        found = await run_measured(agent, message["data"], **of_session, **extra)
        send({"id": number, "result": result_json(found)})
    except asyncio.CancelledError:
        send({"id": number, "error": "cancelled"})
    except Exception as error:  # noqa: BLE001 - an agent is foreign code: whatever it raises fails its session only
        send({"id": number, "error": error_text(error)})


def _forget(running: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    running.pop(number, None)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
