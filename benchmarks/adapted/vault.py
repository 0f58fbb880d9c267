"""OpenEnv: a server with two tools, written with its SDK; a vault to open in five turns of a dial."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapted.subject import Episode, Subject
from agentrl.engine.server_process import free_port

PYTHON = Path(__file__).parents[2] / ".venv-openenv" / "bin" / "python"
PORT = free_port()
REPLAYING: list[subprocess.Popen[str]] = []
SERVER = '''
import random
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Vault(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("vault")
        self.number, self.tries = 0, 0

        @server.tool
        def look() -> str:
            """Look at the vault."""
            return "a dial with the numbers 1 to 8"

        @server.tool
        def turn(number: int) -> str:
            """Turn the dial to a number."""
            self.tries += 1
            return "open" if number == self.number else "higher" if number < self.number else "lower"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.tries = random.Random(seed).randint(1, 8), 0
        return Observation(done=False, reward=0.0)

    async def step_async(self, action, timeout_s=None, **kwargs):
        found = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if getattr(action, "tool_name", "") == "turn":
            opened = found.result is not None and found.result.data == "open"
            found.done = opened or self.tries >= 5
            found.reward = 1.0 / self.tries if opened else -0.125
        return found

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=False, reward=0.0)

    @property
    def state(self):
        return State(episode_id="", step_count=0)


if __name__ == "__main__":
    app = create_app(Vault, CallToolAction, CallToolObservation, env_name="vault", max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''
REPLAY = """
import asyncio, json, sys
from openenv.core.generic_client import GenericEnvClient

async def main():
    for text in sys.stdin:
        episode = json.loads(text)
        client = GenericEnvClient(base_url=sys.argv[1])
        await client.connect()
        await client.reset(**episode["reset"])
        total = 0.0
        for call in episode["calls"]:
            result = await client.step({"type": "call_tool", "tool_name": call["name"], "arguments": call["arguments"]})
            total += result.reward or 0.0
            if result.done:
                break
        await client.close()
        print(json.dumps(total), flush=True)

asyncio.run(main())
"""
TASKS = """
def tasks():
    for seed in range(200):
        yield {"prompt": "Open the vault.", "reset": {"seed": seed}}
"""


def subject() -> Subject:
    """Turns of the dial at random."""
    return Subject(
        config=config,
        says=says,
        rewards=rewards,
        service=service,
        files={"vault_server.py": SERVER, "vault_tasks.py": TASKS, "replay.py": REPLAY},
    )


def config(folder: Path) -> dict[str, Any]:
    """The tools of the server."""
    return {
        "agent": "agentrl.environments.open_env:OpenEnv",
        "agent_args": {"url": f"http://127.0.0.1:{PORT}", "max_turns": 7},
        "tasks": "vault_tasks:tasks",
    }


@contextmanager
def service(folder: Path) -> Iterator[None]:
    """The server; and its own client, which plays episodes again."""
    with (folder / "vault.log").open("wb") as log:
        server = subprocess.Popen([PYTHON, "vault_server.py", str(PORT)], cwd=folder, stdout=log, stderr=log)
    command = [PYTHON, "replay.py", f"http://127.0.0.1:{PORT}"]
    replay = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    REPLAYING.append(replay)
    try:
        yield
    finally:
        for process in (server, replay):
            process.terminate()
            process.wait()


def says(prompt: str, rng: random.Random) -> str:
    """A call of a tool."""
    arguments: dict[str, Any]
    name, arguments = ("turn", {"number": rng.randint(1, 8)}) if rng.random() < 0.9 else ("look", {})
    if rng.random() < 0.05:
        arguments = {"number": "eight"}
    return f"{name}({json.dumps(arguments)})"


def rewards(episode: Episode) -> list[float]:
    """The library's own client plays the recorded calls again."""
    replay = REPLAYING[-1]
    assert replay.stdin is not None
    assert replay.stdout is not None
    calls = [{"name": one["name"], "arguments": json.loads(one["arguments"])} for one in episode["tool_calls"]]
    replay.stdin.write(json.dumps({"reset": episode["task"]["reset"], "calls": calls}) + "\n")
    replay.stdin.flush()
    return [float(replay.stdout.readline())]
