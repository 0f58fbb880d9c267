"""A process that runs agents: `python -m agentrl.rollout.agent_processes.agent_host N`, N an open socket.

It has the agent of the run, its reward functions and its HTTP clients, and runs any number of episodes at the same
time. It ends with its connection; a guard ends it when the worker dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import sys
from functools import partial
from typing import Any

from agentrl.client import error_text
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError
from agentrl.rollout.agent import Agent
from agentrl.rollout.agent_processes.agent_messages import LONGEST_LINE_BYTES, line, result_json
from agentrl.rollout.http import AgentHttp, agent_http
from agentrl.rollout.rewards.scored_agent import agent_of
from agentrl.rollout.score import result_of

NICENESS = 5
"""Agents leave the processor to heartbeats, proxies and engines."""


async def main(connected: str) -> None:
    """Load the agent, and run episodes until the connection ends."""
    connection = socket.socket(fileno=int(connected))
    connection.set_inheritable(False)
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LONGEST_LINE_BYTES)

    def send(message: Json) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(line(message))

    os.nice(NICENESS)
    setup = json.loads(await reader.readline())
    config = RunConfig.model_validate(setup["config"])
    try:
        async with agent_of(config) as agent, agent_http(config.proxy.request_timeout_s) as http:
            send({"ready": True})
            await _serve(reader, agent, http, send)
    except AgentRLError as error:
        send({"error": str(error)})
        await writer.drain()


async def _serve(reader: asyncio.StreamReader, agent: Agent, http: AgentHttp, send: Any) -> None:
    running: dict[int, asyncio.Task[None]] = {}
    try:
        while text := await reader.readline():
            message = json.loads(text)
            if "run" in message:
                number = message["run"]
                running[number] = task = asyncio.create_task(_episode(number, message, agent, http, send))
                task.add_done_callback(partial(_forget, running, number))
            elif "cancel" in message:
                if cancelled := running.get(message["cancel"]):
                    cancelled.cancel()
            else:
                send({"pong": message["ping"], "rss_mb": _rss_mb()})
    finally:
        for task in list(running.values()):
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def _episode(number: int, message: Json, agent: Agent, http: AgentHttp, send: Any) -> None:
    extra = dict(message["extra"])
    of_session = http.extra(extra.pop("base_url"), extra.pop("api_key"))
    try:
        found = result_of(await agent.run(message["data"], **of_session, **extra))
        send({"id": number, "result": result_json(found)})
    except asyncio.CancelledError:
        send({"id": number, "error": "cancelled"})
    except Exception as error:  # noqa: BLE001 - an agent is foreign code: whatever it raises fails its session only
        send({"id": number, "error": error_text(error)})


def _forget(running: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    running.pop(number, None)


def _rss_mb() -> float:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:  # not Linux: the peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    sys.stdout = sys.stderr
    asyncio.run(main(*sys.argv[1:]))
