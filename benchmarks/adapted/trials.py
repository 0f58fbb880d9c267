"""Harbor: an agent writes a file in a sandbox, and a test compares it. bubblewrap stands in for containers."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from adapted.subject import Episode, Subject

PYTHON = Path(__file__).parents[2] / ".venv-harbor" / "bin" / "python"
WORDS = ["".join(chr(97 + (n * step) % 26) for step in (3, 5, 7, 11)) for n in range(20)]
BUBBLEWRAP = '''
import asyncio
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult

SYSTEM = ["/usr", "/bin", "/lib", "/lib64", "/etc"]


class Bubblewrap(BaseEnvironment):
    """A folder as root, with the system's programs and without a network."""

    @staticmethod
    def type():
        return "bubblewrap"

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self.root = Path(tempfile.mkdtemp())
        for name in ("app", "tests", "solution", "logs/agent", "logs/verifier", "logs/artifacts", "tmp"):
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete):
        shutil.rmtree(self.root)

    def at(self, path):
        return self.root / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path):
        self.at(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self.at(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self.at(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self.at(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self.at(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--bind", str(self.root), "/"]
        for path in SYSTEM:
            words += ["--ro-bind-try", path, path]
        words += ["--proc", "/proc", "--dev", "/dev", "--chdir", cwd or "/app", "sh", "-c", command]
        child = await asyncio.create_subprocess_exec(
            *words, env={"PATH": "/usr/bin:/bin", **(env or {})}, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        out, error = await asyncio.wait_for(child.communicate(), timeout_sec or 120)
        return ExecResult(stdout=out.decode(), stderr=error.decode(), return_code=child.returncode)
'''
WRITER = '''
import os

from harbor.agents.base import BaseAgent
from openai import AsyncOpenAI


class Writer(BaseAgent):
    """Writes the model's answer into a file of the environment."""

    @staticmethod
    def name():
        return "writer"

    def version(self):
        return "1"

    def __init__(self, *args, address, key, **kwargs):
        super().__init__(*args, **kwargs)
        self.client = AsyncOpenAI(base_url=address, api_key=key)

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        messages = [{"role": "user", "content": instruction}]
        reply = await self.client.chat.completions.create(model="default", messages=messages)
        answer = reply.choices[0].message.content or ""
        await environment.exec(command='printf %s "$ANSWER" > /app/answer.txt', env={"ANSWER": answer})
'''
TEST = """#!/bin/sh
expected={expected}
answer=$(cat /app/answer.txt)
right=0.0
[ "$answer" = "$expected" ] && right=1.0
short=0.0
[ ${{#answer}} -le ${{#expected}} ] && short=0.25
printf '{{"right": %s, "short": %s}}' $right $short > /logs/verifier/reward.json
"""


def subject() -> Subject:
    """Words backwards, often with a wrong letter."""
    files = {"bubblewrap_environment.py": BUBBLEWRAP, "writer_agent.py": WRITER}
    for number, word in enumerate(WORDS):
        files |= {
            f"words/word-{number:02}/task.toml": 'schema_version = "1.4"\n',
            f"words/word-{number:02}/instruction.md": f"Write it backwards: {word}\n",
            f"words/word-{number:02}/environment/Dockerfile": "FROM scratch\n",
            f"words/word-{number:02}/tests/test.sh": TEST.format(expected=word[::-1]),
        }
    return Subject(config=config, says=says, rewards=rewards, files=files)


def config(folder: Path) -> dict[str, Any]:
    """The tasks in the run's folder, in a sandbox."""
    args: dict[str, Any] = {"python": str(PYTHON), "tasks": "words"}
    agent = {"import_path": "writer_agent:Writer", "kwargs": {"address": "{base_url}", "key": "{api_key}"}}
    trial = {"agent": agent, "environment": {"import_path": "bubblewrap_environment:Bubblewrap"}}
    return {
        "agent": "agentrl.environments.foreign:Harbor",
        "agent_args": args | trial | {"trials_dir": "trials"},
        "tasks": {"path": "agentrl.environments.foreign:harbor_tasks", "args": args},
    }


def says(prompt: str, rng: random.Random) -> str:
    """The word backwards, or almost, or more."""
    word = re.findall(r"backwards: ([a-z]+)", prompt)[-1][::-1]
    return word if rng.random() < 0.4 else word[: rng.randint(0, 3)] + rng.choice(["x", " and so on"])


def rewards(episode: Episode) -> list[float]:
    """The rewards in the verifier's file of the trial."""
    (file,) = episode["folder"].glob(f"trials/*__{episode['id']}/verifier/reward.json")
    return [sum(json.loads(file.read_text()).values())]
