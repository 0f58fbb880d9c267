"""Many parallel episodes with MCP servers from npm: each has its own files, and no process is left.

`.venv/bin/python -m pytest -m long tests/proxy/test_mcp_episodes.py` after `make setup-servers`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tokenizers import Tokenizer

from agentrl.client import AsyncClient
from agentrl.configs.config_files import parse_config
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http
from agentrl.rollout.rewards.scored_agent import agent_of
from agentrl.testing import FakeEngine

pytestmark = pytest.mark.long
SERVERS = Path(__file__).parents[2] / ".venv-servers" / "bin"
EPISODES, AT_ONCE = 64, 8


class NoteTaker:
    """The engine's model: it writes a note, lists and reads it in one turn, and answers with what it read."""

    def __init__(self, folder: Path) -> None:
        self.says: Any = None
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def __call__(self, input_ids: list[int], _: Any) -> list[int]:
        text = self._tokenizer.decode(input_ids, skip_special_tokens=False)
        number = re.findall(r"Keep (\d+)\.", text)[-1]
        if "Successfully wrote" not in text:
            return self.says(f"write_file({json.dumps({'path': 'note.txt', 'content': f'<{number}>'})})")
        if not (read := re.findall(r"<(\d+)>", text)[1:]):
            return self.says(f"read_text_file({json.dumps({'path': 'note.txt'})})")
        return self.says(read[-1])


@pytest.fixture
def fake_engine(tiny_model: Path) -> Iterator[FakeEngine]:
    model = NoteTaker(tiny_model)
    with FakeEngine(model) as engine:
        engine.model = model  # type: ignore[attr-defined]
        yield engine


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    many = {"rollout": {"group_size": 2, "max_concurrent_groups": 1000}, "trainer": {"groups_per_step": 1000}}
    return run_config | many | {"agent": "tool_agent", "tasks": "t.jsonl"}


@pytest.fixture
def noted(own_proxy: Any) -> Any:
    """A proxy whose engine takes notes."""
    own_proxy.engine.model.says = own_proxy.says
    return own_proxy


def config() -> dict[str, Any]:
    if not (SERVERS / "mcp-server-filesystem").exists():
        pytest.skip("no .venv-servers: run `make setup-servers`")
    server = {"mcp": [str(SERVERS / "mcp-server-filesystem"), "{folder}"], "cwd": "{folder}"}
    tools = [server | {"only": ["write_file", "read_text_file", "list_directory"]}]
    args = {"tools": tools, "template": "Keep {n}.", "max_turns": 4}
    return {"name": "test", "model": "tiny", "tasks": "t.jsonl", "agent": "tool_agent", "agent_args": args}


def servers(of: int) -> list[psutil.Process]:
    """The filesystem servers, and everything else that a process has started."""
    return psutil.Process(of).children(recursive=True)


async def test_no_process_is_left_by_many_episodes(noted: Any) -> None:
    settings = parse_config(config() | {"reward": "exact"})
    places, most = asyncio.Semaphore(AT_ONCE), 0

    async def episode(client: AsyncClient, http: Any, agent: Any, n: int) -> Outcome:
        nonlocal most
        task = {"n": n, "answer": str(n)}
        async with places:
            most = max(most, AT_ONCE - places._value)
            session = (await client.request("POST", "/groups", {"is_eval": True, "task": task}))["sessions"][0]
            return await play(client, agent, task, session, http=http, timeout_s=120, is_eval=True)

    started = time.monotonic()
    async with (
        AsyncClient(noted.url, "run-key", timeout_s=60) as client,
        agent_http(60) as http,
        agent_of(settings) as agent,
    ):
        outcomes = await asyncio.gather(*(episode(client, http, agent, n) for n in range(100, 100 + EPISODES)))
    print(f"{EPISODES} episodes, {most} at a time, in {time.monotonic() - started:.1f} s")
    assert Counter((outcome.error, outcome.reward) for outcome in outcomes) == {(None, 1.0): EPISODES}
    assert most == AT_ONCE
    left = [one for one in servers(os.getpid()) if "filesystem" in " ".join(one.cmdline())]
    assert left == []


def test_a_killed_worker_leaves_no_process(noted: Any, tmp_path: Path) -> None:
    slow = {"processes": 2, "group_size": 2, "max_concurrent_groups": 4}
    (tmp_path / "hold.py").write_text("def hold(completion):\n    import time\n    time.sleep(600)\n")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config() | {"reward": {"function": "hold:hold", "timeout_s": 600}, "rollout": slow}))
    command = [sys.executable, "-m", "agentrl", "rollout", "--config", str(path), "--url", noted.url]
    worker = subprocess.Popen(
        [*command, "--run-key", "run-key"], cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    everything: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 300
        while sum("filesystem" in " ".join(one.cmdline()) for one in everything) < AT_ONCE:
            assert worker.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
            everything = [one for one in servers(worker.pid) if one.is_running()]
        os.kill(worker.pid, signal.SIGKILL)
    finally:
        worker.kill()
        worker.wait(60)
    print(f"{len(everything)} processes of a worker that was killed")
    assert psutil.wait_procs(everything, timeout=60)[1] == []
    assert [
        one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or ())
    ] == []
