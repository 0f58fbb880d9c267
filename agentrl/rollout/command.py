"""Agents that are programs: one process plays one session, and finds everything it needs in its environment.

    run(data) ─► guard ─► COMMAND    stdin empty, stdout and stderr where ours go
                             │  OPENAI_*, ANTHROPIC_*, AGENTRL_*; the task in AGENTRL_TASK_FILE
                             ▼
                  exit status 0, and a reward in AGENTRL_REWARD_FILE if it has not rewarded by itself

Nothing of it outlives the episode: when it ends, is too slow, is stopped, or when we die, the guard
(agentrl/processes/guard.py) ends the whole process group.
"""

from __future__ import annotations

import asyncio
import codecs
import errno
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.environment import PROXY_URL, RUN_KEY, without_secrets
from agentrl.errors import AgentRLError, UserError
from agentrl.processes import children
from agentrl.visible import LINES, visible

LONGEST_TASK_BYTES = 65_536
"""A longer task is only in the file: Linux takes at most 128 KiB in one variable."""
TAIL_BYTES = 1_500
"""How much of the end of stderr an error quotes."""
DRAIN_TIMEOUT_S = 1.0
"""How long stderr is read after the command's end: a daemon that left the group may hold it open."""


DEFAULTS = {"ANTHROPIC_MODEL": "default"}
"""What a program is given where our own environment says nothing: Claude Code asks for a Claude without it."""


class CommandFailed(AgentRLError):
    """The program ended with another exit status than 0."""


def environment(base_url: str, api_key: str) -> dict[str, str]:
    """The environment of a program that plays a session: our own without secrets, and the session's variables."""
    return DEFAULTS | without_secrets(os.environ) | variables(base_url, api_key)


def variables(base_url: str, api_key: str) -> dict[str, str]:
    """Where SDKs and `agentrl.client` find a session: what they open with it are sub-agents' sessions."""
    root, _, rest = base_url.partition("/sessions/")
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_AUTH_TOKEN": api_key,  # one that is ours would take the key's place
        PROXY_URL: root,
        RUN_KEY: api_key,
        "AGENTRL_SESSION_ID": rest.partition("/")[0],
    }


def check(command: Sequence[str]) -> None:
    """Raise UserError unless the program of a command can be found and run, before anything is started for it."""
    if not command:
        raise UserError("an empty command")
    name = command[0]
    if shutil.which(name) is None:
        why = errno.EACCES if os.sep in name and os.path.exists(name) else errno.ENOENT
        raise UserError(f"cannot run {name!r}: {os.strerror(why)}")


@dataclass(frozen=True)
class CommandAgent:
    """Plays a session by running a program."""

    command: Sequence[str]

    async def run(self, data: Json, **extra: Any) -> float | Mapping[str, float] | None:
        """Run the program; returns what it wrote to AGENTRL_REWARD_FILE. Cancelled: it is ended.

        Raises CommandFailed with the end of stderr, UserError for a reward that cannot be read.
        """
        base_url, api_key = extra["base_url"], extra["api_key"]
        with tempfile.TemporaryDirectory(prefix="agentrl-", ignore_cleanup_errors=True) as folder:
            env = environment(base_url, api_key) | _files(Path(folder), data)
            env["AGENTRL_IS_EVAL"] = str(int(extra.get("is_eval", False)))
            status, tail = await _play(self.command, env)
            if status:
                said = tail.replace(api_key, "[session key]")[-TAIL_BYTES:]
                raise CommandFailed(f"{shlex.join(self.command)[:200]} ended with exit status {status}: {said}")
            return _reward(Path(env["AGENTRL_REWARD_FILE"]))


def _files(folder: Path, data: Json) -> dict[str, str]:
    """Write the task; returns the variables that name it and the place for the reward."""
    task, file = json.dumps(data), folder / "task.json"
    file.write_text(task)
    found = {"AGENTRL_TASK_FILE": str(file), "AGENTRL_REWARD_FILE": str(folder / "reward.json")}
    short = len(task) <= LONGEST_TASK_BYTES  # JSON as we write it is ASCII
    return found | {"AGENTRL_TASK": task if short else ""}


async def _play(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Exit status (128 + N for signal N) and the end of stderr. Cancelled: nothing of it is left."""
    tail = bytearray()
    ours, its = os.pipe()  # not asyncio's: the end of a process whose pipe a daemon holds open is not reported
    reading = asyncio.create_task(_follow(ours, tail))
    try:
        try:
            process = await children.start(command, env=env, stdout=None, stderr=its)
        finally:
            os.close(its)
        try:
            status = await process.wait()
            await asyncio.wait([reading], timeout=DRAIN_TIMEOUT_S)
        finally:
            if process.returncode is None:
                await asyncio.shield(children.stop(process))
    finally:
        reading.cancel()
    return status, tail.decode(errors="replace").strip()


async def _follow(pipe: int, tail: bytearray) -> None:
    """Pass what comes through a pipe on to our stderr, and keep its end. Closes the pipe."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", buffering=0)
    )
    try:
        while part := await stream.read(65_536):
            sys.stderr.write(visible(decoder.decode(part), LINES + "\r"))
            tail += part
            del tail[: -2 * TAIL_BYTES]  # more than is quoted, so that no key is cut in two before it is taken out
    finally:
        transport.close()


def _reward(file: Path) -> float | Mapping[str, float] | None:
    """Raises UserError for anything but a number, {completion_id: number} or nothing."""
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    if not text:
        return None
    try:
        reward = json.loads(text)
    except ValueError:
        reward = text
    if isinstance(reward, (str, list, bool)):
        raise UserError(f"AGENTRL_REWARD_FILE: {text[:100]!r} is neither a number nor {{completion_id: number}}")
    found: float | Mapping[str, float] | None = reward
    return found
