"""Environments whose library has a Python environment of its own: agents and sources that talk to a program in it.

    agent: agentrl.environments.foreign:Verifiers
    agent_args: &verifiers {python: .venv-verifiers/bin/python, taskset: my_taskset}
    tasks: {path: agentrl.environments.foreign:verifiers_tasks, args: *verifiers}

A rollout worker starts one program, which runs all its episodes; it ends with the worker. If it dies, its episodes fail
and the next one starts another.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from agentrl.domain.schemas import Json
from agentrl.environment import without_secrets
from agentrl.errors import AgentRLError, UserError
from agentrl.processes.hosted import HostedProcess, NotStarted, ProcessDied
from agentrl.rollout.score import DEFAULT_NAME, Result, Reward, finite

PROGRAMS = Path(__file__).parent / "programs"
START_TIMEOUT_S = 600.0
"""How long a program may import its library and open its environment."""
CANCEL_S = 30.0
"""How long a program may take to end a cancelled episode, before it is killed."""
LONGEST_ANSWER_BYTES = 16 * 2**20
TAIL = 1_500


class EnvironmentFailed(AgentRLError):
    """An episode failed in its environment. The message is the environment's."""


class ForeignAgent:
    """Runs episodes in a program. The rewards are the environment's, by their names."""

    program: ClassVar[str]

    def __init__(self, *, python: str, **settings: Any) -> None:
        check(python, "agent_args.python")
        self._command = [python, str(PROGRAMS / self.program)]
        self._settings = settings
        self._process: HostedProcess | None = None
        self._starting = asyncio.Lock()

    async def run(self, data: Json, **extra: Any) -> Result:
        """Run one episode. Raises EnvironmentFailed with the environment's error."""
        process = await self._running()
        episode = {"task": data, "base_url": extra["base_url"], "api_key": extra["api_key"]}
        try:
            with process.request(episode | {"is_eval": bool(extra.get("is_eval"))}) as (number, reply):
                try:
                    answer = await asyncio.shield(reply)
                except asyncio.CancelledError:
                    await asyncio.shield(self._cancel(process, number, reply))
                    raise
        except ProcessDied as died:
            raise EnvironmentFailed(f"{self.program}: {died}") from None
        if "error" in answer:
            raise EnvironmentFailed(str(answer["error"]).replace(extra["api_key"], "[session key]"))
        named = dict(answer["rewards"]).items()
        source = self.program.removesuffix("_program.py")
        return Result(
            rewards=tuple(
                Reward(value=finite(value), name=name or DEFAULT_NAME, source=source) for name, value in named
            )
        )

    async def aclose(self) -> None:
        """End the program. Without this it ends with the process that runs the agent."""
        if self._process is not None:
            await self._process.stop()

    async def _running(self) -> HostedProcess:
        async with self._starting:
            if self._process is None or self._process.retiring:
                if self._process is not None:
                    await self._process.stop()
                self._process = await self._started()
            return self._process

    async def _started(self) -> HostedProcess:
        try:
            return await HostedProcess.launch(
                self._command,
                {"settings": self._settings},
                longest_line=LONGEST_ANSWER_BYTES,
                doing=f"starting {self.program}",
                limit_s=START_TIMEOUT_S,
            )
        except NotStarted as problem:
            raise EnvironmentFailed(str(problem)) from None

    async def _cancel(self, process: HostedProcess, number: int, reply: asyncio.Future[Json]) -> None:
        process.send({"cancel": number})
        done, _ = await asyncio.wait([reply], timeout=CANCEL_S)
        if not done:
            await process.stop("an episode could not be cancelled, and its program was killed")


class Verifiers(ForeignAgent):
    """Runs episodes of an environment of the library verifiers."""

    program = "verifiers_program.py"


class OneByOne:
    """Runs episodes in several programs, since the library can run only one at a time in a process."""

    kind: ClassVar[type[ForeignAgent]]

    def __init__(self, *, processes: int = 2, **settings: Any) -> None:
        if processes < 1:
            raise UserError(f"agent_args.processes: must be at least 1, got {processes}")
        self._agents = [self.kind(**settings) for _ in range(processes)]
        self._free: asyncio.LifoQueue[ForeignAgent] = asyncio.LifoQueue()  # one that has started is taken first
        for agent in self._agents:
            self._free.put_nowait(agent)

    async def run(self, data: Json, **extra: Any) -> Result:
        """Run one episode, when a program is free."""
        agent = await self._free.get()
        try:
            return await agent.run(data, **extra)
        finally:
            self._free.put_nowait(agent)

    async def aclose(self) -> None:
        """End the programs."""
        for agent in self._agents:
            await agent.aclose()


class InspectProgram(ForeignAgent):
    """Evaluates samples of an Inspect task."""

    program = "inspect_program.py"


class InspectAI(OneByOne):
    """Evaluates samples of an Inspect task, each in a session, with its scores as rewards."""

    kind = InspectProgram


class HarborProgram(ForeignAgent):
    """Runs trials of Harbor tasks."""

    program = "harbor_program.py"


class Harbor(OneByOne):
    """Runs trials of Harbor tasks, each in a session, with the verifier's rewards."""

    kind = HarborProgram


def harbor_tasks(*, python: str, processes: int = 1, **settings: Any) -> Iterator[Json]:
    """The folders of Harbor tasks."""
    return tasks_of(HarborProgram.program, python, settings)


def inspect_tasks(*, python: str, processes: int = 1, **settings: Any) -> Iterator[Json]:
    """The samples of an Inspect task."""
    return tasks_of(InspectProgram.program, python, settings)


def verifiers_tasks(*, python: str, **settings: Any) -> Iterator[Json]:
    """The tasks of a verifiers taskset."""
    return tasks_of(Verifiers.program, python, settings)


def tasks_of(program: str, python: str, settings: Json) -> Iterator[Json]:
    """The tasks that a program prints. Raises UserError with the end of its stderr."""
    check(python, "tasks.args.python")
    command = [python, str(PROGRAMS / program), "tasks", json.dumps(settings)]
    env = without_secrets(os.environ)
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=said, text=True) as child,
    ):
        assert child.stdout is not None
        try:
            for text in child.stdout:
                yield json.loads(text)
            if child.wait() != 0:
                said.seek(0)
                end = said.read().strip()[-TAIL:]
                raise UserError(f"tasks: {program} ended with exit status {child.returncode}: {end}")
        finally:
            child.kill()


def check(python: str, field: str) -> None:
    """Raise UserError unless there is such an interpreter."""
    if shutil.which(python) is None:
        raise UserError(f"{field}: cannot run {python!r}; in a checkout, make setup-environments builds it")
